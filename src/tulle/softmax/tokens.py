"""`Tokens`: how many tokens each rank has, and how what belongs to them travels between the ranks.

agree        counts                                    every rank knows all, or all raise alike
gather       [own, ...]  ->  [all, ...]                hidden states, targets
give_back    [all, ...]  ->  [ranks, own, ...]         what each rank found out about the tokens of each other
sum_back     made rank by rank  ->  [own, ...]         partial sums, sent while the next is being made
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tulle.comm import all_gather, all_gather_parts, all_to_all_parts, raise_together, release
from tulle.comm.parts import Arrived
from tulle.comm.pending import Deferred
from tulle.errors import TulleError
from tulle.mesh import Axis


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """The tokens of all ranks of an axis, in the order of ranks.

    Args:
        counts: Of each rank.
        axis: Whose ranks; None if there is one only.
        label: What counters and errors call the exchanges.
        are_trained: Whether some rank's are to have gradients: one without tokens may have no graph.
    """

    counts: tuple[int, ...]
    axis: Axis | None
    label: str
    are_trained: bool = False

    @staticmethod
    def agree(
        count: int, error: TulleError | None, axis: Axis | None, *, label: str, are_trained: bool = False
    ) -> Tokens:
        """Tell all ranks how many tokens this one has. Every rank must call it.

        Args:
            count: Tokens here.
            error: What is wrong with them: then every rank raises it.
            axis: Whose ranks take part.
            label: What it is for.
            are_trained: Whether those here are to have gradients.
        """
        if axis is None:
            if error is not None:
                raise error
            return Tokens((count,), None, label, are_trained)
        head = torch.tensor([count, error is not None, are_trained], device=axis.device)
        heard = all_gather(head, axis, label=label).wait().tolist()
        if any(is_wrong for _, is_wrong, _ in heard):
            raise_together(error, axis, label=label)
        return Tokens(tuple(count for count, *_ in heard), axis, label, any(trained for *_, trained in heard))

    @property
    def rank(self) -> int:
        """This rank."""
        return 0 if self.axis is None else self.axis.rank

    @property
    def total(self) -> int:
        """Tokens of all ranks."""
        return sum(self.counts)

    def of(self, rank: int) -> slice:
        """Where a rank's tokens lie among all."""
        first = sum(self.counts[:rank])
        return slice(first, first + self.counts[rank])

    def gather(self, part: Tensor, arrived: Arrived | None = None) -> Deferred[Tensor]:
        """All ranks' parts: `[own, ...]` to `[total, ...]`. Every rank must call it.

        Args:
            part: What belongs to this rank's tokens.
            arrived: Called with a rank and its part as soon as that is there, this rank's own first.
        """
        if self.axis is not None:
            return all_gather_parts(part.contiguous(), self.counts, self.axis, label=self.label, arrived=arrived)

        def finish() -> Tensor:
            if arrived is not None and len(part):
                arrived(0, part)
            return part

        return Deferred(finish)

    def give_back(self, every: Tensor) -> Tensor:
        """Give each rank what belongs to its tokens: `[total, ...]` to `[ranks, own, ...]`. Every rank must call it."""
        if self.axis is None:
            return every.unsqueeze(0)
        own = self.counts[self.rank]
        parts = every.contiguous().split(self.counts)
        came = all_to_all_parts(parts, [own] * self.axis.size, self.axis, label=self.label).wait()
        return came.view(self.axis.size, own, *every.shape[1:])

    def sum_back(self, make: Callable[[int], Tensor]) -> Tensor:
        """The sum over ranks of what each makes for the tokens of this one. Every rank must call it.

            ranks 4          round 1     round 2     round 3     last
            rank 0 makes     for 1       for 2       for 3       for itself
            ... and sends                for 1       for 2       for 3

        Args:
            make: Gives the part for a rank's tokens, `[tokens of that rank, ...]`.
        """
        if self.axis is None:
            return make(0)
        size, under_way = self.axis.size, []
        for k in range(1, size):
            to, source = (self.rank + k) % size, (self.rank - k) % size
            part = make(to)
            parts = [part if rank == to else part[:0] for rank in range(size)]
            lengths = [self.counts[self.rank] if rank == source else 0 for rank in range(size)]
            under_way.append(all_to_all_parts(parts, lengths, self.axis, label=self.label))
        total = make(self.rank)
        for pending in under_way:
            came = pending.wait()
            total += came
            release(came, self.axis)
        return total
