"""What becomes of placeholders whose tensors an operation has written in, given back, detached or marked in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tulle.errors import ModelError
from tulle.parts import local_of
from tulle.pipeline.holdings import Holdings
from tulle.pipeline.operation import Call
from tulle.pipeline.outcome import Outcome, Same
from tulle.pipeline.placeholder import Placeholder
from tulle.pipeline.tape import Phase
from tulle.pipeline.values import Values

MARKS = ("detach_", "requires_grad_")
"""Operations that change whether a tensor needs a gradient, and nothing else."""


def mark(placeholder: Placeholder, *, needs_grad: bool) -> None:
    """Have all ranks know that a tensor was detached in place, or made to need a gradient."""
    placeholder.needs_grad = needs_grad
    placeholder.family.version += 1  # copies elsewhere are as it was


def note_marked(call: Call, outcome: Outcome) -> None:
    """Have all ranks know of the arguments that a module has made to need a gradient."""
    for number in outcome.marked:
        leaf = call.leaves[number]
        if isinstance(leaf, Placeholder):
            mark(leaf, needs_grad=True)
            if leaf.local is not None:  # the module may have marked a copy, on another rank
                leaf.local.requires_grad_()
        else:
            leaf.requires_grad_()


def put_back(call: Call, natives: Sequence[Any], seen: Outcome, phase: Phase) -> None:
    """Let what an operation has written in, or gave back, be what its placeholder stands for.

    Args:
        call: The operation.
        natives: Its arguments as it ran on them.
        seen: Its outcome.
        phase: In which it ran.
    """
    same = [result.argument for result in seen.results if isinstance(result, Same)]
    for number in (*seen.written, *same):
        leaf = call.leaves[number]
        if isinstance(leaf, Placeholder) and leaf.local is not natives[number]:
            leaf.local, leaf.phase = natives[number], phase


def check_written(call: Call, seen: Outcome, known: Outcome | None, rank: int, rank_of: Callable[[int], int]) -> None:
    """Refuse a write of which other ranks cannot know, because such calls of the module did not write there before.

    Args:
        call: Of a module, which has run.
        seen: Its outcome.
        known: What other ranks take for that, if they know.
        rank: Where it ran.
        rank_of: Gives the rank of a stage.
    """
    for number in set(seen.written).difference(seen.written if known is None or known.varies else known.written):
        leaf = call.leaves[number]
        if not _is_alone(leaf, rank, rank_of) or (number in seen.trained and not leaf.needs_grad):
            raise ModelError(
                f"{call.name!r} writes in an argument of shape {list(leaf.shape)}, in which it did not with arguments "
                "of such shapes before, so that ranks that have a copy would not know: have it write at each call, or "
                "in a copy of its own (.clone())"
            )


@contextmanager
def unseen_refused(call: Call, natives: Sequence[Any], rank: int, rank_of: Callable[[int], int]) -> Iterator[None]:
    """Refuse a write that torch does not count, as those by way of `.data`: nobody would tell ranks that have a copy.

    Args:
        call: Of a module, the first with arguments of such shapes, which runs within.
        natives: Its arguments as it runs on them.
        rank: Where it runs.
        rank_of: Gives the rank of a stage.
    """
    watched = [
        (native, native._version, local_of(native).clone())
        for leaf, native in zip(call.leaves, natives, strict=False)
        if isinstance(native, Tensor) and native.layout == torch.strided and not native.is_inference()
        if native.is_floating_point() and native.dtype.itemsize > 1 and not native.is_nested
        if not isinstance(native, nn.Parameter) and not _is_alone(leaf, rank, rank_of)
    ]
    yield
    for native, version, before in watched:
        if native._version == version and not torch.allclose(local_of(native), before, rtol=0, atol=0, equal_nan=True):
            raise ModelError(
                f"{call.name!r} writes in an argument of shape {list(native.shape)} in a way that torch does not count "
                "(by .data, say), so that ranks that have a copy would not know: have it write within torch.no_grad(), "
                "or in a copy of its own (.clone())"
            )


def _is_alone(leaf: object, rank: int, rank_of: Callable[[int], int]) -> bool:
    """Whether a rank alone has the values of an argument."""
    return isinstance(leaf, Placeholder) and not leaf.sent and rank_of(leaf.stage) == rank


def note_written(
    call: Call, number: int, stage: int, *, is_trained: bool, values: Values, take: Callable[[Placeholder], None]
) -> bool:
    """Have a placeholder, and all that share memory with it, know that an operation wrote there. On every rank.

    Args:
        call: The operation.
        number: Of its argument in which it wrote.
        stage: Where it ran.
        is_trained: Whether the argument needs a gradient since, or did before.
        values: Of the program.
        take: Called with each placeholder to which gradients go back through the operation from now on.

    Returns:
        Whether it wrote in what is a model's.

    Raises:
        ModelError: If it wrote in a copy of a tensor of another stage of which there are views, or in one of several
            copies.
    """
    leaf = call.leaves[number]
    if not isinstance(leaf, Placeholder):
        return False
    of_model = _writes_in_model(leaf, values.holdings, by=call.name)
    phase, rank = values.tape.phase, values.rank_of(stage)
    leaf.family.note_written(rank, call.name)
    if torch.is_grad_enabled() and is_trained:
        for member in leaf.family.with_all(leaf):  # from now on all of them come from what runs now
            member.needs_grad = True
            take(member)
            member.phase = None if member.local is None else phase
    if values.rank_of(leaf.stage) != rank:  # a module wrote in what it was sent: that is the tensor now
        if leaf.own is not None and (not leaf.needs_grad or leaf.is_parameter):  # for later programs
            values.give_back(leaf, rank, call.name)
            return of_model
        _check_alone(call, leaf)
        leaf.stage, leaf.sent = stage, {}
    lender = leaf.family.lender() if leaf.family.lender is not None else None
    if lender is not None:
        lender.family.note_written(rank, call.name)
    if lender is not None and values.rank_of(lender.stage) != rank:  # a view of what was sent: so is what it is of
        _check_alone(call, lender)
        lender.stage, lender.sent, lender.needs_grad = stage, {}, lender.needs_grad or leaf.needs_grad
        lender.phase = None if lender.local is None else phase
        take(lender)
    return of_model


def _writes_in_model(target: Placeholder, holdings: Holdings, *, by: str) -> bool:
    """Whether a model's parameter or buffer was written in, also by way of `.data`, whose writes no version tells of.

    One that several ranks hold, each for modules of its own, is refused: the others would keep what they have.
    """
    owns = [member.own for member in target.family.with_all(target) if member.own is not None]
    for own in owns:
        holdings.note_changed(own)
    known = set(map(id, owns)).intersection(holdings.stages)
    name = next((holdings.copied[one] for one in known if one in holdings.copied), None)
    if name is not None:
        raise ModelError(
            f"{by!r} writes in {name!r}, of which several ranks hold a copy, because modules of several stages read "
            "it, and one copy only would change: place these modules at one stage, or give each its own"
        )
    return not known <= holdings.written


def _check_alone(call: Call, leaf: Placeholder) -> None:
    if leaf.family.has_others:
        raise ModelError(
            f"{call.name!r} writes in {leaf!r}, or a view of it, which lives at another stage and of which there are "
            "views: give it a copy (.clone()), or place both at one stage"
        )
