"""`Division`: the rows of a bundle cut in two, those that some rank wants next and those that nobody does.

    now        rows 2 5 7 9 travel     some rank's next batch wants 3 5 9
    prior      5 9                     must be there, and updated, before the next lookups
    delayed    2 7                     may travel behind the next forward and backward

Only the owner of a row hears what all ranks want of it, so owners tell those who want a row now: one byte for each.

Source: Li et al., *EmbRace* (ICPP'22), vertical scheduling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tulle.mesh import Axis
from tulle.tables.blocks import exchange_blocks
from tulle.tables.bundle import Route


@dataclass(frozen=True, slots=True, eq=False)
class Division:
    """A route cut in two.

    Args:
        is_prior: `[rows]` bool, of the rows that this rank wants, in the order in which they travel.
        prior: The way of those rows.
        delayed: The way of the others.
    """

    is_prior: Tensor
    prior: Route
    delayed: Route


def divide(routes: Sequence[Route], following: Sequence[Route], axis: Axis) -> list[Division]:
    """Find out which rows are wanted again. Blocking; every rank of the axis must call it, alike.

    Args:
        routes: Of the rows that are wanted now, one a bundle.
        following: Of those that are wanted next; tables may be bundled otherwise, or be missing.
        axis: Whose ranks take part.
    """
    wanted_next = {
        split.name: torch.cat(places)
        for route in following
        for split, places in zip(route.splits, route.places_by_table(), strict=True)
    }
    served = [_is_wanted(route, wanted_next) for route in routes]
    came = exchange_blocks(
        [
            mask.to(torch.uint8).view(-1, 1).split([sum(of_rank) for of_rank in route.served])
            for mask, route in zip(served, routes, strict=True)
        ],
        [[(rows, 1) for rows, _ in route.fetched_shapes()] for route in routes],
        axis,
        rows=[route.rows_served() for route in routes],
        most_bytes=[route.most_rows for route in routes],
    ).wait()
    divisions: list[Division] = []
    for route, is_prior_here, blocks in zip(routes, served, came, strict=True):
        is_prior = route.assemble(blocks)[:, 0].bool()  # of a table that is split by columns all owners say the same
        divisions.append(Division(is_prior, route.only(is_prior, is_prior_here), route.only(~is_prior, ~is_prior_here)))
    return divisions


def _is_wanted(route: Route, wanted_next: dict[str, Tensor]) -> Tensor:
    """`[sum(served)]` bool, of the places of a route."""
    found = torch.zeros(len(route.places), dtype=torch.bool, device=route.places.device)
    at = torch.arange(len(route.places), device=route.places.device)
    pieces = at.split([count for of_rank in route.served for count in of_rank])
    for table, split in enumerate(route.splits):
        if split.name in wanted_next:
            of_table = torch.cat(pieces[table :: len(route.splits)])
            found[of_table] = torch.isin(route.places[of_table], wanted_next[split.name])
    return found
