"""`DenseTasks`: what parameters with dense gradients exchange along axis `data` in a step, by how they are kept.

replicas                     backward .. -> all-reduce of each bucket -> update
the same, updated late       all-reduce of what is carried over -> update of a bucket -> the piece that reads it
shared out                   gather -> forward;  gather -> backward -> reduce-scatter, with replicas of parts their sums
their optimizer shared out   backward .. -> all-reduce of each bucket -> update -> gather stepped
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tulle.cost import Cost, Network
from tulle.memory import Memory
from tulle.plan.bucket import Bucket
from tulle.plan.deal import Deal
from tulle.plan.sharing import gather_cost, scatter_cost
from tulle.plan.tasks import Run, Tasks
from tulle.plan.work import DATA, Work


@dataclass(slots=True)
class DenseTasks:
    """Writes it.

    Args:
        deal: Of the plan.
        tasks: Where it is written.
    """

    deal: Deal
    tasks: Tasks
    _buckets: dict[int, Bucket] = field(init=False)
    """By the number of the piece with which they are full; in the order in which they are sent."""
    _reduced: dict[int, int] = field(init=False, default_factory=dict)
    """By the same, the all-reduce of one that is carried over."""
    _updated: dict[int, int] = field(init=False, default_factory=dict)
    """By the same, the update that waits for it, where updates wait for reads."""

    def __post_init__(self) -> None:
        self._buckets = {bucket.number: bucket for bucket in self.deal.buckets()}

    def begin(self, stage: int) -> None:
        """Send what a stage has carried over from the step before."""
        for bucket in self._buckets.values():
            if bucket.is_carried and bucket.stage == stage:
                self._reduced[bucket.number] = self._all_reduce(bucket, ())

    def gather(self, run: Run, work: Work) -> None:
        """Parameters that are shared out are whole while a piece runs."""
        whole_bytes = work.parameters_bytes + work.frozen_bytes
        if self._is_shared_out and whole_bytes:
            cost = gather_cost(whole_bytes, *self._sharing)
            run.interrupt(f"gather {work.name}", cost, axis=DATA, kind="dense")

    def update_late(self, run: Run, work: Work) -> None:
        """The update of what a piece reads first; a bucket that is carried over is waited for here."""
        if not self.deal.is_late or work.number not in self._buckets:
            return
        bucket = self._buckets[work.number]
        run.write()
        after = [self._reduced[bucket.number]] if bucket.is_carried else []
        self._updated[bucket.number] = self.tasks.compute(
            f"update {bucket.name}", self.deal.update.dense_s(bucket.pieces), after, stage=run.stage, kind="update"
        )

    def is_complete(self, work: Work, *, is_last: bool) -> bool:
        """Whether there is something to send when a piece's backward is over."""
        return self._is_scattered(work) or (is_last and work.number in self._buckets)

    def synchronize(self, work: Work, after: Sequence[int], *, is_last: bool) -> list[int]:
        """Send the gradients that are complete with a piece's backward; what the optimizer waits for."""
        if self._is_scattered(work):  # and then in no bucket
            cost = scatter_cost(work.parameters_bytes, *self._sharing)
            return [self._send(f"reduce-scatter {work.name}", cost, after, work.stage)]
        return self._fill(self._buckets[work.number], after) if is_last and work.number in self._buckets else []

    def gather_stepped(self, stage: int, update: int) -> int:
        """Send what a rank has updated of a stage; what ends then."""
        stepped_bytes = sum(work.parameters_bytes for work in self.deal.pieces(stage))
        return self._send("gather stepped", gather_cost(stepped_bytes, *self._sharing), [update], stage)

    def _fill(self, bucket: Bucket, after: Sequence[int]) -> list[int]:
        """A bucket is full: it is sent now, or in the next step, after the rows that this one waits for."""
        if bucket.is_carried:
            self.tasks.wait_for_last(self._reduced[bucket.number], after)
            return []
        index = self._all_reduce(bucket, after)
        if not self.deal.is_late:
            return [index]
        self.tasks.wait_for_last(self._updated[bucket.number], [index])
        return []

    def _is_scattered(self, work: Work) -> bool:
        """Whether the sum of a piece's gradients is shared out."""
        return self._is_shared_out and work.parameters_bytes > 0

    @property
    def _is_shared_out(self) -> bool:
        return bool(self.deal.plan.memory.full_shard) and self.deal.share.data > 1

    def _all_reduce(self, bucket: Bucket, after: Iterable[int]) -> int:
        return self._send(f"all-reduce {bucket.name}", bucket.cost, after, bucket.stage)

    @property
    def _sharing(self) -> tuple[Memory, Network, int]:
        return self.deal.plan.memory, self.deal.network, self.deal.share.data

    def _send(self, name: str, cost: Cost, after: Iterable[int], stage: int) -> int:
        return self.tasks.send(name, cost, after, stage=stage, axis=DATA, kind="dense")
