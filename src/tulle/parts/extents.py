"""`Extent`: which numbers of a whole lie in a rank's part, and in what functions of torch made of it.

A difference of parts is a part of the difference, their rows' norms are a part of all rows' norms, those under a mask a
part of all under it. So one number of all of these, too, is that of the whole if it is made of all ranks' parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from tulle.parts.torch_functions import REDUCED, at_places, dims_of, name_of

LAID_OUT = {"view", "reshape", "flatten", "ravel"}
"""Names of what gives the same numbers in another shape."""
ASKS_SIZES = {"view", "reshape"}
"""Names of those that are told the shape."""
JOINED = {"cat", "concat", "concatenate", "stack", "hstack"}
"""Names of what puts several parts together."""
BY_ROW = {"matmul", "__matmul__", "mm", "linear"}
"""Names of what gives a row for each row of what it is given first."""
STORED = {"values", "_values"}
"""Names of what gives the rows that a sparse gradient stores: a gradient scaler looks for infinities in these."""
ALIKE = {"equal", "allclose"}
"""Names of what says of two tensors whether they are alike."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Which numbers of a whole lie here.

    Args:
        cuts: The dimensions that are cut; all, where nobody knows which.
        count: Numbers in the whole; None to count them on all ranks.
        places: Where along the first of these dimensions numbers of the whole lie; None for everywhere.
        is_known: Whether one number of all can be told.
        follows: Whether along the one dimension that is cut it has a place for each that the parameter's part has.
    """

    cuts: tuple[int, ...]
    count: int | None = None
    places: Tensor | None = None
    is_known: bool = True
    follows: bool = True


Given = tuple[Tensor, tuple[Any, ...], dict[str, Any]]
"""A part that a function was given, and its arguments and keywords."""


def extent_of(
    func: Callable[..., Any],
    part: Tensor,
    extent: Extent,
    args: Sequence[Any],
    keywords: Mapping[str, Any],
    result: Tensor,
) -> Extent:
    """The extent of what a function made of a part, mixing nothing along the dimensions that are cut.

    Example:
        >>> part, rows = torch.ones(2, 3), Extent(cuts=(0,), count=12)
        >>> extent_of(torch.sum, part, rows, [part, 1], {}, part.sum(1))
        Extent(cuts=(0,), count=4, places=None, is_known=True, follows=True)
        >>> extent_of(torch.add, part[0], rows, [part[0], part], {}, part[0] + part).cuts
        (1,)
    """
    name, dims = name_of(func), result.dim()
    if picks(func, args):
        is_known = extent.is_known and (extent.places is None or _is_mask(args, part))
        return Extent(tuple(range(dims)), is_known=is_known, follows=False)
    if result.shape == part.shape:
        return extent
    if name in LAID_OUT and (cut := cut_in(result, part, extent)) is not None:
        return replace(extent, cuts=(cut,))
    if name in LAID_OUT and dims == 1:
        return Extent((0,), extent.count, _flat(part, extent), follows=False)
    if name in STORED:
        return Extent(extent.cuts, follows=False)
    if name in REDUCED:
        gone = {dim % part.dim() for dim in dims_of(keywords, args, REDUCED[name]) or ()}
        kept = [dim for dim in range(part.dim()) if dim not in gone]
        cuts = extent.cuts if dims == part.dim() else tuple(kept.index(cut) for cut in extent.cuts)
        count = None if extent.count is None else extent.count // prod(part.shape[dim] for dim in gone)
        return replace(extent, cuts=cuts, count=count)
    if name in BY_ROW and extent.cuts == (0,):
        return replace(extent, count=None)
    before = dims - part.dim()
    if before >= 0 and all(
        result.shape[before + dim] == length or (length == 1 and dim not in extent.cuts)
        for dim, length in enumerate(part.shape)
    ):
        return replace(extent, cuts=tuple(before + cut for cut in extent.cuts), count=None)
    return Extent(tuple(range(dims)), is_known=extent.is_known and extent.places is None, follows=False)


def cut_in(result: Tensor, part: Tensor, extent: Extent) -> int | None:
    """Where the dimension that is cut is one still, of several, when a part's numbers are laid out in another shape.

    `view(part.shape[0], -1)` asks for that, as loops write it; None where the cut goes through other dimensions.

    Example:
        >>> part = torch.ones(2, 3, 5)
        >>> [cut_in(part.view(shape), part, Extent(cuts=(1,))) for shape in [(2, 3, 5, 1), (6, 5), (1, 2, 3, 5)]]
        [1, None, 2]
    """
    if len(extent.cuts) != 1 or result.dim() < 2:
        return None
    [cut] = extent.cuts
    kept = prod(part.shape[:cut]), part.shape[cut], prod(part.shape[cut + 1 :])
    shape = result.shape
    places = (dim for dim in range(len(shape)) if (prod(shape[:dim]), shape[dim], prod(shape[dim + 1 :])) == kept)
    return next(places, None)


def asked_here(sizes: Sequence[Any], part: Tensor, whole: Sequence[int], cut: int) -> list[int] | None:
    """The sizes to ask a part for, where those of all of it were asked for and the dimension that is cut is one still.

    `weight.view(self.num_rows, -1)` asks so, by a number that the module keeps. None for other sizes, and for such as
    the part has, too.

    Args:
        sizes: As given to `view` or `reshape`.
        part: That is to be laid out.
        whole: The shape of all of it.
        cut: The dimension that is cut.

    Example:
        >>> part = torch.ones(2, 6)
        >>> [asked_here(sizes, part, (4, 6), 0) for sizes in [(4, 6), [(4, -1, 2)], (1, 4, 6), (8, 3), (2, 6)]]
        [[2, 6], [2, 3, 2], [1, 2, 6], None, None]
    """
    given = list(sizes[0] if len(sizes) == 1 and isinstance(sizes[0], Sequence) else sizes)
    if not all(type(size) is int for size in given) or given.count(-1) > 1 or whole[cut] == part.shape[cut]:
        return None
    if -1 in given and (known := -prod(given)) > 0:
        given[given.index(-1)] = prod(whole) // known
    kept = prod(whole[:cut]), whole[cut], prod(whole[cut + 1 :])
    for dim, size in enumerate(given):
        if (prod(given[:dim]), size, prod(given[dim + 1 :])) == kept:
            return [*given[:dim], part.shape[cut], *given[dim + 1 :]]
    return None


def picks(func: Callable[..., Any], args: Sequence[Any]) -> bool:
    """Whether a function gives the numbers under a mask, of which each rank has so many."""
    name = name_of(func)
    index = args[1] if name == "__getitem__" else None
    several = index if isinstance(index, tuple) else (index,)
    return name == "masked_select" or any(isinstance(one, Tensor) and one.dtype == torch.bool for one in several)


def extent_of_joined(func: Callable[..., Any], parts: Sequence[tuple[Tensor, Extent]], result: Tensor) -> Extent:
    """That of several parts in one tensor."""
    extents, counts = [extent for _, extent in parts], [extent.count for _, extent in parts]
    count, is_known = None if None in counts else sum(one or 0 for one in counts), all(e.is_known for e in extents)
    if name_of(func) == "stack" and result.dim() > 1 and parts[0][0].shape == result.shape[1:]:
        return Extent(tuple(1 + cut for cut in extents[0].cuts), count, extents[0].places, is_known)
    if all(extent.places is None for extent in extents):
        cuts = (0,) if result.dim() == 1 else tuple(range(result.dim()))
        return Extent(cuts, count, is_known=is_known, follows=False)
    if result.dim() > 1:
        return Extent(tuple(range(result.dim())), is_known=False, follows=False)
    begin, found = 0, list[Tensor]()
    for part, extent in parts:
        found.append(begin + (torch.arange(len(part)) if extent.places is None else extent.places.cpu()))
        begin += len(part)
    return Extent((0,), count, torch.cat(found).to(result.device), is_known, follows=False)


def made_of(func: Callable[..., Any], extent: Extent, given: Given, result: Tensor) -> tuple[Tensor, Extent]:
    """What a function made of a part, and the extent of that; under a mask of all its places, of those alone held."""
    part, args, keywords = given
    if picks(func, args) and _is_mask(args, part):
        _, result = held_alone(func, extent, given, result)
    return result, extent_of(func, part, extent, args, keywords, result)


def held_alone(func: Callable[..., Any], extent: Extent, given: Given, result: Any) -> tuple[Given, Any]:
    """What was given to a function, and what that gives, of the places alone that numbers of the whole lie at.

    Args:
        func: The function.
        extent: Of the part that it was given.
        given: To it.
        result: What it gave of all places.
    """
    if extent.places is None or given[0].layout != torch.strided:
        return given, result
    held: Given = at_places(extent.places, extent.cuts[0], given, given[0].shape)
    return held, func(*held[1], **held[2])


def _is_mask(args: Sequence[Any], part: Tensor) -> bool:
    return isinstance(args[1], Tensor) and args[1].shape == part.shape


def _flat(part: Tensor, extent: Extent) -> Tensor | None:
    """Places in a flat view of a part."""
    if extent.places is None:
        return None
    numbers = torch.arange(part.numel(), device=part.device).view(part.shape)
    return numbers.index_select(extent.cuts[0], extent.places.to(part.device)).flatten()
