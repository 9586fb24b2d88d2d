"""Row numbers on the wire: a list or a bitmap, whichever is smaller; they travel before the values.

Zen (OSDI'25, section 3.3) calls the list COO. Its hash bitmap, one bit for each row that an owner could have, is the
bitmap over an owner's places (`tulle.partition`). How long a message is follows from how many numbers it holds, so
it needs no header.

    list      | number | number | ...         4 bytes each (8 where a table has more than 2^31 rows)
    bitmap    | bit 0 .. bit places - 1 |     smaller from one row in 32 on
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tulle.comm import Deferred, all_gather, all_gather_parts, pause
from tulle.cost import Characteristics, Cost, Network, all_gather_cost
from tulle.mesh import Axis
from tulle.sync.table import Table


def numbers_bytes(count: float, places: int, index_bytes: int) -> float:
    """Bytes of a message that says which `count` of `places` places are held."""
    return min(count * index_bytes, -(-places // 8))


def pack(numbers: Tensor, places: int, index_dtype: torch.dtype) -> Tensor:
    """A message, uint8, of ascending distinct numbers in `0..places-1`."""
    if len(numbers) * index_dtype.itemsize <= -(-places // 8):
        # One number, cut out of a batch of one sample, may have a stride still, which `contiguous` takes for none.
        return numbers.to(index_dtype).contiguous().as_strided((len(numbers),), (1,)).view(torch.uint8)
    message = torch.zeros(-(-places // 8), dtype=torch.uint8, device=numbers.device)
    return message.index_add_(0, numbers >> 3, (1 << (numbers & 7)).to(torch.uint8))  # no bit is added twice


def unpack(message: Tensor, count: int, places: int, index_dtype: torch.dtype) -> Tensor:
    """The `count` numbers, int64 and ascending, of what `pack` wrote."""
    if count * index_dtype.itemsize <= -(-places // 8):
        return message.clone().view(index_dtype).long()  # a copy begins where its dtype may
    if message.device.type == "cpu":  # a tenth of what torch's operations take
        return torch.from_numpy(np.flatnonzero(np.unpackbits(message.numpy(), bitorder="little").view(np.bool_)))
    bits = (message.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8, device=message.device)) & 1
    # With the count known a GPU need not be waited for.
    return torch.nonzero_static(bits.view(-1), size=count).squeeze(1)


def gather_numbers(
    numbers: Tensor, counts: Sequence[int], places: int, table: Table, axis: Axis
) -> Deferred[list[Tensor]]:
    """Every rank's numbers at every rank, in the order of ranks. Every rank of the axis must call it.

    Args:
        numbers: `[counts[axis.rank]]` ascending and distinct, in `0..places-1`.
        counts: How many each rank has, the same on all ranks.
        places: Numbers that there could be.
        table: Whose rows they stand for.
        axis: Whose ranks take part.
    """
    index_bytes = table.index_dtype.itemsize
    lengths = [int(numbers_bytes(count, places, index_bytes)) for count in counts]
    gathered = all_gather_parts(pack(numbers, places, table.index_dtype), lengths, axis, label=table.label)

    def finish() -> list[Tensor]:
        messages = gathered.wait().split(lengths)
        pause()  # of what they are made next the host asks how many it is
        return [
            unpack(message, count, places, table.index_dtype) for message, count in zip(messages, counts, strict=True)
        ]

    return Deferred(finish)


def told_bytes(looks: Characteristics) -> Tensor:
    """`[ranks]` float64: what each rank sends so that every rank hears its row numbers."""
    sizes = _sizes(looks)
    return (len(sizes) - 1) * torch.tensor(sizes, dtype=torch.float64)


def numbers_cost(looks: Characteristics, network: Network) -> Cost:
    """What it takes that every rank hears the row numbers of every rank."""
    return all_gather_cost(_sizes(looks), network)


def tell_count(count: int, table: Table, axis: Axis) -> list[int]:
    """One number of every rank, in the order of ranks. Every rank of the axis must call it."""
    mine = torch.tensor([count], device=table.device)
    return all_gather(mine, axis, label=table.label).wait().view(-1).tolist()


def _sizes(looks: Characteristics) -> list[float]:
    """Bytes of each rank's message."""
    return [numbers_bytes(rows, looks.num_rows, looks.index_bytes) for rows in looks.rows_per_rank]
