"""`Tied`: a parameter that several stages hold, each with a copy, whose gradients are added up on all of them alike.

So are those of tensors of the user's own (`leaves.py`).

A copy at each stage that reads it costs memory once more, and one exchange of its gradient a step; sending the
parameter itself to each reader would cost an exchange a micro-batch. The copies start equal and get equal gradients,
summed in the order of ranks, so that the same optimizer keeps them equal.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

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
    parameter: Tensor
    ranks: Sequence[int]


class Holder(Protocol):
    """A placed model."""

    @property
    def tied(self) -> Sequence[Tied]:
        """Of its parameters those that several stages hold."""
        ...


class Reader(Protocol):
    """A program."""

    @property
    def leaves(self) -> Mapping[int, Tensor]:
        """The user's own tensors that need a gradient and that stages read in it, by identity, on all ranks alike."""
        ...


class Asides:
    """The gradients that are added up over ranks when a step, or a backward outside of steps, is over.

    They are those of tied parameters, and of tensors of the user's own.

    Args:
        models: That are placed, by number.
        mailbox: Messages between the ranks.
    """

    def __init__(self, models: Mapping[int, Holder], mailbox: Mailbox) -> None:
        self._models, self._mailbox = models, mailbox
        self._tied: list[Aside] | None = None
        self._own: dict[int, Aside] = {}

    def begin(self, reader: Reader | None = None) -> None:
        """Have these gradients hold what comes from now on, and nothing else; called before each backward.

        Args:
            reader: The program whose backward begins.
        """
        if self._tied is None:
            models = sorted(self._models.items())
            self._tied = [Aside(number, tied) for number, model in models for tied in model.tied]
        known = {id(one.parameter) for one in self._tied}.union(self._own)
        for identity, leaf in ({} if reader is None else reader.leaves).items():
            if identity not in known:
                everyone = range(self._mailbox.axis.size)
                self._own[identity] = Aside(None, Tied(f"of shape {list(leaf.shape)}", leaf, everyone))

    def add_up(self, ran: Collection[int], readers: Sequence[Reader], number: int, *, first: int = 0) -> None:
        """Sum what has come. Every rank must call it.

        Args:
            ran: Numbers of the models that ran, which all ranks know alike.
            readers: The programs, in one order on all ranks.
            number: Of the messages' program.
            first: Of the messages.
        """
        self.begin()  # if there was no backward
        tied = [one for one in self._tied or () if one.model in ran]
        read = dict.fromkeys(identity for reader in readers for identity in reader.leaves)
        own = [self._own[identity] for identity in read if identity in self._own]
        for index, aside in enumerate([*tied, *own], first):
            aside.add_up(self._mailbox, (number, index))
        for aside in [*(self._tied or ()), *self._own.values()]:
            aside.put_back()
        self._tied, self._own = None, {}

    def undo(self) -> None:
        """After an error: copies are to stay equal, so what has come to some of them is let go."""
        for aside in [*(self._tied or ()), *self._own.values()]:
            aside.undo()
        self._tied, self._own = None, {}


class Aside:
    """The gradient that a tied parameter had, kept apart from what backward adds.

    Args:
        model: Number of the model, if it is of one.
        tied: The parameter, or a tensor of the user's own, which all ranks hold.
    """

    def __init__(self, model: int | None, tied: Tied) -> None:
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
