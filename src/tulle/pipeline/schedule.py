"""The order in which a rank works on micro-batches: GPipe, 1F1B, and 1F1B with several stages a rank.

Forward and backward of micro-batch *i* on ranks of 4 stages (Huang et al., *GPipe*, NeurIPS'19, figure 2; Narayanan et
al., *PipeDream-2BW*, ICML'21; *Megatron-LM*, SC'21, section 2.2):

    gpipe     rank 0   F0 F1 F2 F3 F4 F5 ·  ·  ·  ·  ·  ·  B5 B4 ...         all micro-batches are held
    1f1b      rank 0   F0 F1 F2 F3 ·  ·  ·  B0 F4 B1 F5 ...                  at most 4 are held, at rank r: 4 - r
              rank 3   ·  ·  ·  F0 B0 F1 B1 F2 B2 ...

Both are rules of preference, not lists: a rank takes the best of what is ready, so that models whose values do not just
go down the stages (encoder-decoder, skips, a loss on the first rank) cannot lock it up.
"""

from __future__ import annotations

from typing import Literal, get_args

from tulle.errors import PlanError

Schedule = Literal["gpipe", "1f1b"]


def checked(schedule: str) -> Schedule:
    """A schedule's name, if it is one.

    Raises:
        PlanError: If not.
    """
    for known in get_args(Schedule):
        if schedule == known:
            return known
    raise PlanError(f"the schedule {schedule!r} is not known: use {' or '.join(map(repr, get_args(Schedule)))}")


def held_at_once(schedule: Schedule, rank: int, ranks: int, stages: int, micro_batches: int) -> int:
    """How many micro-batches a rank may have begun and not ended.

    With several stages a rank (interleaved 1F1B) a micro-batch comes by several times before its backward: a rank then
    needs a group of `ranks` micro-batches more.

    Example:
        >>> [held_at_once("1f1b", rank, 4, 4, 8) for rank in range(4)]
        [4, 3, 2, 1]
        >>> [held_at_once("1f1b", rank, 4, 8, 8) for rank in range(4)]
        [7, 6, 5, 4]
    """
    if schedule == "gpipe":
        return micro_batches
    return min(micro_batches, ranks - rank if stages <= ranks else 2 * ranks - rank - 1)


def preference(schedule: Schedule, micro_batch: int, ranks: int, stage: int, *, in_backward: bool) -> tuple[int, ...]:
    """Of what is ready, a rank takes that of which this is smallest.

    Backward first, for it gives memory back; forward by groups of as many micro-batches as ranks, in each group the
    later stage first, as nothing else can feed the ranks behind it.

    Args:
        schedule: Which.
        micro_batch: Its number.
        ranks: On the axis.
        stage: That the micro-batch has come to on this rank.
        in_backward: Whether it is in its backward.
    """
    if in_backward:
        return 0, micro_batch
    if schedule == "gpipe":
        return 1, micro_batch
    return 1, micro_batch // ranks, -stage, micro_batch
