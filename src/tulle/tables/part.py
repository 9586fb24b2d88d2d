"""`guard_table`: the parameter of a split table is a part of it, and is not to be taken for the whole."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from torch import Tensor, nn

from tulle.comm import number_of_all
from tulle.parts import guard
from tulle.reductions import Reduction
from tulle.tables.placements import placement_of
from tulle.tables.split import RowSplit, Split, mark


def guard_table(parameter: nn.Parameter, split: Split) -> None:
    """Let a parameter know which part of a table it holds, and guard it; it stays the object that it is."""
    mark(parameter, split)
    guard(parameter, _Table(split))


@dataclass(frozen=True, slots=True)
class _Table:
    """A table of which a rank has a part."""

    split: Split

    @property
    def dims(self) -> list[int]:
        """Rows, or columns."""
        return [0 if isinstance(self.split, RowSplit) else 1]

    @property
    def count(self) -> int:
        """Of all ranks."""
        rows, width = self.split.shape
        return rows * width

    def held(self) -> Tensor | None:
        """The places that have a row, if there are others: what is zero there may be made another number."""
        if not isinstance(self.split, RowSplit):
            return None
        _, places = self.split.rows()
        return None if len(places) == self.split.local_shape[0] else places

    @property
    def layout(self) -> Hashable:
        """How it is split."""
        return placement_of(self.split), self.split.axis.name, self.split.shape

    def over(self, number: Tensor, op: Reduction) -> Tensor:
        """Over the axis."""
        return number_of_all(number, op, self.split.axis, self.split.name)

    def refusal(self, taker: str) -> str:
        """Names the table, how it is split, and the mend."""
        how = placement_of(self.split)
        return (
            f"{taker} was given the table {self.split.name!r} as if all of it were here, but it is split by {how} over "
            f"{self.split.axis.size} ranks: look rows up with its module, take tulle.ShardedSoftmax for an output "
            f"layer, keep the table whole (another scheme than {how!r} in the plan), or take its .detach(), which is "
            "this rank's part"
        )

    def refusal_of_gradient(self) -> str:
        """In backward there is no gradient of it."""
        return (
            f"torch.autograd.grad was asked for the gradient of the table {self.split.name!r}, which is split over "
            f"{self.split.axis.size} ranks: gradients of its rows go to their owners, so call backward() and take "
            ".grad, or keep the table whole in the plan"
        )
