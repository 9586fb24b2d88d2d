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
from tulle.checkpoint.placed import Placed
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
        alike = [(placed.name, placed.shape, str(placed.tensor.dtype)) for placed in tensors if placed.is_alike]
        return Sight(folder.seen(), standing.stage_rank, crc32(repr(alike).encode()))


def can_deal(sights: Sequence[Sight]) -> bool:
    """Whether all ranks see one folder, and those of each stage have the same to write. Alike on all."""
    is_one = len({sight.folder for sight in sights}) == 1 and sights[0].folder is not None
    return is_one and len({(sight.stage, sight.alike) for sight in sights}) == len({sight.stage for sight in sights})


def deal(tensors: Sequence[Placed]) -> None:
    """Have this rank write its share of what it has alike with others, block by block. Every rank must call it."""
    dealt = [placed for placed in tensors if placed.copies is not None]
    total = sum(_bytes(placed, number) for placed in dealt for number in range(len(placed.boxes)))
    before = 0
    for placed in dealt:
        assert placed.copies is not None, "chosen for having them"
        rank, size = placed.copies
        writers = max(1, min(size, total // LEAST_BYTES))
        mine: list[int] = []
        for number in range(len(placed.boxes)):
            middle = before + _bytes(placed, number) / 2
            if int(middle * writers / max(1, total)) == rank:
                mine.append(number)
            before += _bytes(placed, number)
        placed.writes = mine


def _bytes(placed: Placed, number: int) -> int:
    return math.prod(placed.boxes[number].sizes) * placed.tensor.element_size()
