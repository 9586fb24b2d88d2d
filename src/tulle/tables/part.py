"""`guard_table`: the parameter of a split table is a part of it, and is not to be taken for the whole."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from torch import Tensor, nn

from tulle.comm import number_of_all, weighed
from tulle.mesh import Axis
from tulle.parts import Reduction, guard
from tulle.tables.gradient import ShardGradient
from tulle.tables.placements import placement_of
from tulle.tables.split import RowSplit, Split, mark


def guard_table(parameter: nn.Parameter, split: Split) -> None:
    """Let a parameter know which part of a table it holds, and guard it; it stays the object that it is."""
    mark(parameter, split)
    guard(parameter, _Table(split))


def gradient_of_table(gradient: Tensor, split: Split, axis: Axis) -> ShardGradient:
    """Let the gradient of a table know which part of one it is; it stays the object that it is."""
    table = _Table(split)
    return ShardGradient.of(gradient, [axis], table.count, cuts=table.dims, held=table.held)


@dataclass(frozen=True, slots=True)
class _Table:
    """A table of which a rank has a part."""

    split: Split

    @property
    def dims(self) -> list[int]:
        """Rows, or columns."""
        return [0 if isinstance(self.split, RowSplit) else 1]

    @property
    def axes(self) -> list[Axis]:
        """The one over which it is split."""
        return [self.split.axis]

    @property
    def count(self) -> int:
        """Of all ranks."""
        rows, width = self.split.shape
        return rows * width

    def held(self) -> Tensor | None:
        """The places that have a row, if some rank has others: what is zero there may be made another number."""
        if not isinstance(self.split, RowSplit):
            return None
        is_full = self.split.local_shape[0] * self.split.axis.size == self.split.shape[0]
        return None if is_full else self.split.rows()[1]

    @property
    def layout(self) -> Hashable:
        """How it is split."""
        return placement_of(self.split), self.split.axis.name, self.split.shape

    def over(self, number: Tensor, op: Reduction) -> Tensor:
        """Over the axis."""
        return weighed(number_of_all(number, op, self.split.axis, self.split.name), self.split.axis)

    def refusal(self, taker: str) -> str:
        """Names the table, how it is split, and the mend."""
        how = placement_of(self.split)
        return (
            f"{taker} was given the table {self.split.name!r} as if all of it were here, but it is split by {how} over "
            f"{self.split.axis.size} ranks: look rows up with its module, take tulle.ShardedSoftmax for an output "
            f"layer, keep the table whole (another scheme than {how!r} in the plan), or take its .to_local(), which is "
            "this rank's part"
        )

    def refusal_of_gradient(self) -> str:
        """In backward there is no gradient of it."""
        return (
            f"torch.autograd.grad was asked for the gradient of the table {self.split.name!r}, which is split over "
            f"{self.split.axis.size} ranks: gradients of its rows go to their owners, so call backward() and take "
            ".grad, or keep the table whole in the plan"
        )
