"""The order in which a rank works on micro-batches: GPipe, 1F1B, eager 1F1B, ZB-H1, and several stages a rank.

Forward and backward of micro-batch *i* on ranks of 4 stages (Huang et al., *GPipe*, NeurIPS'19, figure 2; Narayanan et
al., *PipeDream-2BW*, ICML'21; *Megatron-LM*, SC'21, section 2.2):

    gpipe     rank 0   F0 F1 F2 F3 F4 F5 ·  ·  ·  ·  ·  ·  B5 B4 ...         all micro-batches are held
    1f1b      rank 0   F0 F1 F2 F3 ·  ·  ·  B0 F4 B1 F5 ...                  at most 4 are held, at rank r: 4 - r
              rank 3   ·  ·  ·  F0 B0 F1 B1 F2 B2 ...

In 1F1B a rank waits twice in each round for what travels: its forward could not begin before a backward that is on the
way. Eager 1F1B (after Zhuang et al., *On Optimizing the Communication of Model Parallelism*, MLSys'23, section 4)
begins one more micro-batch than 1F1B holds, but only where a rank would have nothing to do.

In ZB-H1 (Qi et al., *Zero Bubble Pipeline Parallelism*, ICLR'24, section 2) backward gives the gradient that the rank
before waits for (B), and computes those of weights (W) where it would have nothing to do. With m micro-batches and p
ranks, of which each F, B and W takes as long, a step takes 3m + p - 1 of them, in 1F1B 3m + 3(p - 1):

    zb-h1     rank 3   ·  ·  ·  F0 B0 F1 B1 F2 B2 F3 B3 W0 W1 W2 W3          what W needs is kept of at most 4

With two stages a rank (f, b: the second) micro-batches go in groups of as many as there are ranks:

    1f1b      rank 0   F0 F1 F2 F3 f0 f1 f2 f3 F4 F5 ·  b0 F6 b1 F7 ...      at most 11 pairs of micro-batch and stage

These are rules of preference, not lists: a rank takes the best of what is ready, so that models whose values do not
just go down the stages (encoder-decoder, skips, a loss on the first rank) cannot lock it up.
"""

from __future__ import annotations

from typing import Literal, get_args

from tulle.errors import PlanError

_PUT_OFF = 1.3
"""What the gradients of weights need of a micro-batch, inputs and gradients of products, by all that is kept of it.

Measured for torch's encoder layer, without dropout.
"""
Schedule = Literal["gpipe", "1f1b", "eager-1f1b", "zb-h1"]


def checked(schedule: str) -> Schedule:
    """A schedule's name, if it is one.

    Raises:
        PlanError: If not.
    """
    for known in get_args(Schedule):
        if schedule == known:
            return known
    raise PlanError(
        f"the schedule {schedule!r} is not known: use one of {', '.join(map(repr, get_args(Schedule)))}; each is "
        "interleaved where a rank has several stages, by tulle.Plan(stages_per_rank=2), say"
    )


def held_at_once(schedule: Schedule, rank: int, ranks: int, stages: int, micro_batches: int) -> int:
    """How many pairs of a micro-batch and a stage a rank may have run forward and not yet backward.

    Example:
        >>> [held_at_once("1f1b", rank, 4, 4, 8) for rank in range(4)]
        [4, 3, 2, 1]
        >>> [held_at_once("1f1b", rank, 4, 8, 8) for rank in range(4)]
        [11, 9, 7, 5]
        >>> [held_at_once("eager-1f1b", rank, 4, 4, 8) for rank in range(4)]
        [5, 4, 3, 2]
    """
    here = stages_here(rank, ranks, stages)
    if schedule == "gpipe":
        return micro_batches * here
    usual = ranks - rank if here == 1 else 2 * (ranks - rank) - 1 + (here - 1) * ranks
    return min(micro_batches * here, usual + in_idleness(schedule))


def in_idleness(schedule: Schedule) -> int:
    """How many of those that a rank may hold it begins only where it would have nothing to do."""
    return 1 if schedule == "eager-1f1b" else 0


def is_split(schedule: Schedule) -> bool:
    """Whether the gradients of weights are computed where a rank would have nothing to do.

    Of each micro-batch, for they are to add up in one order: one whose backward ran as a whole would pass others.
    """
    return schedule == "zb-h1"


def kept_at_once(schedule: Schedule, rank: int, ranks: int, stages: int, micro_batches: int) -> int:
    """How many pairs a rank may hold (`held_at_once`) and keep what gradients of weights need of, in all.

    Example:
        >>> [kept_at_once("zb-h1", rank, 4, 4, 8) for rank in range(4)]
        [4, 4, 4, 4]
    """
    return held_at_once(schedule, 0 if is_split(schedule) else rank, ranks, stages, micro_batches)


def activations_at_once(schedule: Schedule, rank: int, ranks: int, stages: int, micro_batches: int) -> float:
    """Of how many micro-batches a rank has the activations of all of its stages, at the most.

    Example:
        >>> [activations_at_once("1f1b", rank, 2, 4, 8) for rank in range(2)]
        [2.5, 1.5]
        >>> [activations_at_once("zb-h1", rank, 2, 2, 8) for rank in range(2)]
        [2.0, 2.3]
    """
    held = held_at_once(schedule, rank, ranks, stages, micro_batches)
    put_off = kept_at_once(schedule, rank, ranks, stages, micro_batches) - held
    return (held + _PUT_OFF * put_off) / stages_here(rank, ranks, stages)


def stages_here(rank: int, ranks: int, stages: int) -> int:
    """How many stages a rank has; at least one."""
    return max(1, len(range(rank, stages, ranks)))


def preference(micro_batch: int, ranks: int, stage: int, *, in_backward: bool, is_full: bool) -> tuple[int, ...]:
    """Of what is ready, a rank takes that of which this is smallest, whatever the schedule: that says what is ready.

    Forward while there is room, to feed the ranks behind, else backward, which makes room: one forward, one backward.
    By groups of as many micro-batches as ranks, in each group all of one stage and then all of the next; in backward
    the other way round.

    Args:
        micro_batch: Its number.
        ranks: On the axis.
        stage: That the micro-batch has come to on this rank.
        in_backward: Whether it is in its backward.
        is_full: Whether the rank holds as much as it may (`held_at_once`), but for what it begins in idleness.
    """
    group = micro_batch // ranks
    return (not is_full, group, -stage, micro_batch) if in_backward else (is_full, group, stage, micro_batch)
