"""`StepOutput`: what a step's micro-batches returned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tulle.errors import DataError
from tulle.pipeline.structure import flatten, rebuild


@dataclass(frozen=True, slots=True)
class StepOutput:
    """One result of a step function, of each micro-batch, the same on all ranks.

    Args:
        outputs: In the order of micro-batches.
        shares: Of the batch's samples in each micro-batch; they add up to 1.

    Example:
        >>> import torch
        >>> losses = StepOutput([torch.tensor(1.0), torch.tensor(3.0)], [0.5, 0.5])
        >>> losses.mean(), losses.sum(), losses.stack()
        (tensor(2.), tensor(4.), tensor([1., 3.]))
    """

    outputs: Sequence[Any]
    shares: Sequence[float]

    def __float__(self) -> float:
        """Refused: nobody has said whether the mean or the sum is meant."""
        raise DataError(
            "float() was given a StepOutput, one result a micro-batch: write .mean().item() or .sum().item()"
        )

    def mean(self) -> Tensor:
        """The mean over the batch: each micro-batch counts by its share of the samples."""
        return self._total([tensor * share for tensor, share in zip(self._tensors("mean"), self.shares, strict=True)])

    def sum(self) -> Tensor:
        """The sum over micro-batches."""
        return self._total(self._tensors("sum"))

    def concat(self, dim: int = 0) -> Tensor:
        """The micro-batches' tensors end to end along a dimension; numbers, such as losses, as `[micro_batches]`."""
        return torch.cat([torch.atleast_1d(tensor) for tensor in self._tensors("concat")], dim)

    def stack(self) -> Tensor:
        """`[micro_batches, ...]`."""
        return torch.stack(self._tensors("stack"))

    @staticmethod
    def _total(tensors: Sequence[Tensor]) -> Tensor:
        total = tensors[0]
        for tensor in tensors[1:]:
            total = total + tensor
        return total

    def _tensors(self, operation: str) -> list[Tensor]:
        wrong = next(
            (type(output).__name__ for output in self.outputs if not isinstance(output, Tensor | int | float)), None
        )
        if wrong is not None:
            raise DataError(f"{operation}() was asked of results that are {wrong}, expected tensors: use .outputs")
        # A number of Python's has 64 bits, as of `loss.item()`: torch would take it for one of 32.
        return [
            torch.tensor(output, dtype=torch.float64) if isinstance(output, float) else torch.as_tensor(output)
            for output in self.outputs
        ]


def collected(results: Sequence[Any], shares: Sequence[float]) -> Any:
    """What a step returns: the structure that its function returned, with a `StepOutput` for each leaf."""
    taken_apart = [flatten(result) for result in results]
    spec = taken_apart[0][1]
    if any(other != spec for _, other in taken_apart):  # as of a function that returns now this, now that
        return StepOutput(list(results), list(shares))
    columns = zip(*(leaves for leaves, _ in taken_apart), strict=True)
    return rebuild(spec, [StepOutput(list(column), list(shares)) for column in columns])
