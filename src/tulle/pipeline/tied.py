"""`Tied`: a parameter that several stages hold, each with a copy, whose gradients are added up on all of them alike.

A copy at each stage that reads it costs memory once more, and one exchange of its gradient a step; sending the
parameter itself to each reader would cost an exchange a micro-batch. The copies start equal and get equal gradients,
summed in the order of ranks, so that the same optimizer keeps them equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tulle.pipeline.mailbox import Mailbox
from tulle.pipeline.messages import Kind


@dataclass(frozen=True, slots=True, eq=False)
class Tied:
    """One parameter and the ranks that hold it.

    Args:
        name: The parameter's.
        parameter: This rank's copy, or what stands for it.
        ranks: That hold it, ascending.
    """

    name: str
    parameter: nn.Parameter
    ranks: Sequence[int]


class Aside:
    """The gradient that a tied parameter had, kept apart from what backward adds.

    Args:
        model: Number of the model.
        tied: The parameter.
    """

    def __init__(self, model: int, tied: Tied) -> None:
        self.model, self._tied, self.parameter = model, tied, tied.parameter
        self._before, tied.parameter.grad = tied.parameter.grad, None

    @torch.no_grad()
    def add_up(self, mailbox: Mailbox, number: tuple[int, int]) -> None:
        """Sum over the ranks what backward has added. Every rank of the axis must call it, with the same number."""
        me = mailbox.axis.rank
        if me not in self._tied.ranks:
            return
        mine = self.parameter.grad
        if mine is not None and mine.layout != torch.strided:
            mine = mine.to_dense()  # another stage's may be dense
        others = [rank for rank in self._tied.ranks if rank != me]
        mailbox.send(self._key(number, me, mailbox), mine, to=others)
        theirs = {rank: self._from(mailbox, number, rank) for rank in others}
        parts = [mine if rank == me else theirs[rank] for rank in self._tied.ranks]
        self.parameter.grad = _sum([part for part in parts if part is not None])

    def put_back(self) -> None:
        """Add what was there before."""
        self.parameter.grad = _sum([part for part in (self._before, self.parameter.grad) if part is not None])

    def undo(self) -> None:
        """Have the gradient that was there before, and nothing else."""
        self.parameter.grad = self._before

    def _from(self, mailbox: Mailbox, number: tuple[int, int], rank: int) -> Tensor | None:
        key = self._key(number, rank, mailbox)
        return mailbox.receive(key, rank, lambda: f"the gradient of the tied parameter {self._tied.name!r}")

    @staticmethod
    def _key(number: tuple[int, int], rank: int, mailbox: Mailbox) -> tuple[Kind, int, int]:
        program, index = number
        return Kind.GRADIENT, program, index * mailbox.axis.size + rank


def _sum(parts: Sequence[Tensor]) -> Tensor | None:
    if len(parts) < 2:
        return parts[0] if parts else None
    total = parts[0].to_dense() if parts[0].layout != torch.strided else parts[0].clone()
    for part in parts[1:]:
        total += part
    return total
