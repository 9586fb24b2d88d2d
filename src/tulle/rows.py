"""`RowSparse`: a matrix of which only some rows are stored, as an embedding's gradient is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tulle.errors import GradientError

_INDEX_DTYPES = (torch.int32, torch.int64)


@dataclass(frozen=True, slots=True, eq=False, init=False)
class RowSparse:
    """A `[num_rows, width]` matrix, zero but for the rows that are listed.

    Args:
        indices: `[rows]` int32 or int64, the number of each stored row, in `0..num_rows-1`. A number may occur
            several times: its rows are summed (`coalesce` does it).
        values: `[rows, width]` floating point, on the device of `indices`. Any strides.
        num_rows: Rows of the whole matrix.

    Raises:
        GradientError: If shapes, dtypes or devices do not fit, or an index is out of range.

    Example:
        >>> import torch, tulle
        >>> grad = tulle.RowSparse(torch.tensor([4, 1, 4]), torch.ones(3, 2), num_rows=6)
        >>> grad.coalesce().indices.tolist(), grad.coalesce().values.tolist()
        ([1, 4], [[1.0, 1.0], [2.0, 2.0]])
        >>> round(grad.density, 3)
        0.333
    """

    indices: Tensor
    values: Tensor
    num_rows: int
    is_coalesced: bool
    """Whether `indices` are known to be sorted and distinct."""

    def __init__(self, indices: Tensor, values: Tensor, num_rows: int) -> None:
        _check(indices, values, num_rows)
        _fill(self, indices, values, num_rows, is_coalesced=False)

    @staticmethod
    def trusted(indices: Tensor, values: Tensor, num_rows: int, *, is_coalesced: bool = False) -> RowSparse:
        """Build without checks, for parts that are known to be right: a check reads the indices back from a GPU."""
        rows = object.__new__(RowSparse)
        _fill(rows, indices, values, num_rows, is_coalesced=is_coalesced)
        return rows

    @staticmethod
    def from_tensor(tensor: Tensor) -> RowSparse:
        """Take the rows that a sparse COO tensor stores, or the rows that are not all zero of a dense one.

        A stored row of a COO tensor stays stored even where its values are zero: an optimizer with momentum
        treats a touched row and an untouched one differently. In a dense one -0.0 counts as a value.

        Args:
            tensor: `[num_rows, width]`, dense, or sparse COO with one sparse dimension (as `nn.Embedding(sparse=True)`
                yields) or two (as `tensor.to_sparse()` yields: rows that it stores anything of are stored whole).

        Raises:
            GradientError: If the tensor is neither.

        Example:
            >>> RowSparse.from_tensor(torch.tensor([[0.0, 0.0], [3.0, 0.0]])).indices.tolist()
            [1]
        """
        if not isinstance(tensor, torch.Tensor):
            raise GradientError(f"RowSparse.from_tensor was given a {type(tensor).__name__}, expected a tensor")
        if tensor.dim() != 2:
            raise GradientError(
                f"RowSparse.from_tensor was given a tensor of shape {tuple(tensor.shape)}, expected [num_rows, width]: "
                "reshape it to two dimensions"
            )
        if tensor.layout == torch.strided:
            indices = is_row_filled(tensor).nonzero().squeeze(1)
            return RowSparse.trusted(indices, tensor.index_select(0, indices), tensor.shape[0], is_coalesced=True)
        if tensor.layout != torch.sparse_coo:
            raise GradientError(
                f"RowSparse.from_tensor was given a {tensor.layout} tensor, expected a dense one or sparse COO: "
                "convert it with tensor.to_dense()"
            )
        if tensor.sparse_dim() == 2:
            rows, columns = tensor._indices()
            indices, places = rows.unique(return_inverse=True)
            values = tensor._values().new_zeros(len(indices), tensor.shape[1])
            values = values.index_put((places, columns), tensor._values(), accumulate=True)
            return RowSparse.trusted(indices, values, tensor.shape[0], is_coalesced=True)
        return RowSparse.trusted(
            tensor._indices()[0], tensor._values(), tensor.shape[0], is_coalesced=tensor.is_coalesced()
        )

    @property
    def width(self) -> int:
        """Columns of the matrix."""
        return self.values.shape[1]

    @property
    def shape(self) -> tuple[int, int]:
        """`(num_rows, width)` of the whole matrix."""
        return self.num_rows, self.width

    @property
    def density(self) -> float:
        """Distinct stored rows as a share of all rows, 0 to 1 (Zen, section 3.1, over rows instead of elements)."""
        distinct = len(self.indices) if self.is_coalesced else len(torch.unique(self.indices))
        return distinct / self.num_rows if self.num_rows else 0.0

    def coalesce(self) -> RowSparse:
        """Sum the rows that occur several times; the result is sorted and distinct, of the same dtypes.

        A sort, then `embedding_bag(mode="sum")` over the runs: near memory speed, about twice as fast as
        `index_add_`. Half-precision values are summed in float32.
        """
        if self.is_coalesced:
            return self
        merge = Merge.of(self.indices)
        return RowSparse.trusted(merge.rows, merge.sum(self.values, are_long=True), self.num_rows, is_coalesced=True)

    def scaled(self, factor: float) -> RowSparse:
        """The same rows with values times `factor`."""
        return RowSparse.trusted(self.indices, self.values * factor, self.num_rows, is_coalesced=self.is_coalesced)

    def to_dense(self) -> Tensor:
        """The whole matrix, `[num_rows, width]`."""
        rows = self.coalesce()
        dense = rows.values.new_zeros(rows.shape)
        return dense.index_copy_(0, rows.indices.long(), rows.values)

    def to_sparse_coo(self) -> Tensor:
        """A sparse COO tensor with one sparse dimension, as `nn.Embedding(sparse=True)` gives to optimizers."""
        # One row of strides (1, 1) counts as contiguous, and torch's to_dense then loses all but its first value.
        indices, values = self.indices, self.values.reshape(-1).view(self.values.shape)
        if not len(indices):
            # To add to no rows in place, torch lets their memory grow: it must not be where those of another table lie.
            indices, values = torch.empty_like(indices), torch.empty_like(values)
        return torch.sparse_coo_tensor(
            indices.long().unsqueeze(0),
            values,
            self.shape,
            is_coalesced=self.is_coalesced,
            check_invariants=False,
        )

    def __repr__(self) -> str:
        return (
            f"RowSparse({len(self.indices)} of {self.num_rows} rows, width {self.width}, "
            f"{str(self.values.dtype).removeprefix('torch.')}, {self.values.device})"
        )


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_row_filled(matrix: Tensor) -> Tensor:
    """`[num_rows]` bool: which rows of a dense `[num_rows, width]` matrix are not all zero; -0.0 is not taken for zero.

    Bits are read as integers, once: 10 to 15 GB/s on a CPU, where `(matrix != 0).any(1)` reads 2.

    Example:
        >>> is_row_filled(torch.tensor([[0.0, 0.0], [0.0, -3.0], [float("nan"), 0.0]])).tolist()
        [False, True, True]
    """
    stretches = (length * matrix.itemsize for length in (matrix.shape[1], matrix.stride(0), matrix.storage_offset()))
    lies_by_eight = matrix.stride(1) == 1 and not any(stretch % 8 for stretch in stretches)
    kind = torch.int64 if lies_by_eight else _INTEGERS.get(matrix.itemsize)
    if kind is None or not matrix.shape[1]:  # complex128
        return (matrix != 0).any(dim=1)
    bits = matrix.detach().resolve_conj().resolve_neg().view(kind)
    if bits.device.type == "cpu":
        return torch.from_numpy(np.bitwise_or.reduce(bits.numpy(), axis=1) != 0)
    return (bits.amax(dim=1) | bits.amin(dim=1)) != 0


_PIECE = 128
"""Rows that one thread of a GPU adds up; from its square on they are summed in pieces."""


@dataclass(frozen=True, slots=True, eq=False)
class Merge:
    """How rows of equal numbers add up: found from the numbers alone, used once their values are there.

    Args:
        rows: `[rows]` the distinct numbers, ascending.
        order: `[stored]` where the stored rows lie, by ascending number; those of one number in the order given.
        starts: `[rows]` where the run of each number begins in `order`.
    """

    rows: Tensor
    order: Tensor
    starts: Tensor

    @staticmethod
    def of(indices: Tensor) -> Merge:
        """From `[stored]` row numbers in any order."""
        in_order, order = torch.sort(indices, stable=True)
        rows, counts = torch.unique_consecutive(in_order, return_counts=True)
        return Merge(rows, order, counts.cumsum(0) - counts)

    def run(self) -> Tensor:
        """`[stored]` which of `rows` each entry of `order` belongs to."""
        run = torch.zeros_like(self.order)
        run.index_fill_(0, self.starts, 1)
        return run.cumsum(0) - 1

    def sum(self, values: Tensor, *, are_long: bool = False) -> Tensor:
        """`[stored, width]` values to `[rows, width]` sums, each in the order in which its rows were given.

        Half-precision values are summed in float32.

        Args:
            values: Of the stored rows.
            are_long: Whether a row may be stored very often, as words are looked up: a GPU sums such runs in pieces.
        """
        return self.wide_sum(values, are_long=are_long).to(values.dtype)

    def wide_sum(self, values: Tensor, *, are_long: bool = False) -> Tensor:
        """As `sum`, with sums of half-precision values in float32: their mean may be finite where they are not."""
        if len(self.rows) == len(self.order):
            return values.index_select(0, self.order)
        is_half = values.dtype in (torch.float16, torch.bfloat16)
        wide = values.float() if is_half else values.contiguous()
        if are_long and values.is_cuda and len(self.order) >= _PIECE * _PIECE:
            return self._sum_of_pieces(wide, _PIECE)
        return F.embedding_bag(self.order, wide, self.starts, mode="sum")

    def _sum_of_pieces(self, values: Tensor, length: int) -> Tensor:
        """As `sum`, in two passes: a GPU adds up a run in one thread a column, and all wait for the longest.

        Pieces begin with each run and at each multiple of `length`; where both are at one place, one piece is empty.
        """
        cuts = torch.arange(0, len(self.order), length, device=self.order.device)
        firsts = torch.arange(len(self.starts), device=self.order.device) + (self.starts + (length - 1)) // length
        others = torch.arange(len(cuts), device=self.order.device) + torch.searchsorted(self.starts, cuts, right=True)
        pieces = torch.empty(len(self.starts) + len(cuts), dtype=torch.int64, device=self.order.device)
        pieces.scatter_(0, firsts, self.starts).scatter_(0, others, cuts)
        sums = F.embedding_bag(self.order, values, pieces, mode="sum")
        return F.embedding_bag(torch.arange(len(pieces), device=pieces.device), sums, firsts, mode="sum")


def occurrences(numbers: Tensor, size: int) -> Tensor:
    """`[size]` int64: how often each of the int64 numbers `0 .. size - 1` occurs; the host does not wait for a GPU.

    Example:
        >>> occurrences(torch.tensor([2, 0, 2]), 4).tolist()
        [1, 0, 2, 0]
    """
    if numbers.is_cuda:  # there torch.bincount looks for the largest first
        return numbers.new_zeros(size).scatter_add_(0, numbers, torch.ones_like(numbers))
    return torch.bincount(numbers, minlength=size)


def inverse(order: Tensor) -> Tensor:
    """`[n]` where each number lies in a permutation of `0 .. n - 1`.

    Example:
        >>> inverse(torch.tensor([2, 0, 1])).tolist()
        [1, 2, 0]
    """
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def _fill(rows: RowSparse, indices: Tensor, values: Tensor, num_rows: int, *, is_coalesced: bool) -> None:
    object.__setattr__(rows, "indices", indices)
    object.__setattr__(rows, "values", values)
    object.__setattr__(rows, "num_rows", num_rows)
    object.__setattr__(rows, "is_coalesced", is_coalesced)


def _check(indices: Tensor, values: Tensor, num_rows: int) -> None:
    for name, given in (("indices", indices), ("values", values)):
        if not isinstance(given, Tensor):
            raise GradientError(f"RowSparse was given {name} as a {type(given).__name__}, expected a tensor")
    if indices.dim() != 1 or indices.dtype not in _INDEX_DTYPES:
        raise GradientError(
            f"RowSparse was given indices of shape {tuple(indices.shape)} and dtype {indices.dtype}, "
            "expected [rows] of int32 or int64"
        )
    if values.dim() != 2 or not values.dtype.is_floating_point:
        raise GradientError(
            f"RowSparse was given values of shape {tuple(values.shape)} and dtype {values.dtype}, "
            "expected [rows, width] of a floating-point dtype"
        )
    if len(indices) != len(values):
        raise GradientError(
            f"RowSparse was given {len(indices)} indices and {len(values)} rows of values: give one index a row"
        )
    if indices.device != values.device:
        raise GradientError(
            f"RowSparse was given indices on {indices.device} and values on {values.device}: move them to one device"
        )
    if not isinstance(num_rows, int) or num_rows < 0:
        raise GradientError(f"RowSparse was given num_rows={num_rows!r}, expected the number of the table's rows")
    if len(indices):
        low, high = (int(bound) for bound in torch.aminmax(indices))
        if low < 0 or high >= num_rows:
            raise GradientError(
                f"RowSparse was given row {low if low < 0 else high}, expected rows in 0..{num_rows - 1} "
                f"(num_rows is {num_rows})"
            )
