"""Linear layers that write out what `nn.Linear` does, and bring their weights to the dtype of what they are given.

class Linear(nn.Linear):                                      # of Whisper; nanochat's are the same without a bias
    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))
"""

from __future__ import annotations

import ast
from functools import cache
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from tulle.tensor_parallel.dataflow.sources import forward_of, names_at, source_of


def writes_out_linear(layer: nn.Module) -> bool:
    """Whether a layer's class, none of torch's, writes out the forward of `nn.Linear`, with casts or without."""
    forward = forward_of(layer) if isinstance(layer, nn.Linear) else None
    if forward is None or (call := _only_call(forward)) is None or len(call) not in (2, 3):
        return False
    given, weight, *bias = call
    name = forward.__code__.co_varnames[1]
    are_own = given == name and weight in _cast("weight", name)
    return are_own and (bias[0] in _bias(name) if bias else layer.bias is None)


def like(parameter: Tensor, given: Tensor, *, is_cast: bool) -> Tensor:
    """A parameter, in the dtype of what its layer was given if that brings it there."""
    return parameter.to(given.dtype) if is_cast else parameter


@cache
def _only_call(forward: FunctionType) -> list[str] | None:
    """What a forward gives to `functional.linear`, if it does nothing else: input, weight and bias, as it says them."""
    source = source_of(forward)
    if source is None or forward.__code__.co_argcount != 2:
        return None
    body = source.body[1:] if ast.get_docstring(source) is not None else source.body
    call = body[0].value if len(body) == 1 and isinstance(body[0], ast.Return) else None
    if not isinstance(call, ast.Call) or _found(forward, call.func) is not functional.linear:
        return None
    named = {one.arg: ast.unparse(one.value) for one in call.keywords}
    given = [
        *map(ast.unparse, call.args),
        *(named.pop(name, "") for name in ("input", "weight", "bias")[len(call.args) :]),
    ]
    return None if named else [one for one in given if one]


def _found(forward: FunctionType, node: ast.expr) -> Any:
    """What a dotted name in a function's code is; None for other expressions."""
    if isinstance(node, ast.Name):
        return names_at(forward).get(node.id)
    if not isinstance(node, ast.Attribute):
        return None
    owner = _found(forward, node.value)
    return getattr(owner, node.attr, None) if isinstance(owner, ModuleType) else None


def _cast(own: str, given: str) -> set[str]:
    """How a parameter may be read."""
    casts = f".to({given}.dtype)", f".to(dtype={given}.dtype)", f".to({given})", f".type_as({given})"
    return {f"self.{own}{cast}" for cast in ("", *casts)}


def _bias(given: str) -> set[str]:
    """How a bias may, that there may be none of."""
    read = _cast("bias", given)
    first = {f"None if self.bias is None else {one}" for one in read}
    return {"self.bias"} | first | {f"{one} if self.bias is not None else None" for one in read}
