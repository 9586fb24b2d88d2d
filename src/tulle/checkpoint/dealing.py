"""`deal`: what several ranks have alike is written by all of them, a share each, if they see one folder.

A parameter that is kept in step, and what its optimizer keeps of it, is the same on every rank of axis `data`. Rank 0
alone could write it, and does where ranks have disks of their own. Buffers, frozen parameters and all else may differ
between ranks: those of rank 0 are saved.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

from tulle.checkpoint.folder import Folder
from tulle.checkpoint.placed import Box, Placed, Replicated
from tulle.checkpoint.standing import Standing

LEAST_BYTES = 4 * 1024 * 1024
"""Of a share: of a small model one rank writes one file."""


@dataclass(frozen=True, slots=True)
class Sight:
    """What a rank says before a share is dealt to it.

    Args:
        folder: What tells the folder that it sees from others; None if it sees none.
        stage: Its rank along axis `pipe`: those of one stage have the same tensors.
        alike: A checksum of what it takes to be the same elsewhere.
    """

    folder: tuple[int, int] | None
    stage: int
    alike: int

    @staticmethod
    def of(folder: Folder, standing: Standing, tensors: Sequence[Placed]) -> Sight:
        """Of this rank, once the folder has been prepared."""
        same = [one for one in tensors if isinstance(one, Replicated) and one.share.is_alike]
        alike = [(one.name, one.shape, str(one.tensor.dtype)) for one in same]
        return Sight(folder.seen(), standing.stage_rank, crc32(repr(alike).encode()))


def can_deal(sights: Sequence[Sight]) -> bool:
    """Whether all ranks see one folder, and those of each stage have the same to write. Alike on all."""
    is_one = len({sight.folder for sight in sights}) == 1 and sights[0].folder is not None
    return is_one and len({(sight.stage, sight.alike) for sight in sights}) == len({sight.stage for sight in sights})


def deal(tensors: Sequence[Placed]) -> None:
    """Have this rank write its share of what it has alike with others, block by block. Every rank must call it."""
    dealt = [(one, copies) for one in tensors if isinstance(one, Replicated) and (copies := one.share.copies)]
    total = sum(_bytes(placed, box) for placed, _ in dealt for box in placed.boxes)
    before = 0
    for placed, (rank, size) in dealt:
        writers = max(1, min(size, total // LEAST_BYTES))
        mine: list[int] = []
        for number, box in enumerate(placed.boxes):
            middle = before + _bytes(placed, box) / 2
            if int(middle * writers / max(1, total)) == rank:
                mine.append(number)
            before += _bytes(placed, box)
        placed.writes = mine


def _bytes(placed: Placed, box: Box) -> int:
    return math.prod(box.sizes) * placed.tensor.element_size()
