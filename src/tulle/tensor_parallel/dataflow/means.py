"""Norms over all features, of which a rank may have a part if their means become those of all ranks."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from functools import cache
from types import FunctionType

from torch import nn

from tulle.tensor_parallel.dataflow.notes import At, Site
from tulle.tensor_parallel.dataflow.rewriting import Rewriting
from tulle.tensor_parallel.dataflow.sources import LAST, forward_of, source_of

_TREATS_EACH = frozenset(["add", "div", "float", "mul", "pow", "rsqrt", "sqrt", "square", "sub", "to", "type_as"])
"""Methods and functions by which norms are written out, next to the mean."""
_TELLS = frozenset(("shape", "ndim", "size", "numel", "normalized_shape", "hidden_size"))
"""Attributes that may say how many features there are."""


def is_over(norm: nn.Module, features: int) -> bool:
    """Whether a module is a norm over so many features that can be split with them."""
    if type(norm) in (nn.LayerNorm, nn.RMSNorm):
        return getattr(norm, "normalized_shape", None) == (features,)
    shapes = {tuple(own.shape) for own in norm.parameters()}
    is_plain = "Norm" in type(norm).__name__ and not norm._modules and not norm._buffers and shapes == {(features,)}
    return is_plain and bool(sites := means(norm)) and Rewriting(norm, sites).is_possible()


def means(norm: nn.Module) -> list[Site]:
    """Where a norm's code takes a mean over the last dimension, if all else in it treats each number by itself."""
    forward = forward_of(norm)
    return [Site(At(id(norm), forward, one), one) for one in _means_in(forward)] if forward is not None else []


@cache
def _means_in(forward: FunctionType) -> Sequence[ast.Call]:
    source = source_of(forward)
    nodes = [] if source is None else [*ast.walk(source)]
    calls = [one for one in nodes if isinstance(one, ast.Call)]
    found = [one for one in calls if isinstance(one.func, ast.Attribute) and one.func.attr == "mean"]
    is_each = all(
        one in found or (isinstance(one.func, ast.Attribute) and one.func.attr in _TREATS_EACH) for one in calls
    )
    is_other = any(isinstance(one, ast.MatMult | ast.Subscript | ast.AugAssign) for one in nodes)
    is_told = any(isinstance(one, ast.Attribute) and one.attr in _TELLS for one in nodes)
    return found if is_each and not is_other and not is_told and all(map(_is_of_last, found)) else []


def _is_of_last(mean: ast.Call) -> bool:
    """Whether a mean is over the last dimension alone, which stays."""
    named = {one.arg: ast.unparse(one.value) for one in mean.keywords}
    dims = [ast.unparse(one) for one in mean.args] or [named.get("dim", "")]
    return len(dims) == 1 and dims[0] in LAST and named.get("keepdim") == "True" and {*named} <= {"dim", "keepdim"}
