"""`timed`: what pieces, optimizers and whole steps take, on all ranks at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from tulle.comm import barrier, gather_values
from tulle.mesh import Axis
from tulle.profiling.laps import Laps
from tulle.profiling.samples import halved, samples_in
from tulle.profiling.steps import Twin

BUDGET_S = 4.0
"""For about so long steps are timed."""
_FEWEST, _MOST = 2, 15
_TRIMMED = 0.25
_LABEL = "the profile"


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one step, of the slowest rank in each; means over samples of the middle half of all repeats.

    Args:
        forward_s: Of each piece.
        backward_s: Of each piece.
        update_s: Of all optimizers.
        step_s: Of whole steps that nobody cut into pieces.
    """

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    update_s: float
    step_s: float


def timed(twin: Twin, names: Sequence[str], axis: Axis) -> Times:
    """Take steps on all samples, in turn with and without a watch. Every rank of the axis must call it.

    Args:
        twin: What steps; it has stepped before.
        names: Of its pieces.
        axis: All of whose ranks step at once.
    """
    laps = Laps(twin.model, names, twin.device)
    first_s = max(gather_values(_whole(twin, twin.samples[0], axis), axis, label=_LABEL))
    repeats = round(BUDGET_S / (2 * len(twin.samples) * first_s))
    cut: list[list[list[float]]] = [[] for _ in twin.samples]
    whole: list[list[list[float]]] = [[] for _ in twin.samples]
    for _ in range(min(max(repeats, _FEWEST), _MOST)):
        for number, sample in enumerate(twin.samples):
            whole[number].append([_whole(twin, sample, axis)])
            cut[number].append(_cut(twin, sample, laps, axis))
    by_rank = gather_values((cut, whole), axis, label=_LABEL)
    parts = _typical([one for one, _ in by_rank])
    (step_s,) = _typical([one for _, one in by_rank])
    return Times(parts[: len(names)], parts[len(names) : -1], parts[-1], step_s)


def fixed_share(twin: Twin, axis: Axis) -> float | None:
    """Of forward and backward, that part which fewer samples do not make shorter. Every rank must call it.

    Operations are begun, and parameters read, for one sample as for many. None where the model does not run on half of
    a sample, and 0 where that is one alone. Each begins with the buffers that whole samples have left: a queue of keys,
    say, has room for these.
    """
    sample, buffers = twin.samples[0], [one.clone() for one in twin.model.buffers()]
    half, share = halved(sample)
    told = gather_values((samples_in(sample) == 1, share < 1 and _runs(twin, half)), axis, label=_LABEL)
    if not all(runs for _, runs in told):
        return 0.0 if all(is_alone or runs for is_alone, runs in told) else None
    mine = [tuple(_computed(twin, one, axis, buffers) for one in (sample, half))]
    first_s = max(map(sum, (once for (once,) in gather_values(mine, axis, label=_LABEL))))
    for _ in range(min(max(round(BUDGET_S / first_s), _FEWEST), _FEWEST + 2) - 1):
        mine.append(tuple(_computed(twin, one, axis, buffers) for one in (sample, half)))
    _put_back(twin, buffers)
    rounds = zip(*gather_values(mine, axis, label=_LABEL), strict=True)
    slowest = [tuple(map(max, zip(*of_ranks, strict=True))) for of_ranks in rounds]
    whole_s, half_s = map(median, zip(*slowest, strict=True))
    return min(1.0, max(0.0, (half_s / whole_s - share) / (1 - share)))


def _runs(twin: Twin, sample: object) -> bool:
    try:
        twin.forward(sample)
    except Exception:  # a model that takes batches of one size only
        return False
    return True


def _computed(twin: Twin, sample: object, axis: Axis, buffers: Sequence[Tensor]) -> float:
    _put_back(twin, buffers)
    barrier(axis)
    seconds = twin.seconds(lambda: twin.forward(sample).backward())
    twin.clear()
    return seconds


@torch.no_grad()
def _put_back(twin: Twin, buffers: Sequence[Tensor]) -> None:
    """Have buffers hold what they held; others have come, or are of another shape, where a forward makes them anew."""
    for one, before in zip(twin.model.buffers(), buffers, strict=False):
        if one.shape == before.shape and one.layout == torch.strided:
            one.copy_(before)


def _whole(twin: Twin, sample: object, axis: Axis) -> float:
    barrier(axis)
    return twin.seconds(lambda: twin.step(sample))


def _cut(twin: Twin, sample: object, laps: Laps, axis: Axis) -> list[float]:
    barrier(axis)
    with laps.watching():
        laps.begin_forward()
        loss = twin.forward(sample)
        laps.end_forward(loss)
        loss.backward()
        laps.end_backward()
    del loss
    return [*laps.forward_s, *laps.backward_s, twin.seconds(twin.update)]


def _typical(by_rank: Sequence[Sequence[Sequence[Sequence[float]]]]) -> list[float]:
    """Of `[ranks, samples, repeats, parts]` seconds those of the rank whose parts add up to most, without extremes.

    Whole steps are left out, not parts of several: what else a machine does falls now on this part and now on that one.
    """
    samples: list[list[float]] = []
    for ranks in zip(*by_rank, strict=True):
        slowest = sorted((max(of_ranks, key=sum) for of_ranks in zip(*ranks, strict=True)), key=sum)
        left_out = int(len(slowest) * _TRIMMED)
        kept = slowest[left_out : len(slowest) - left_out]
        samples.append([sum(part) / len(kept) for part in zip(*kept, strict=True)])
    return [sum(part) / len(samples) for part in zip(*samples, strict=True)]
