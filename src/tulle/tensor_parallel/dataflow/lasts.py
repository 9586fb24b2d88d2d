"""Whether a norm looks at the last dimension alone, and so at each head by itself, by all of the code that it calls."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Sequence
from functools import cache
from types import FunctionType
from typing import Any

from torch import nn

from tulle.tensor_parallel.dataflow.sources import LAST, names_at, source_of, written

_EACH = frozenset(
    [
        *("abs", "add", "bfloat16", "clamp", "contiguous", "div", "double", "exp", "float", "half", "log", "maximum"),
        *("mul", "neg", "pow", "reciprocal", "rsqrt", "sigmoid", "sqrt", "square", "sub", "tanh", "to", "type_as"),
        *("dim", "finfo", "get_default_dtype", "isinstance", "is_autocast_enabled", "is_scripting", "len"),
    ]
)
"""Functions, and methods of tensors, that treat each number by itself, or tell nothing of numbers."""
_ALONG = frozenset(["amax", "amin", "logsumexp", "mean", "norm", "normalize", "std", "sum", "var", "vector_norm"])
"""Those that look along the dimensions that they are told."""
_NORMS = frozenset(["fast_layer_norm", "fast_rms_norm", "layer_norm", "rms_norm"])
"""Those that are told the lengths of the last dimensions along which they look."""
_SHAPES = ("normalized_shape", "weight.shape")
_TURNED = frozenset(["H", "T", "mH", "mT"])
_DEPTH = 4


@cache
def looks_at_last_alone(function: FunctionType, kind: type[nn.Module], depth: int = _DEPTH) -> bool:
    """Whether a function, or a method of a class, looks at several numbers along the last dimension only.

    Args:
        function: As it was written.
        kind: The class.
        depth: So many functions that call each other are looked into.
    """
    source = source_of(function)
    return source is not None and depth > 0 and _Code(function, kind, depth).is_plain(source.body)


class _Code:
    """The code of a function.

    Args:
        function: The function.
        kind: Of whose methods it is one.
        depth: So many that call each other are looked into.
    """

    def __init__(self, function: FunctionType, kind: type[nn.Module], depth: int) -> None:
        self._names = names_at(function)
        self._itself = function.__code__.co_varnames[0]
        self._kind = kind
        self._depth = depth

    def is_plain(self, body: Sequence[ast.stmt]) -> bool:
        """Whether all that is called in it is known, and no item is taken but of the last dimension."""
        nodes = [node for one in body for node in ast.walk(one)]
        told = {id(one) for node in nodes for one in self._told(node)}
        return all(
            not isinstance(node, ast.MatMult | ast.FunctionDef | ast.Lambda)
            and (not isinstance(node, ast.Attribute) or node.attr not in _TURNED)
            and (not isinstance(node, ast.Call) or self._is_known(node))
            and (not isinstance(node, ast.Attribute) or node.attr != "shape" or id(node) in told)
            and (not isinstance(node, ast.Subscript) or id(node.value) in told)
            for node in nodes
        )

    def _told(self, node: ast.AST) -> list[ast.AST]:
        """Shapes of which no more is told than how long the last dimension is."""
        if isinstance(node, ast.Subscript) and ast.unparse(node.slice) == "-1":
            return [node.value] if isinstance(node.value, ast.Attribute) and node.value.attr == "shape" else []
        is_norm = isinstance(node, ast.Call) and _name_of(node) in _NORMS
        return [*node.args[1:2]] if is_norm and isinstance(node, ast.Call) else []

    def _is_known(self, call: ast.Call) -> bool:
        name, dims = _name_of(call), [one.value for one in call.keywords if one.arg == "dim"]
        if name in _EACH:
            return True
        if name in _ALONG:
            return any(ast.unparse(one) in LAST for one in dims or call.args)
        if name in _NORMS:
            return len(call.args) > 1 and self._is_of_one(call.args[1])
        if name == "size":
            return [ast.unparse(one) for one in call.args] == ["-1"]
        called = self._called(call)
        return called is not None and looks_at_last_alone(called, self._kind, self._depth - 1)

    def _is_of_one(self, shape: ast.expr) -> bool:
        """Whether lengths are that of one dimension."""
        if isinstance(shape, ast.Tuple | ast.List):
            return len(shape.elts) == 1 and not isinstance(shape.elts[0], ast.Starred)
        return ast.unparse(shape).removeprefix(f"{self._itself}.") in _SHAPES

    def _called(self, call: ast.Call) -> FunctionType | None:
        """The method of the class, or the function of its module, that is called; None for others."""
        found: Any = None
        if isinstance(call.func, ast.Name):
            found = self._names.get(call.func.id)
        elif isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == self._itself:
            found = inspect.getattr_static(self._kind, call.func.attr, None)
        return written(found.__func__ if isinstance(found, staticmethod) else found)


def _name_of(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
