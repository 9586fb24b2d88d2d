"""`SameBatch`: whether all ranks of a pipeline are given the same batch.

Each rank reads the inputs that its own modules take, so that a pipeline whose ranks have other batches trains on the
inputs of one and the targets of another: a sampler that deals batches to all processes does that, and unlike seeds. A
few numbers of each tensor tell. They need not be the same to the last bit: what is given may have been computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tulle.errors import DataError
from tulle.mesh import Axis
from tulle.pipeline.mailbox import Mailbox

_BITS_IF_LOOKED_AT = 2
"""A step is looked at if its number has at most so many bits set: the first ones, and ever fewer."""
_LOOKED_AT = 32
"""So many numbers of a tensor, evenly spread."""
_TOLERANCE = 0.05
"""Of the largest of them: other batches differ by more."""
Call = tuple[Sequence[Any], Mapping[str, Any]]
Sample = tuple[Sequence[int], Sequence[float]]
"""A tensor's shape, and some of its numbers."""


class SameBatch:
    """Compares at the ends of steps what this rank was given with what the others were.

    Args:
        axis: Whose ranks hold the stages.
    """

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self._steps = 0

    def end_step(self, mailbox: Mailbox, calls: Sequence[Call], count: int) -> int:
        """A step ends well here: tell the others, and wait until it does there. Every rank must call it.

        Args:
            mailbox: By which they hear.
            calls: Arguments and keywords of each micro-batch.
            count: Some number of this rank's.

        Returns:
            The largest count of any rank.

        Raises:
            DataError: On every rank, if one was given another batch.
            CommunicationError: If another rank failed.
        """
        self._steps += 1
        is_looked_at = len(calls) > 0 and self._steps.bit_count() <= _BITS_IF_LOOKED_AT
        given = sampled(calls[0]) if is_looked_at else ()
        words = {self._axis.rank: (count, given), **mailbox.close(word=(count, given))}
        for rank in range(1, self._axis.size):
            self._check(words[0][1], words[rank][1], rank)
        return max(one for one, _ in words.values())

    def _check(self, first: Sequence[Sample | None], theirs: Sequence[Sample | None], rank: int) -> None:
        for place, (one, other) in enumerate(zip(first, theirs, strict=True) if len(first) == len(theirs) else ()):
            if one is not None and other is not None and not _are_alike(one, other):
                raise DataError(
                    f"rank {rank} of axis {self._axis.name!r} was given another batch than rank 0: argument {place} of "
                    f"the step function has {_said(one)} on rank 0, and {_said(other)} on rank {rank}. Give all ranks "
                    "of a pipeline the same: a sampler takes mesh['data'].size and mesh['data'].rank (without axis "
                    "data 1 and 0), not those of all processes, and what draws data (torch, numpy, random) is seeded "
                    "alike"
                )


def sampled(call: Call) -> list[Sample | None]:
    """Some numbers of each thing that a call is given; None for what is no plain tensor or array with values.

    Example:
        >>> sampled(([torch.tensor([[1.0, 2.0]]), "mean"], {"scale": torch.tensor(2)}))
        [((1, 2), [1.0, 2.0]), None, ((), [2.0])]
    """
    args, kwargs = call
    return [_sample(leaf) for leaf in tree_leaves((list(args), dict(kwargs)))]


def _sample(leaf: Any) -> Sample | None:
    is_array = isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biuf"
    is_tensor = type(leaf) is Tensor and leaf.layout == torch.strided and not (leaf.is_meta or leaf.is_complex())
    if not is_array and not is_tensor:
        return None
    flat = leaf.reshape(-1)
    some = flat[:: max(1, len(flat) // _LOOKED_AT)][:_LOOKED_AT]
    return tuple(leaf.shape), [float(number) for number in some.tolist()]


def _are_alike(one: Sample, other: Sample) -> bool:
    (shape, numbers), (their_shape, theirs) = one, other
    if shape != their_shape:
        return False
    least = _TOLERANCE * max((abs(number) for number in (*numbers, *theirs) if np.isfinite(number)), default=0.0)
    return bool(np.allclose(numbers, theirs, rtol=0, atol=least, equal_nan=True))


def _said(sample: Sample) -> str:
    shape, numbers = sample
    return f"shape {list(shape)} and numbers {', '.join(f'{number:.4g}' for number in numbers[:3])} ..."
