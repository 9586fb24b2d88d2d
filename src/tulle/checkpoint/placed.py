"""`Placed`: a tensor under its plain name, what this rank has of it, and the blocks that this rank writes or reads.

A block is a box of the whole tensor in natural order. The three kinds differ in whose boxes are whose, and in whether
rows must travel between a block and what ranks hold; whoever goes through blocks must go through all, on every rank
of the axis alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tulle.memory import Shard
from tulle.parts import local_of
from tulle.tables.natural import RowOrder, block_rows_of, blocks_of_chunks
from tulle.tables.split import ColumnSplit, RowSplit, Split
from tulle.tensor_parallel import Placement

Path = tuple[str | int, ...]
"""Keys and positions that lead to a tensor in a state of dictionaries and lists."""


@dataclass(frozen=True, slots=True)
class Sharded:
    """A part over axis `data` of a parameter that is shared out.

    Args:
        shard: Which part it is, of what this rank computes with.
        within: Which part that is over axis `model`, None for the whole.
    """

    shard: Shard
    within: Placement | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole parameter."""
        return tuple(self.within.shape if self.within is not None else self.shard.shape)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Of this rank's part."""
        return self.shard.local_shape

    def whole(self, part: Tensor, *, label: str) -> Tensor:
        """The whole, from all ranks' parts. Every rank of both axes must call it."""
        gathered = self.shard.whole(part, label=label)
        return self.within.whole(gathered, label=label) if self.within is not None else gathered


Part = Split | Placement | Sharded
"""Which part of a tensor a rank has: of a table over axis `data`, of a layer over axis `model`, or of any over both."""


@dataclass(frozen=True, slots=True)
class Share:
    """What this rank has of one tensor of a model, and so of its optimizer's state.

    Args:
        part: Which part of it, None for the whole.
        holder: The rank of axis `pipe` that has it, the first if several do.
        writes_whole: Whether this rank writes what all ranks of its stage have.
        writes_sections: Whether this rank writes its part of what is split over axis `model`.
        writes_rows: Whether it does of what is split over axis `data`.
        writes_both: Whether it does of what is split over both.
        is_alike: Whether what is whole is the same, to the bit, on other ranks.
        copies: This rank's number among those that could write such a whole, and how many these are; None if it could
            not.
    """

    part: Part | None = None
    holder: int = 0
    writes_whole: bool = True
    writes_sections: bool = True
    writes_rows: bool = True
    writes_both: bool = True
    is_alike: bool = False
    copies: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Box:
    """Where a block lies in its whole tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def is_empty(self) -> bool:
        """Whether nothing is in it, which for a tensor of no elements is so too."""
        return 0 in self.sizes


def memory_of(tensor: Tensor) -> tuple[object, ...] | None:
    """Alike for two names of one tensor; None of one that has no memory of its own, being empty or sparse."""
    if tensor.layout != torch.strided or tensor.numel() == 0:
        return None
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


class Placed:
    """A tensor of a checkpoint.

    Args:
        path: Of the state's keys that lead to it.
        tensor: What this rank has of it.
        shape: Of the whole.
        boxes: Of the blocks that this rank reads: of each in turn `values`, or `room` and then `settle`, is called.
        is_writer: Whether this rank writes them too.
    """

    def __init__(
        self, path: Path, tensor: Tensor, shape: Sequence[int], boxes: Sequence[Box], *, is_writer: bool = True
    ) -> None:
        self.path = path
        self.tensor = local_of(tensor)
        self.shape = tuple(shape)
        self.boxes = boxes
        self.writes: Sequence[int] = range(len(boxes)) if is_writer else ()
        """Numbers of the blocks that this rank writes: together those of all ranks are the whole tensor, once."""

    @property
    def name(self) -> str:
        """Its name in the checkpoint."""
        return ".".join(map(str, self.path))

    @property
    def memory(self) -> object:
        """Alike for two names of one tensor."""
        return memory_of(self.tensor) or self.path

    @property
    def written(self) -> Sequence[Box]:
        """The blocks that this rank writes."""
        return [self.boxes[number] for number in self.writes]

    def blocks(self) -> Iterator[tuple[Box, Tensor]]:
        """What this rank writes, block by block."""
        return ((self.boxes[number], self.values(number)) for number in self.writes)

    def values(self, number: int) -> Tensor:
        """The values of one block, for whoever writes it."""
        return self.room(number)

    def room(self, number: int) -> Tensor:
        """Where to read a block to: the rows that it has of this rank's tensor, where these lie as in the whole."""
        return _rows_of(self.tensor, self.boxes[number])

    def settle(self, number: int, block: Tensor) -> None:
        """Take in a block that was read; it may lie where it belongs already."""


class Replicated(Placed):
    """Every rank has, and reads, the whole; one writes it.

    Args:
        path: See `Placed`.
        tensor: The whole.
        share: What this rank has of it.
    """

    def __init__(self, path: Path, tensor: Tensor, share: Share) -> None:
        boxes = _row_blocks(tensor, (0,) * tensor.ndim)
        super().__init__(path, tensor, tensor.shape, boxes, is_writer=share.writes_whole)
        self.share = share


class ByColumns(Placed):
    """Every rank has, reads and writes some columns of all rows.

    Args:
        path: See `Placed`.
        tensor: `[rows, columns]`, this rank's columns.
        split: Of the table.
        is_writer: Whether this rank writes its own.
    """

    def __init__(self, path: Path, tensor: Tensor, split: ColumnSplit, *, is_writer: bool) -> None:
        super().__init__(path, tensor, split.shape, _row_blocks(tensor, (0, split.first_column)), is_writer=is_writer)


class ByRows(Placed):
    """Every rank has the rows that it owns, and reads and writes a chunk of the table in natural order.

    Args:
        path: See `Placed`.
        tensor: `[places, ...]`, this rank's rows, or what an optimizer keeps of each.
        order: Of the table.
        is_writer: Whether this rank writes its own.
    """

    def __init__(self, path: Path, tensor: Tensor, order: RowOrder, *, is_writer: bool) -> None:
        split = order.split
        self._order = order
        others = tuple(tensor.shape[1:])
        self._ranges = list(blocks_of_chunks(split, block_rows_of(tensor.element_size() * math.prod(others))))
        mine = [ranges[split.axis.rank] for ranges in self._ranges]
        boxes = [Box((rows.start, *(0 for _ in others)), (len(rows), *others)) for rows in mine]
        super().__init__(path, tensor, (split.num_rows, *others), boxes, is_writer=is_writer)

    def values(self, number: int) -> Tensor:
        """See `Placed`. Every rank of the axis must call it, for as many blocks; some may be empty."""
        return self._order.collect(self.tensor, self._ranges[number])

    def room(self, number: int) -> Tensor:
        """See `Placed`."""
        return self.tensor.new_empty(self.boxes[number].sizes)

    def settle(self, number: int, block: Tensor) -> None:
        """See `Placed`. Every rank of the axis must call it, for as many blocks."""
        self._order.deliver(block, self.tensor, self._ranges[number])


class BySections(Placed):
    """Every rank has, reads and writes its part of each section of a parameter: over axis `model`, `data` or both.

    Args:
        path: See `Placed`.
        tensor: This rank's parts of the sections, end to end.
        part: How it is cut.
        is_writer: Whether this rank writes its own.
    """

    def __init__(self, path: Path, tensor: Tensor, part: Placement | Sharded, *, is_writer: bool) -> None:
        boxes: list[Box] = []
        self._rooms: list[Tensor] = []
        for offsets, stretch in _stretches(local_of(tensor), part):
            for box in _row_blocks(stretch, offsets) if stretch.numel() else ():
                boxes.append(box)
                self._rooms.append(stretch.narrow(0, box.offsets[0] - offsets[0], box.sizes[0]))
        super().__init__(path, tensor, part.shape, boxes, is_writer=is_writer)

    def room(self, number: int) -> Tensor:
        """See `Placed`."""
        return self._rooms[number]


class Staged(Placed):
    """A copy in main memory of what this rank writes, so that training can go on while it is written.

    Args:
        placed: What is copied. Every rank of the axis must make it, as ranks exchange rows.
    """

    def __init__(self, placed: Placed) -> None:
        super().__init__(placed.path, placed.tensor.new_empty(0), placed.shape, placed.written)
        self._copies = [values.to("cpu", copy=True) for _, values in placed.blocks()]

    def room(self, number: int) -> Tensor:
        """See `Placed`."""
        return self._copies[number]


class Places:
    """Gives each tensor its place; what a split's order takes to find out is found out once for all its tensors."""

    def __init__(self) -> None:
        self._orders: dict[RowSplit, RowOrder] = {}

    def place(self, path: Path, tensor: Tensor, share: Share) -> Placed:
        """A tensor of which this rank has this share.

        Of a split parameter's optimizer state, what has the shape of this rank's part is dealt like it, and so is what
        has something for each row of a table; all else, step counts say, is the same on all ranks.
        """
        part = share.part
        if part is None or not is_dealt(tensor, part):
            return Replicated(path, tensor, share)
        if isinstance(part, Placement):
            return BySections(path, tensor, part, is_writer=share.writes_sections)
        if isinstance(part, Sharded):
            is_writer = share.writes_rows if part.within is None else share.writes_both
            return BySections(path, tensor, part, is_writer=is_writer)
        if isinstance(part, ColumnSplit):
            return ByColumns(path, tensor, part, is_writer=share.writes_rows)
        order = self._orders.setdefault(part, RowOrder(part))
        return ByRows(path, tensor, order, is_writer=share.writes_rows)


def is_dealt(tensor: Tensor, part: Part) -> bool:
    """Whether of this optimizer state each rank has a part, as of its parameter."""
    if isinstance(part, RowSplit | ColumnSplit):
        return part.shape_of_whole(tensor.shape) is not None
    return tuple(tensor.shape) == tuple(part.local_shape)


def _stretches(tensor: Tensor, part: Placement | Sharded) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Of what lies together in the whole, where it begins there, and this rank's."""
    shard, within = (part.shard, part.within) if isinstance(part, Sharded) else (None, part)
    offsets = [0] * tensor.ndim
    if shard is not None:
        offsets[shard.dim] = shard.begin_on(shard.axis.rank)
    if within is None:
        yield tuple(offsets), tensor
        return
    begin = offsets[within.dim]  # of this rank's part of what ranks of axis `model` have
    for in_whole, in_part, length in within.stretches():
        first, last = max(in_part, begin), min(in_part + length, begin + tensor.shape[within.dim])
        if first < last:
            offsets[within.dim] = in_whole + first - in_part
            yield tuple(offsets), tensor.narrow(within.dim, first - begin, last - first)


def _row_blocks(tensor: Tensor, offsets: tuple[int, ...]) -> list[Box]:
    """A tensor that lies at these offsets of the whole, in blocks of some rows."""
    if tensor.ndim == 0 or tensor.numel() == 0:
        return [Box(offsets, tuple(tensor.shape))]
    num_rows, *others = tensor.shape
    rows = block_rows_of(tensor.nbytes // num_rows)
    return [
        Box((offsets[0] + first, *offsets[1:]), (min(rows, num_rows - first), *others))
        for first in range(0, num_rows, rows)
    ]


def _rows_of(tensor: Tensor, box: Box) -> Tensor:
    return tensor.narrow(0, box.offsets[0], box.sizes[0]) if box.sizes else tensor
