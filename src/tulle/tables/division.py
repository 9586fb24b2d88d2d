"""`Division`: the rows that a bundle wants in one of two steps cut in two, by whether some rank wants them in both.

    now     rows 2 5 7 9     gradients of 5 9 must be there before the next lookups, of 2 7 they may come behind them
    next    rows 3 5 9       5 9 can be fetched when they are updated, 3 at once: it stays as it is

Only the owner of a row hears what all ranks want of it, so owners tell those who want a row: one byte for each.

Source: Li et al., *EmbRace* (ICPP'22), vertical scheduling, for gradients; rows that stay are ours.
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
        is_in_both: `[rows]` bool, of the rows that this rank wants, in the order in which they travel.
        in_both: The way of those rows.
        alone: The way of the others.
    """

    is_in_both: Tensor
    in_both: Route
    alone: Route


def divide(routes: Sequence[Route], others: Sequence[Route], axis: Axis) -> list[Division]:
    """Find out which rows are wanted in another step too. Blocking; every rank of the axis must call it, alike.

    Args:
        routes: Of the rows that are wanted in one step, one a bundle.
        others: Of those that are wanted in the other; tables may be bundled otherwise, come twice, or be missing.
        axis: Whose ranks take part.
    """
    wanted: dict[str, list[Tensor]] = {}
    for route in others:
        for split, places in zip(route.splits, route.places_by_table(), strict=True):
            wanted.setdefault(split.name, []).extend(places)
    wanted_there = {name: torch.cat(places) for name, places in wanted.items()}
    served = [_is_wanted(route, wanted_there) for route in routes]
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
    for route, is_in_both_here, blocks in zip(routes, served, came, strict=True):
        is_in_both = route.assemble(blocks)[:, 0].bool()  # of a table that is split by columns all owners say the same
        in_both, alone = route.only(is_in_both, is_in_both_here), route.only(~is_in_both, ~is_in_both_here)
        divisions.append(Division(is_in_both, in_both, alone))
    return divisions


def _is_wanted(route: Route, wanted_there: dict[str, Tensor]) -> Tensor:
    """`[sum(served)]` bool, of the places of a route."""
    found = torch.zeros(len(route.places), dtype=torch.bool, device=route.places.device)
    at = torch.arange(len(route.places), device=route.places.device)
    pieces = at.split([count for of_rank in route.served for count in of_rank])
    for table, split in enumerate(route.splits):
        if split.name in wanted_there:
            of_table = torch.cat(pieces[table :: len(route.splits)])
            found[of_table] = torch.isin(route.places[of_table], wanted_there[split.name])
    return found
