"""`average_by_hand`: gradients that the program put in place past backward are averaged before they are used.

    backward        hooks see the gradient        it travels        the parameter has the mean, which is marked so
    by hand         p.grad = g                                      an optimizer, or clipping, finds one without a mark

All ranks run the same program, so all find the same. That they do is agreed on before anything travels, on a lane of
its own. What came by backward within `no_sync` is no such gradient: it is to stay on its rank. A mean that was replaced
(`p.grad = p.grad * 0.5`) is one, as nothing tells it from others; it travels once more, and is the same afterwards.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from zlib import crc32

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from tulle.board import tell
from tulle.comm import BackgroundThread, all_gather, eager, gather_values, lane, now_s, traffic
from tulle.engine.data_parallel import DataParallel
from tulle.engine.means import MEAN, is_mean
from tulle.engine.slots import Slot
from tulle.engine.stepped import Stepped
from tulle.errors import CommunicationError, GradientError
from tulle.mesh import Axis

logger = logging.getLogger("tulle")
_LABEL = "which gradients were set by hand"
_LONG_S = 3.0
"""After so many seconds the others are told what this rank waits for."""


@eager
def average_by_hand(
    parameters: Sequence[Tensor],
    engines: Iterable[DataParallel],
    optimizer: Optimizer | None = None,
    *,
    has_closure: bool = False,
) -> None:
    """Average gradients of replicas that came in another way than by backward. Every rank must call it, alike.

    Args:
        parameters: Whose gradients are about to be used.
        engines: That keep some of them in step, each along an axis of several ranks.
        optimizer: That is to step with them; None if something else is to read them.
        has_closure: Whether gradients may still come within the step.

    Raises:
        GradientError: If ranks disagree on which gradients these are, or a gradient scaler has looked for infinities in
            what each rank has.
        CommunicationError: If a rank does not come, as it has no such gradients where others have some.
    """
    with torch._C.DisableTorchFunctionSubclass():  # what is late, or a part, is only looked at as it is
        # Of all parameters in every step: without a call of `is_mean` it takes half as long.
        unknown = [p for p in parameters if (given := p.grad) is not None and getattr(given, MEAN, None) != id(given)]
    for engine in sorted(engines, key=lambda engine: engine.number):
        before = None if optimizer is None else engine.stepped.get(optimizer, Stepped())
        has_no_backward = before is not None and before.backwards == engine.backwards
        is_any_unknown = any(engine.slot_of(parameter) is not None for parameter in unknown)
        if engine.syncing and (is_any_unknown or has_no_backward):
            _average(engine, parameters, before, has_closure=has_closure)
        if optimizer is not None:
            engine.stepped[optimizer] = engine.now


def _average(engine: DataParallel, parameters: Sequence[Tensor], before: Stepped | None, *, has_closure: bool) -> None:
    """Average what one engine keeps in step.

    Args:
        engine: This.
        parameters: Some of them it keeps in step.
        before: How things stood when the optimizer that is to step did so last, if one is to step.
        has_closure: Whether gradients may still come within the step.
    """
    slots = [slot for p in parameters if (slot := engine.slot_of(p)) is not None]
    is_any_unknown = any(slot.parameter.grad is not None and not is_mean(slot.parameter.grad) for slot in slots)
    if engine.late is not None and is_any_unknown:
        engine.late.make_replicas_true()  # what is on the way counts as not sent
    given = [slot for slot in slots if slot.parameter.grad is not None and not slot.is_fired]
    now = engine.now
    has_nothing_new = before is not None and before.steps == now.steps
    # Then whatever was written since is none of ours: `p.grad.copy_(g)`.
    is_rewritten = before is not None and has_nothing_new and before.writes != now.writes
    by_hand = [slot for slot in given if is_rewritten or not is_mean(slot.parameter.grad)]
    if before is not None and before.backwards == now.backwards and (by_hand or not has_nothing_new):
        _check_not_scaled(given)
    has_no_gradient = bool(slots) and not has_closure and all(slot.parameter.grad is None for slot in slots)
    # Where the last were set by hand, another rank may have some now.
    if by_hand or (has_nothing_new and has_no_gradient and now.is_by_hand):
        mine = {*by_hand}
        kept = [slot.name for slot in given if slot not in mine]
        if _agree(engine, [slot.name for slot in by_hand], kept):
            if before is not None and before.backwards < now.backwards and not now.averages and engine.axis.rank == 0:
                logger.info(
                    "%s replaced after backward, so they are averaged once more in each step: what is written in place "
                    "(p.grad.mul_(0.5)) is not",
                    _named([slot.name for slot in by_hand]),
                )
            engine.average(by_hand)


def _agree(engine: DataParallel, by_hand: Sequence[str], kept: Sequence[str]) -> bool:
    """Whether any rank has set gradients by hand. Every rank must call it.

    Args:
        engine: Of the parameters.
        by_hand: Names of those whose gradient this rank has set.
        kept: Names of those whose gradient is what backward gave.
    """
    axis, traffic.step = engine.axis, engine.steps + 1
    if _LABEL not in axis.kept:
        axis.kept[_LABEL] = BackgroundThread("tulle by hand", axis.device)
    job = axis.kept[_LABEL].submit(partial(_heard, axis, by_hand, kept))
    here = axis.ranks[axis.rank]
    waits = partial(tell, here, f"waits for all ranks to average gradients, as {_named(by_hand)} set by hand")
    begin_s = now_s()
    try:
        heard = job.result(meanwhile=waits, after_s=_LONG_S)
    except CommunicationError as error:
        raise CommunicationError(f"{_named(by_hand)} set by hand, and {error}. {_MEND}") from error
    if now_s() - begin_s > _LONG_S:
        tell(here, "")
    for rank, (theirs, _) in enumerate(heard):
        for other, (_, means) in enumerate(heard):
            if both := sorted({*theirs}.intersection(means)):
                raise GradientError(
                    f"{_named(both)} set by hand on rank {rank} of axis {axis.name!r}, and left as backward gave it "
                    f"on rank {other}. {_MEND}"
                )
    return any(theirs for theirs, _ in heard)


def _heard(axis: Axis, by_hand: Sequence[str], kept: Sequence[str]) -> list[tuple[Sequence[str], Sequence[str]]]:
    """What each rank has to say, or this one alone if all say the same. Every rank must call it."""
    own = lane(axis, _LABEL)
    word = torch.tensor([len(by_hand), crc32("\n".join(by_hand).encode())], device=axis.device)
    words = all_gather(word, own, label=_LABEL).wait()
    if bool((words.view(axis.size, -1) == word).all()):
        return [(by_hand, kept)]
    return gather_values((by_hand, kept), own, label=_LABEL)


_MEND = "Have all ranks set the same gradients in the same steps, or none: by what loss.backward() gave decide alike"


def _named(names: Sequence[str]) -> str:
    if not names:
        return "gradients may have been"
    if len(names) == 1:
        return f"the gradient of {names[0]!r} was"
    return f"the gradients of {names[0]!r} and {len(names) - 1} more were"


def _check_not_scaled(slots: Sequence[Slot]) -> None:
    """Raise if a scaler steps with gradients that it has looked at when they were those of each rank."""
    frame = sys._getframe()
    while frame is not None and frame.f_code is not GradScaler.step.__code__:
        frame = frame.f_back
    if frame is not None and slots and frame.f_locals["self"].is_enabled():
        raise GradientError(
            f"{_named([slot.name for slot in slots])} set by hand, and a GradScaler has looked for infinities in that "
            "of each rank alone: one would skip a step that others make. Take scaler.scale(loss).backward(), or no "
            "scaler (bfloat16 needs none)"
        )
