"""What a rank takes of a whole table."""

import pytest
import torch

from resident import peak_over_now
from tulle.mesh import Axis
from tulle.tables import split, split_as

ROWS, WIDTH = 1000, 6


def axis_of(rank: int, size: int = 3) -> Axis:
    return Axis("data", rank, size, tuple(range(size)), None, torch.device("cpu"), 1.0)


@pytest.mark.parametrize("block_bytes", [1, 100, 2**23])
def test_rows_are_dealt_in_blocks_of_any_size(block_bytes, monkeypatch):
    monkeypatch.setattr(split, "_BLOCK_BYTES", block_bytes)
    whole = torch.arange(ROWS * WIDTH, dtype=torch.float64).view(ROWS, WIDTH)
    seen = torch.zeros(ROWS, dtype=torch.long)
    for rank in range(3):
        one = split_as("rows", "words", (ROWS, WIDTH), axis_of(rank))
        rows, places = one.rows()
        part = one.take(whole)
        assert torch.equal(part[places], whole[rows])
        assert part.sum() == whole[rows].sum(), "empty places are zero"
        seen[rows] += 1
    assert seen.eq(1).all()


def test_a_part_takes_its_own_memory_and_no_more():
    whole = torch.ones(2**16, 256)  # 64 MiB, of which a third is taken
    grown_bytes = peak_over_now(lambda: split_as("rows", "words", (2**16, 256), axis_of(0)).take(whole))
    assert grown_bytes < 1.6 * whole.nbytes / 3, grown_bytes
