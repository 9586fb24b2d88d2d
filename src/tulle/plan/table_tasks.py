"""`TableTasks`: what tables exchange along axis `data` in a step: row numbers, rows of split tables, and gradients.

one stage            tell -> fetch -> forward .. lookup      backward of the first piece with a lookup -> push
several              forward .. -> tell -> fetch -> lookup
with lookahead       fetch -> lookup;  tell of the next step
replicas             tell beside forward                     backward of that piece -> sum
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tulle.cost import Cost
from tulle.plan.bundle import Bundle
from tulle.plan.deal import Deal
from tulle.plan.tasks import Run, Tasks
from tulle.plan.work import DATA, Work


@dataclass(slots=True)
class TableTasks:
    """Writes it.

    Args:
        deal: Of the plan.
        tasks: Where it is written.
    """

    deal: Deal
    tasks: Tasks
    begun: list[int] = field(init=False, default_factory=list)
    """What travels from the begin of a forward on."""

    def begin(self, run: Run, *, is_first: bool) -> Mapping[int, Sequence[int]]:
        """Write what travels from the begin of a forward on; what each piece waits for, by its number.

        Rows of split tables come before their first lookup. With lookahead the row numbers of the next step are told
        beside; without it those of this one first, and the call of the model begins when they are.
        """
        found: defaultdict[int, list[int]] = defaultdict(list)
        bundles = [one for one in self.deal.bundles if one.stage == run.stage and (is_first or one.exchange.is_split)]
        split = [one for one in bundles if one.exchange.is_split and not self._are_told_at_lookups]
        told = [] if self.deal.lookahead else [self._tell(one, (), "rows") for one in split]
        run.waits += told
        for bundle in split:
            found[bundle.first].append(self._fetch(bundle, told))
        beside = [
            self._tell(bundle, (), "sparse")
            for bundle in bundles
            if bundle.exchange.told.seconds and (self.deal.lookahead or not bundle.exchange.is_split)
        ]
        self.begun += [*told, *(index for of_piece in found.values() for index in of_piece), *beside]
        return found

    def look_up(self, run: Run, work: Work) -> None:
        """Stages without lookahead tell rows when they come to the lookup, and wait for them there."""
        for bundle in self._looked_up_in(work) if self._are_told_at_lookups else ():
            if bundle.exchange.is_split:
                told = self._tell(bundle, run.reached(), "rows")
                run.waits.append(self._fetch(bundle, [told]))

    @property
    def _are_told_at_lookups(self) -> bool:
        return self.deal.share.pipe > 1 and not self.deal.lookahead

    def is_complete(self, work: Work, *, is_last: bool) -> bool:
        """Whether gradients are when a piece's backward is over: of split tables in each turn, of replicas once."""
        return any(one.exchange.is_split or is_last for one in self._looked_up_in(work))

    def synchronize(self, work: Work, after: Iterable[int], *, is_last: bool) -> list[int]:
        """Send the gradients that are complete with a piece's backward; what the optimizer waits for."""
        sent: list[int] = []
        for bundle in self._looked_up_in(work):
            if bundle.exchange.is_split:
                sent.append(self._send("push", bundle, bundle.exchange.values, after, "rows"))
            elif is_last:
                sent.append(self._send(bundle.exchange.scheme, bundle, bundle.exchange.values, after, "sparse"))
        return sent

    def _looked_up_in(self, work: Work) -> list[Bundle]:
        """Those whose first lookup is in a piece, so that its backward gives their last gradient."""
        return [bundle for bundle in self.deal.bundles if bundle.first == work.number]

    def _tell(self, bundle: Bundle, after: Iterable[int], kind: str) -> int:
        return self._send("tell rows of", bundle, bundle.exchange.told, after, kind)

    def _fetch(self, bundle: Bundle, after: Iterable[int]) -> int:
        return self._send("fetch", bundle, bundle.exchange.values, after, "rows")

    def _send(self, verb: str, bundle: Bundle, cost: Cost, after: Iterable[int], kind: str) -> int:
        name = f"{verb} {', '.join(bundle.names)}"
        return self.tasks.send(name, cost, after, stage=bundle.stage, axis=DATA, kind=kind)
