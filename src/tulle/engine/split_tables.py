"""`SplitTables`: the run-time of the tables of one model that are split over the ranks.

    forward      a lookup fetches its distinct rows from their owners            (a unit: `tulle.engine.units`)
    backward     last unit first, as soon as its gradients are there: pushed to the owners, beside the rest
    its end      which gradients came on any rank is agreed, what was not pushed is; owners' gradients are set

A loss may leave a lookup out on one rank and not on another, so no rank knows by itself what will be pushed. Units that
were looked up since the last backward are pushed in descending order as long as each is complete; the agreement, on a
process group of its own beside those pushes, says what follows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from tulle.comm import Courier, Job, all_gather, all_gather_parts, lane
from tulle.engine.feed import Feed, IdsOf
from tulle.engine.units import SplitTable, TableModule, Unit, Way
from tulle.errors import ModelError
from tulle.mesh import Axis
from tulle.rows import RowSparse
from tulle.tables import Pushed, ShardGradient, placement_of

_AGREED_AT_ONCE = 63
_LABEL = "gradients of split tables"


class SplitTables:
    """The split tables of one model.

    Args:
        tables: The tables.
        axis: Whose ranks hold them.
        came: Called with a table's name and a gradient when it comes; it sees to it that `end_backward` is called.
    """

    def __init__(self, tables: Sequence[SplitTable], axis: Axis, *, came: Callable[[str, Tensor], None]) -> None:
        self.tables = {table.name: table for table in tables}
        self._by_parameter = {id(table.parameter): table for table in tables}
        self._axis = axis
        self._report = came
        self._way = Way(lane(axis, "split tables"), Courier("tulle split tables", axis.device))
        self._agreement = lane(axis, "agreement on split tables")
        self._units = 0
        self._rows: dict[int, int] = {}
        self._alive: WeakValueDictionary[int, Unit] = WeakValueDictionary()
        self._expected: list[int] = []
        """Units whose gradients should come in the next backward, ascending."""
        self._came: set[tuple[int, int]] = set()
        """Numbers of unit and table of each gradient that came in this backward."""
        self._pushes: list[tuple[Unit, Job[dict[int, Pushed]]]] = []
        self._calls = self.feed()
        """Begins with each call of the model."""
        self._learned = self.feed()
        """Begins a step earlier: `tulle.lookahead` without ids; what one loop has learned the next one knows."""
        self._ahead: Feed | None = None
        """That of the loop under way."""

    def look_up(self, module: TableModule, ids: Tensor) -> tuple[Tensor, Tensor, int | None]:
        """Rows, where in them the ids lie, and where the padding does. Every rank must call it, with its own ids."""
        table = self._by_parameter[id(module.weight)]
        unit = self._told(table, ids) or self._unit([table], [ids], module)
        if torch.is_grad_enabled() and table.parameter.requires_grad:
            self._expect(unit)
        try:
            return unit.look_up(table, ids, module.padding_idx)
        except KeyError:
            raise ModelError(
                f"a lookup in {table.name!r} on rank {self._axis.rank} asks for rows that were not told ahead: until "
                "now its ids were a part of the batch as it was; for ids that are computed, give tulle.lookahead "
                "ids=..., a function from the batch to the ids of each table"
            ) from None

    def placements(self) -> dict[str, tuple[str, int]]:
        """How each table is split, and how many distinct rows this rank's last lookups were told to have, by name."""
        return {
            name: (placement_of(table.split), self._rows.get(table.number, 0)) for name, table in self.tables.items()
        }

    def feed(self, ids_of: IdsOf | None = None) -> Feed:
        """Something that tells rows of steps ahead."""
        return Feed([*self.tables.values()], self._unit, self._axis, ids_of)

    def begin_lookahead(self, ids_of: IdsOf | None) -> Feed:
        """A loop begins that tells the rows of each step a step earlier than the calls of the model."""
        self._ahead = self._learned if ids_of is None else self.feed(ids_of)
        return self._ahead

    def end_lookahead(self) -> None:
        """The loop is over."""
        if self._ahead is not None:
            self._ahead.drop()
        self._ahead = None

    def begin_call(self, arguments: object) -> None:
        """The model is called for training: tell the rows of its lookups, as far as they are known, and fetch them."""
        if self._ahead is None:
            self._calls.tell(arguments)
            if self._calls.upcoming is not None:
                self._calls.upcoming.begin_fetch()
            self._calls.begin(arguments)

    def end_call(self) -> None:
        """The call is over."""
        self._calls.end()

    def after_step(self) -> None:
        """The optimizers have stepped: fetch what the next step looks up. Every rank must call it."""
        if self._ahead is not None and self._ahead.upcoming is not None:
            self._ahead.upcoming.begin_fetch()

    def wait(self) -> None:
        """Return when no exchange is under way: for those who time them."""
        self._way.courier.submit(lambda: None).result()

    def _told(self, table: SplitTable, ids: Tensor) -> Unit | None:
        if not torch.is_grad_enabled() or not table.is_foreseeable:
            return None
        return (self._ahead or self._calls).find(table, ids)

    def _unit(self, tables: Sequence[SplitTable], ids: Sequence[Tensor], module: TableModule | None = None) -> Unit:
        """Rows of some tables, to be fetched together. Every rank must call it, with its own ids."""
        self._units += 1
        made = Unit(self._units, tables, ids, self._way, came=self._gradient_came, module=module)
        self._alive[made.number] = made
        self._rows |= made.rows()
        return made

    def end_backward(self) -> None:
        """Push what was not, wait for all pushes, and set the gradients of what this rank owns."""
        for unit_number, numbers in self._remaining(self._agree()):
            unit = self._alive.get(unit_number)
            if unit is None:
                raise ModelError(
                    f"rank {self._axis.rank} has let go of the graph of a lookup in "
                    f"{', '.join(self.tables)[:80]} for which another rank has a gradient: "
                    "let all ranks keep, or drop, their losses alike"
                )
            self._pushes.append((unit, unit.push(numbers)))
        pushes, self._pushes = self._pushes, []
        self._came.clear()
        self._expected.clear()
        for unit, job in pushes:
            for number, pushed in job.result().items():
                _accumulate(unit.tables[number], pushed, self._axis, is_scaled=unit.is_scaled)
        for table in self.tables.values():
            gradient = table.parameter.grad
            if gradient is not None and not isinstance(gradient, ShardGradient):
                table.parameter.grad = ShardGradient.of(gradient, self._axis)

    def _expect(self, unit: Unit) -> None:
        if unit.number not in self._expected[-1:]:
            self._expected.append(unit.number)

    def _gradient_came(self, unit: Unit, table: SplitTable, gradient: Tensor) -> None:
        self._report(table.name, gradient)
        self._came.add((unit.number, table.number))
        while self._expected:
            last = self._alive.get(self._expected[-1])
            if last is None or not last.is_complete:
                return
            self._expected.pop()
            self._pushes.append((last, last.push(sorted(last.tables))))

    def _agree(self) -> set[tuple[int, int]]:
        """The gradients that came on any rank, by unit and table. Every rank must call it."""
        tables = len(self._by_parameter)
        keys = sorted(unit * tables + table for unit, table in self._came)
        device = self._agreement.device
        head = torch.zeros(1 + _AGREED_AT_ONCE, dtype=torch.long)
        head[0] = len(keys)
        head[1 : 1 + len(keys)] = torch.tensor(keys[:_AGREED_AT_ONCE], dtype=torch.long)
        heard = all_gather(head.to(device), self._agreement, label=_LABEL).wait().tolist()
        lengths = [max(0, count - _AGREED_AT_ONCE) for count, *_ in heard]
        together = {key for count, *some in heard for key in some[:count]}
        if any(lengths):
            rest = torch.tensor(keys[_AGREED_AT_ONCE:], dtype=torch.long, device=device)
            together |= {*all_gather_parts(rest, lengths, self._agreement, label=_LABEL).wait().tolist()}
        return {divmod(key, tables) for key in together}

    def _remaining(self, together: set[tuple[int, int]]) -> Iterator[tuple[int, list[int]]]:
        """What is still to be pushed, in the one order: units descending, tables ascending."""
        done = {unit.number for unit, _ in self._pushes}
        for unit in sorted({unit for unit, _ in together} - done, reverse=True):
            yield unit, sorted(table for other, table in together if other == unit)


def _accumulate(table: SplitTable, pushed: Pushed, axis: Axis, *, is_scaled: bool) -> None:
    """Add the mean over ranks of the gradients that were pushed here to the parameter's gradient."""
    places, values = pushed.places, pushed.values
    if pushed.lookups is not None and is_scaled:
        values = values / pushed.lookups.clamp(min=1).unsqueeze(1)
    if pushed.lookups is not None and table.is_sparse:
        is_held = pushed.lookups > 0
        if not bool(is_held.all()):
            places, values = places[is_held], values[is_held]
    values = values.to(table.parameter.dtype).div_(axis.size)
    before = table.parameter.grad
    if table.is_sparse:
        gradient = RowSparse.trusted(places, values, len(table.parameter), is_coalesced=True).to_sparse_coo()
        gradient = gradient if before is None else before + gradient
    else:
        gradient = torch.zeros_like(table.parameter) if before is None else before
        gradient.index_add_(0, places, values)
    table.parameter.grad = gradient
