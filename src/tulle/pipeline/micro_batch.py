"""Cuts the arguments of a step into micro-batches."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from tulle.errors import DataError
from tulle.pipeline.objects import Lent, objects_in
from tulle.pipeline.structure import Spec, can_flatten, flatten, rebuild

ITEMS: Literal["items"] = "items"
Split = Mapping[str, int | Literal["items"] | None]
"""By an argument's name the dimension along which it is cut, or None to give it whole to each micro-batch.

`"items"` is for a list with one item a sample, which is cut between its items: boxes of each picture, say.
"""


def cut(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], count: int, split: Split
) -> tuple[list[tuple[Sequence[Any], dict[str, Any]]], list[float]]:
    """Cut a call's arguments into those of `count` calls.

    Every tensor and array of numpy in them is cut along dimension 0, or as `split` says by the argument's name, or by
    `"name.key"` for what an argument holds under a key, a list between its items if `split` says `"items"`; tensors
    without dimensions and everything else go whole to each. One call gets what was given.

    Returns:
        Arguments and keywords of each call, and each one's share of the samples.

    Raises:
        DataError: If tensors to be cut differ in length, have fewer than `count` samples, or are sparse or nested, a
            name is not there, or what is to be cut between items has none.
    """
    bound = inspect.signature(function).bind(*args, **kwargs)
    pieces: dict[str, list[Any]] = {}
    lengths: dict[str, int] = {}
    found: set[str] = set()
    for name, value in bound.arguments.items():
        pieces[name] = _cut_argument(name, value, count, split, lengths, found)
    _check(lengths, count, set(split) - found)
    if count == 1:
        return [(args, dict(kwargs))], [1.0]
    length = next(iter(lengths.values()), count)
    calls = []
    for index in range(count):
        one = inspect.BoundArguments(bound.signature, {})
        one.arguments.update({name: values[index] for name, values in pieces.items()})
        calls.append((one.args, one.kwargs))
    sizes = [len(part) for part in torch.arange(length).tensor_split(count)]
    return calls, [size / length for size in sizes]


def _cut_argument(
    name: str, value: Any, count: int, split: Split, lengths: dict[str, int], found: set[str]
) -> list[Any]:
    found.add(name)
    is_named = any(key.startswith(f"{name}.") for key in split)
    if isinstance(value, Mapping) and (is_named or not can_flatten(value)):
        cuts = {key: _cut_argument(f"{name}.{key}", part, count, split, lengths, found) for key, part in value.items()}
        return [_with(value, {key: parts[index] for key, parts in cuts.items()}) for index in range(count)]
    dimension = split.get(name, split.get(name.rpartition(".")[0], 0))
    if dimension is None or isinstance(value, torch.nn.Module):
        return [value] * count
    if dimension == ITEMS:
        return _cut_items(name, value, count, lengths)
    leaves, spec = flatten(value)
    columns = [
        _cut_argument(name, leaf, count, {**split, name: dimension}, lengths, found)
        if isinstance(leaf, Mapping)
        else _cut_object(name, given, dimension, count, lengths)
        if (given := objects_in(leaf))
        else _cut_leaf(name, leaf, dimension, count, lengths)
        for leaf in leaves
    ]
    return [_row(spec, columns, index) for index in range(count)]


def _cut_items(name: str, value: Any, count: int, lengths: dict[str, int]) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise DataError(
            f"{name!r} is to be cut between its items, but is of type {type(value).__name__}: expected a list with one "
            "item a sample"
        )
    lengths[f"items of {name}"] = len(value)
    parts = torch.arange(len(value)).tensor_split(count)
    return [[value[index] for index in part.tolist()] for part in parts]


def _cut_object(name: str, given: Lent, dimension: int, count: int, lengths: dict[str, int]) -> Sequence[Any]:
    """Of an object that holds tensors copies, which hold parts of these; one that holds a model is no batch."""
    if any(isinstance(leaf, torch.nn.Module) for leaf in given.leaves):
        return [given.objects[0]] * count
    columns = [_cut_leaf(name, leaf, dimension, count, lengths) for leaf in given.leaves]
    if all(column[0] is leaf for column, leaf in zip(columns, given.leaves, strict=True)):
        return [given.objects[0]] * count
    return [given.copied([column[index] for column in columns])[0] for index in range(count)]


def _cut_leaf(name: str, leaf: Any, dimension: int, count: int, lengths: dict[str, int]) -> Sequence[Any]:
    if not isinstance(leaf, Tensor | np.ndarray) or leaf.ndim == 0:
        return [leaf] * count
    if isinstance(leaf, Tensor) and (leaf.is_nested or leaf.layout != torch.strided):
        if count == 1:
            return [leaf]
        kind = "a nested tensor" if leaf.is_nested else f"a tensor of the layout {leaf.layout}"
        raise DataError(
            f"{name!r} is or holds {kind}, which cannot be cut into {count} micro-batches: say split={{name: None}} "
            "(by the argument's name, or 'name.key') if all are to get it whole; else give a dense one"
        )
    if not -leaf.ndim <= dimension < leaf.ndim:
        raise DataError(f"{name!r} is to be cut along dimension {dimension}, but has the shape {list(leaf.shape)}")
    lengths[f"{name} of shape {list(leaf.shape)}"] = leaf.shape[dimension]
    return _laid_out_like(leaf, count, dimension)


def _laid_out_like(whole: Tensor | np.ndarray, count: int, dimension: int) -> Sequence[Any]:
    """Its pieces, without gaps in memory if it has none: `ids.view(-1)` is to work on a micro-batch as on a batch."""
    if isinstance(whole, Tensor):
        parts = whole.tensor_split(count, dimension)
        return [part.contiguous() for part in parts] if whole.is_contiguous() else parts
    parts = np.array_split(whole, count, dimension)
    return [np.ascontiguousarray(part) for part in parts] if whole.flags.c_contiguous else parts


def _with(mapping: Mapping[Any, Any], values: dict[Any, Any]) -> Mapping[Any, Any]:
    """A mapping of the same kind, such as what a tokenizer gives, with other values."""
    if not isinstance(mapping, MutableMapping):
        return values
    made = copy.copy(mapping)
    kept = getattr(made, "__dict__", {})  # one may keep its items in a dictionary, which its copy has, too
    kept.update({name: copy.copy(one) for name, one in kept.items() if isinstance(one, dict)})
    for key, value in values.items():
        made[key] = value
    return made


def _row(spec: Spec, columns: Sequence[Sequence[Any]], index: int) -> Any:
    return rebuild(spec, [column[index] for column in columns])


def _check(lengths: Mapping[str, int], count: int, unknown: set[str]) -> None:
    if unknown:
        raise DataError(
            f"split names {sorted(unknown)}, which the step was not given: name its arguments, or 'name.key'"
        )
    if count > 1 and len(set(lengths.values())) > 1:
        raise DataError(
            "the tensors of a step have different numbers of samples: "
            + ", ".join(f"{name}: {length}" for name, length in lengths.items())
            + "; say split={name: dimension}, 'items' for a list with one item a sample, or None for what is not to be "
            "cut"
        )
    if lengths and next(iter(lengths.values())) < count:
        raise DataError(
            f"a batch of {next(iter(lengths.values()))} samples cannot be cut into {count} micro-batches: use fewer"
        )
