"""Exchanges of several tables at once, small and large, by different schemes, do not take each other's rows."""

import pytest
import torch
from torch import Tensor

import tulle
from ranks import on_ranks
from tulle import RowSparse
from tulle.sync import FLAT, Table, announce, sum_gradients

CPU = torch.device("cpu")
TABLES = [Table("large", 4000, 512, torch.float32, CPU), Table("small", 50, 3, torch.float32, CPU)]


def gradients(rank: int) -> list[RowSparse]:
    """Of the large table rank 0 holds one row, so that it sends all at once what the others send in rounds."""
    rows = 1 if rank == 0 else 2000
    large = torch.full((rows, 512), float(rank + 1))
    small = torch.full((20, 3), 10.0 * (rank + 1))
    return [
        RowSparse.trusted(torch.arange(rows) * 2, large, 4000, is_coalesced=True),
        RowSparse.trusted(torch.arange(20) + rank % 4, small, 50, is_coalesced=True),
    ]


@on_ranks(3, 4)
@pytest.mark.parametrize("scheme", [*FLAT])
def test_two_tables_of_unlike_size_are_summed_side_by_side(scheme):
    axis = tulle.init(data=-1)["data"]
    mine = gradients(axis.rank)
    counts = announce(mine, axis).wait()
    for schemes in ([scheme, scheme], ["recursive_doubling", scheme], [scheme, "recursive_doubling"]):
        sums = sum_gradients(mine, TABLES, counts, schemes, axis).wait()
        for t, total in enumerate(sums):
            expected = sum(gradients(rank)[t].to_dense() for rank in range(axis.size))
            assert isinstance(total, RowSparse)
            assert isinstance(expected, Tensor)
            assert torch.equal(total.to_dense(), expected), (schemes, TABLES[t].name)
