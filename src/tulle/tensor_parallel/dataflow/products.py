"""Products of queries with keys, and of weights with values, head by head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tulle.tensor_parallel.dataflow.flow import Flow, Frame
from tulle.tensor_parallel.dataflow.notes import Attention, Said
from tulle.tensor_parallel.dataflow.shapes import Split, argument
from tulle.tensor_parallel.dataflow.values import (
    Folded,
    Heads,
    Known,
    Number,
    Plain,
    Value,
    layers_of,
    number_of,
)

GROUPS = "num_key_value_groups"
"""The attribute of attention by which functions of `transformers` repeat heads of keys and values."""
PRODUCTS = ("bmm", "matmul")
"""Methods of tensors, and functions of torch, that multiply matrices."""


def multiplied(frame: Frame, left: Value, right: Value) -> Value:
    """The product of matrices, of each head if both have heads."""
    for kind in (Heads, Folded):
        if all(isinstance(one, kind) and one.dim == -3 for one in (left, right)):
            return kind(_product(frame, left, right), -3)
    return frame.flow.pure(left, right, may_draw=False)


def _product(frame: Frame, left: Value, right: Value) -> frozenset[int]:
    queries, others = layers_of([left]), layers_of([right])
    frame.flow.attentions.append(Attention(frame.module, queries, (others, others)))
    return queries | others


def softened(value: Value, dim: Value) -> Heads | Folded | None:
    """What softmax gives along the last dimension: what heads attend to."""
    if not isinstance(value, Heads | Folded) or dim not in (Known(-1), Known(3 if isinstance(value, Heads) else 2)):
        return None
    return replace(value, is_weights=True)


def repeated(flow: Flow, pairs: Heads, times: Value, function: Any) -> Heads | None:
    """Each head of keys and values as often as a function is told to repeat it, one after the other."""
    if not isinstance(times, Known | Number | Plain) or not _repeats_each(function, pairs.dim):
        return None
    if isinstance(times, Number) and times.name == GROUPS:
        flow.repeated.setdefault((times.owner, times.name), set()).add(times.read)
    else:
        flow.repeated_otherwise |= pairs.layers
    return pairs


@cache
def _repeats_each(function: Any, dim: int) -> bool:
    heads = torch.arange(2.0).view(1, 2, 1, 1).transpose(1, dim)
    try:
        return torch.equal(function(heads, 2), heads.repeat_interleave(2, dim=dim))
    except Exception:  # it takes something else
        return False


def interleaved(frame: Frame, value: Split, given: Sequence[Said], named: Mapping[str, Said]) -> Value | None:
    """The same, by the method of tensors that does so."""
    times, dim = (argument(given, named, place, name).value for place, name in enumerate(("repeats", "dim")))
    if not isinstance(value, Heads) or number_of(dim) not in (value.dim, value.dim + 4):
        return None
    return repeated(frame.flow, value, times, _interleave)


def _interleave(pairs: Tensor, times: int) -> Tensor:
    return pairs.repeat_interleave(times, dim=pairs.shape.index(2))


def summed(frame: Frame, given: Sequence[Value], *, is_einops: bool) -> Value | None:
    """What `einsum` gives of two things of each head, of torch (`bhid,bhjd->bhij`) or einops; None for others."""
    first, *others = reversed(given) if is_einops else given
    operands = [*reversed(others)] if is_einops else others
    equation = first.value if isinstance(first, Known) and isinstance(first.value, str) else ""
    before, _, after = equation.partition("->")
    *inputs, result = ([*one.split()] if is_einops else [*one.replace(" ", "")] for one in (*before.split(","), after))
    kind = Folded if any(isinstance(one, Folded) for one in operands) else Heads
    heads, count = [one for one in operands if isinstance(one, kind)], 3 if kind is Folded else 4
    if not len(heads) == len(operands) == len(inputs) == 2 or any(len({*one}) != count for one in (*inputs, result)):
        return None
    (name, *rest) = {letters[one.dim] for one, letters in zip(heads, inputs, strict=True)}
    is_kept = not rest and name in result[count - 3 : count - 1]
    is_kept = is_kept and all(len(letters) == count for letters in (*inputs, result))
    return kind(_product(frame, heads[0], heads[1]), result.index(name) - count) if is_kept else None
