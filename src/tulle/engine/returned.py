"""`Returned`: the gradients of a trip's rows as backward gives them; `Parcel`: those that go to the owners together.

lookups     rows 2 5 9 of words     rows 5 7 of words           both in one trip, which has rows 2 5 7 9
backward    gradient of the trip's rows, from each lookup       come: added up, one `[rows, width]` a table
push        one `[rows, width]` a bundle, in the order in which its rows travel
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tulle.comm import now_s, traffic
from tulle.engine.split_table import SplitTable
from tulle.mesh import Axis
from tulle.tables import Pushed, Request, Route, push

_LONGEST_WAIT_S = 0.5
"""For so long at most delayed rows let pass what the next forward waits for."""


class Returned:
    """The gradients of the rows of one trip.

    Args:
        bundles: Its tables, by bundle.
        is_scaled: Whether owners must know how often rows were looked up, whatever the tables are.
    """

    def __init__(self, bundles: Sequence[Sequence[SplitTable]], *, is_scaled: bool) -> None:
        self._bundles = bundles
        self._is_scaled = is_scaled
        self._lookups: dict[int, Tensor] = {}
        """How often each row was looked up by lookups whose gradient came, by table."""
        self._waits = {table.number: 0 for tables in bundles for table in tables}
        """Lookups whose gradient has not come, by table."""
        self._gradients: dict[int, Tensor] = {}

    def expect(self, table: SplitTable) -> None:
        """Note a lookup whose gradient is to come."""
        self._waits[table.number] += 1

    def come(self, table: SplitTable, gradient: Tensor, lookups: Tensor | None) -> None:
        """Note the gradient of the rows of one lookup, and how often that looked each up."""
        if lookups is not None:
            self._lookups[table.number] = self._lookups.get(table.number, 0) + lookups
        before = self._gradients.get(table.number)
        self._gradients[table.number] = gradient if before is None else before + gradient
        self._waits[table.number] -= 1

    @property
    def is_complete(self) -> bool:
        """Whether every table was looked up and has its gradient."""
        return len(self._gradients) == len(self._waits) and not any(self._waits.values())

    def gradient(self, bundle: int, request: Request) -> Tensor:
        """`[rows, width]` of a bundle, in the order in which its rows travel, handed over; zeros where none came."""
        tables = self._bundles[bundle]
        found = [self._gradients.pop(table.number, None) for table in tables]
        if len(tables) == 1 and found[0] is not None:
            return found[0].contiguous()
        width, like = tables[0].split.width, tables[0].parameter
        by_table = [
            torch.zeros(rows, width, dtype=like.dtype, device=like.device) if gradient is None else gradient
            for gradient, rows in zip(found, request.distinct.lengths(), strict=True)
        ]
        return request.travelling(by_table)

    def lookups(self, bundle: int, request: Request) -> Tensor | None:
        """How often rows were looked up, in the order in which they travel, if an owner must know; handed over."""
        tables = self._bundles[bundle]
        if not self._is_scaled and not any(table.is_sparse for table in tables):
            return None
        device = tables[0].split.axis.device
        found = [self._lookups.pop(table.number, None) for table in tables]
        by_table = [
            torch.zeros(rows, dtype=torch.int32, device=device) if counts is None else counts.to(device)
            for counts, rows in zip(found, request.distinct.lengths(), strict=True)
        ]
        return request.travelling(by_table)


@dataclass(frozen=True, slots=True)
class Parcel:
    """Gradients that go to the owners together.

    Args:
        tables: Numbers of the tables of each bundle; None for one of which nothing is wanted.
        routes: One a bundle.
        gradients: `[rows, width]` a bundle.
        lookups: `[rows]` a bundle, or None.
    """

    tables: Sequence[Sequence[int | None]]
    routes: Sequence[Route]
    gradients: Sequence[Tensor]
    lookups: Sequence[Tensor | None]

    def cut(self, routes: Sequence[Route], masks: Sequence[Tensor]) -> Parcel:
        """Of some of the rows: their ways, and masks of them, one a bundle."""
        gradients = [gradient[mask] for gradient, mask in zip(self.gradients, masks, strict=True)]
        lookups = [None if one is None else one[mask] for one, mask in zip(self.lookups, masks, strict=True)]
        return Parcel(self.tables, routes, gradients, lookups)

    def push(self, axis: Axis, what: str) -> dict[int, Pushed]:
        """Blocking; `what` names it on the timeline."""
        begin_s = now_s()
        came = push(self.routes, self.gradients, self.lookups, axis)
        traffic.span("split tables", f"push: {what}", begin_s, now_s())
        pairs = [pair for some in zip(self.tables, came, strict=True) for pair in zip(*some, strict=True)]
        return {number: part for number, part in pairs if number is not None}

    def push_after(self, others: list[threading.Event], axis: Axis) -> dict[int, Pushed]:
        """The same, when others have passed, or after a while: a rank that they wait for may be waiting for this.

        Of the others none are left when they have.
        """
        last_s = now_s() + _LONGEST_WAIT_S
        while others:
            others[0].wait(max(0.0, last_s - now_s()))
            others.pop(0)
        return self.push(axis, "delayed rows")
