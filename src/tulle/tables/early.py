"""`Early`: rows of the next lookups that no rank looks up now, fetched beside this step instead of behind it.

    this step     forward ... backward ............ push, update |
    rows          divide, those that stay ------->               | the rest --->  next forward

That they stay is an expectation: an optimizer may move rows that nobody looked up (Adam's moments, weight decay), and a
user may write in a table. So each owner compares what it gave with what it has when the rest is fetched, and says so in
a line of its own below each block. If one has found a difference, all know, and fetch everything anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tulle.mesh import Axis
from tulle.tables.blocks import Blocks, exchange_blocks
from tulle.tables.bundle import Route
from tulle.tables.division import Division, divide
from tulle.tables.exchange import fetch

Served = Sequence[Tensor]
"""What this rank gives to each rank of one bundle: `[rows, columns]`."""


@dataclass(frozen=True, slots=True, eq=False)
class Early:
    """Rows of one bundle that have come early.

    Args:
        division: Of what is wanted next, by what is wanted now.
        served: What this rank gave, of the rows that are wanted next alone.
        values: `[rows, width]` what it got, in the order in which they travel.
    """

    division: Division
    served: Served
    values: Tensor

    def is_as_served(self, now: Served) -> bool:
        """Whether what this rank gave is what it would give now, to the last bit."""
        return all(map(is_bitwise, self.served, now))

    def join(self, rest: Tensor) -> Tensor:
        """All rows, in the order in which they travel, with those of `division.in_both`."""
        is_in_both = self.division.is_in_both
        whole = rest.new_empty(len(is_in_both), rest.shape[1])
        whole[is_in_both], whole[~is_in_both] = rest, self.values
        return whole


def fetch_early(
    routes: Sequence[Route], now: Sequence[Route], serve: Callable[[Sequence[Route]], Sequence[Served]], axis: Axis
) -> list[Early]:
    """Fetch what is wanted next and by no rank now. Blocking; every rank of the axis must call it, alike.

    Args:
        routes: Of what is wanted next, one a bundle.
        now: Of what is wanted now.
        serve: Gives the rows of some routes as they are, for each rank.
        axis: Whose ranks take part.
    """
    divisions = divide(routes, now, axis)
    alone = [division.alone for division in divisions]
    served = serve(alone)
    values = fetch(alone, served, axis)
    return [Early(*parts) for parts in zip(divisions, served, values, strict=True)]


def fetch_rest(early: Sequence[Early], served: Sequence[Served], axis: Axis, *, stays: bool) -> list[Tensor] | None:
    """Fetch the rows that had to be waited for. Blocking; every rank of the axis must call it, alike.

    Args:
        early: What came before, one a bundle.
        served: The rest, for each rank.
        axis: Whose ranks take part.
        stays: Whether what this rank served early is as it was.

    Returns:
        `[rows, width]` a bundle, in the order in which rows travel; None, on all ranks, if one does not say that what
        it served stays.
    """
    routes = [one.division.in_both for one in early]
    came = exchange_blocks(
        [[_with_line(part, stays=stays) for part in parts] for parts in served],
        [[(rows + 1, columns) for rows, columns in route.fetched_shapes()] for route in routes],
        axis,
        rows=[route.rows_served() for route in routes],
        most_bytes=[route.values_bytes(parts[0].dtype) for route, parts in zip(routes, served, strict=True)],
    ).wait()
    if not all(bool((block[-1] == 1).all()) for blocks in came for block in blocks.by_rank):
        return None
    rests = [
        route.assemble(Blocks([block[:-1] for block in blocks.by_rank]))
        for route, blocks in zip(routes, came, strict=True)
    ]
    return [one.join(rest) for one, rest in zip(early, rests, strict=True)]


def is_bitwise(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same to the last bit, NaN too."""
    kind = torch.int64 if _is_wide(one) and _is_wide(other) else torch.uint8
    return torch.equal(one.view(kind), other.view(kind))


def _is_wide(tensor: Tensor) -> bool:
    """Whether it lies as eight bytes after eight bytes, which are compared in a seventh of the time of single ones."""
    stretches = tensor.shape[-1] * tensor.itemsize, tensor.storage_offset() * tensor.itemsize
    return tensor.is_contiguous() and not any(stretch % 8 for stretch in stretches)


def _with_line(part: Tensor, *, stays: bool) -> Tensor:
    """With a line of ones below, or of zeros."""
    return torch.cat([part, part.new_full((1, part.shape[1]), float(stays))])
