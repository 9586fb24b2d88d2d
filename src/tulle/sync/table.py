"""`Table`: what every rank knows of one table before any gradient: its name, shape and dtypes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from tulle.cost import Characteristics
from tulle.errors import PlanError
from tulle.presence import Presence
from tulle.rows import RowSparse

WIRE_DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "fp16": torch.float16,
    "float16": torch.float16,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
}
"""In which values may be asked to travel, by name."""
WireDtype = str | torch.dtype | None


@dataclass(frozen=True, slots=True)
class Table:
    """A parameter `[num_rows, width]` whose gradient comes by rows.

    Args:
        name: The parameter's name in its model.
        num_rows: Rows.
        width: Columns.
        dtype: Of its gradient's values.
        device: Of its gradient.
        wire_dtype: In which values travel; None means `dtype`, so that nothing is lost.
        shares: For several tables that travel as one, the share of each in what is sent, by name.
    """

    name: str
    num_rows: int
    width: int
    dtype: torch.dtype
    device: torch.device
    wire_dtype: torch.dtype | None = None
    shares: Mapping[str, int] | None = None

    def empty(self) -> RowSparse:
        """A gradient that touches no row."""
        return RowSparse.trusted(
            torch.empty(0, dtype=torch.int64, device=self.device),
            torch.empty(0, self.width, dtype=self.dtype, device=self.device),
            self.num_rows,
            is_coalesced=True,
        )

    def characteristics(self, rows_per_rank: Sequence[int], presence: Presence | None = None) -> Characteristics:
        """What its gradient looks like when each rank holds so many distinct rows."""
        return Characteristics(self.num_rows, self.width, self.wire.itemsize, tuple(rows_per_rank), presence)

    @property
    def label(self) -> str | Mapping[str, int]:
        """What counters and errors call an exchange of its rows."""
        return self.shares or self.name

    @property
    def index_dtype(self) -> torch.dtype:
        """Of row numbers on the wire: int32 where every row has one."""
        return torch.int32 if self.num_rows <= 2**31 else torch.int64

    def to_wire(self, values: Tensor) -> Tensor:
        """Values as they travel, contiguous."""
        return values.to(self.wire).contiguous()

    def from_wire(self, values: Tensor) -> Tensor:
        """What travelled, as the gradient's values."""
        return values.to(self.dtype)

    @property
    def wire(self) -> torch.dtype:
        """The dtype in which values travel."""
        return self.wire_dtype or self.dtype


def as_wire_dtype(given: WireDtype) -> torch.dtype | None:
    """The dtype in which values are to travel; None for their own.

    Raises:
        PlanError: If it is none of the floating-point dtypes that may be asked for.

    Example:
        >>> as_wire_dtype("bf16")
        torch.bfloat16
    """
    if given is None or given in WIRE_DTYPES.values():
        return cast("torch.dtype | None", given)
    if isinstance(given, str) and given in WIRE_DTYPES:
        return WIRE_DTYPES[given]
    raise PlanError(f"unknown wire_dtype {given!r}, expected None or one of {', '.join(WIRE_DTYPES)}")
