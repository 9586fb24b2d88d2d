"""`Result`: a tensor that a micro-batch returned; all ranks are told of it once, at the end of the step.

A program is over when its function has returned, and waits for nobody: what the others are to have of it goes together
with what later micro-batches return, small tensors of one shape, as losses are, in one message.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from tulle.pipeline.interception import run_in_this_thread
from tulle.pipeline.mailbox import Mailbox
from tulle.pipeline.messages import Kind
from tulle.pipeline.program import Program
from tulle.pipeline.structure import flatten, rebuild
from tulle.pipeline.turn import Turn
from tulle.pipeline.values import Result

_SMALL = 1024
"""Tensors of no more numbers go together."""


def body_of(function: Callable[..., Any], args: Any, kwargs: Any, turn: Turn, program: Program) -> Callable[[], Any]:
    """What a micro-batch runs: a step function, of whose result tensors are told later."""

    def body() -> Any:
        with run_in_this_thread(program):
            result = function(*args, **kwargs)
        turn.holds_nothing = True
        given = program.give(result)
        program.end()
        return given

    return body


@torch.no_grad()
def told_to_all(values: Sequence[Any], mailbox: Mailbox, run: int) -> list[Any]:
    """What micro-batches returned, with plain tensors on all ranks. Every rank of the axis must call it, in the step.

    Args:
        values: Of each micro-batch.
        mailbox: Of the axis.
        run: Number of the step.
    """
    apart = [flatten(value) for value in values]
    found = [leaf for leaves, _ in apart for leaf in leaves if isinstance(leaf, Result)]
    if not found:
        return [*values]
    _exchange(_groups(found), mailbox, run)
    return [
        rebuild(spec, [_here(leaf) if isinstance(leaf, Result) else leaf for leaf in leaves]) for leaves, spec in apart
    ]


def _groups(results: Sequence[Result]) -> list[list[Result]]:
    """Those that go together, alike on all ranks."""
    groups: dict[Hashable, list[Result]] = {}
    for number, one in enumerate(results):
        known = one.described
        is_small = known.layout == torch.strided and prod(known.shape) <= _SMALL
        key = (one.home, known.dtype, known.is_of_host, known.shape) if is_small else number
        groups.setdefault(key, []).append(one)
    return [*groups.values()]


def _exchange(groups: Sequence[Sequence[Result]], mailbox: Mailbox, run: int) -> None:
    me, size = mailbox.axis.rank, mailbox.axis.size
    keys = [(Kind.VALUE, run, -1 - number) for number in range(len(groups))]
    for key, group in zip(keys, groups, strict=True):
        if group[0].home == me:
            tensors = [_here(one) for one in group]
            device = tensors[0].device  # a tensor of the user's own may be elsewhere, which this rank alone sees
            together = tensors[0] if len(tensors) == 1 else torch.stack([one.to(device) for one in tensors])
            mailbox.send(key, together, to=[rank for rank in range(size) if rank != me])
    for key, group in zip(keys, groups, strict=True):
        if group[0].home != me:
            come = mailbox.receive(key, group[0].home, lambda: "what the step returned")
            for one, tensor in zip(group, [come] if len(group) == 1 else come, strict=True):
                one.tensor = tensor if len(group) == 1 else tensor.clone()


def _here(result: Result) -> Tensor:
    assert result.tensor is not None, "its home has it"
    return result.tensor
