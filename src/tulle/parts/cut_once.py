"""`CutOnce`: what all ranks can put together, as it is cut along one dimension."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tulle.parts.gathered import refusal_of_what_is_old, write_through

Assembled = tuple[Tensor, Callable[[Tensor], Tensor]]
"""All of it, which nobody else has, and how this rank's part is taken from that."""


class CutOnce(ABC):
    """How a `Whole` is gathered of which each rank has a stretch of one dimension."""

    __slots__ = ()
    name: str
    """The parameter's, for errors."""
    is_gathered = True

    @property
    @abstractmethod
    def dims(self) -> list[int]:
        """The one along which it is cut."""

    @property
    @abstractmethod
    def local_shape(self) -> Sequence[int]:
        """Of this rank's part."""

    @abstractmethod
    def assemble(self, part: Tensor, dim: int) -> Assembled | None:
        """All ranks' parts along a dimension as one; None, and nothing is sent, if nobody does. Every rank must ask."""

    def gather(self, part: Tensor) -> Tensor | None:
        """All of what ranks have such parts of; what is written in it is written in the part. Every rank must call it.

        Args:
            part: This rank's numbers, of the parameter or of its gradient.

        Returns:
            None if it is cut otherwise, or not assembled.
        """
        return self.gather_along(part, *self.dims) if tuple(part.shape) == tuple(self.local_shape) else None

    def gather_along(self, part: Tensor, dim: int) -> Tensor | None:
        """The same of what became of the parameter in another shape.

        Args:
            part: This rank's numbers, with a place for each of the parameter's along
            dim: the dimension that is cut.
        """
        [cut] = self.dims
        if part.shape[dim] != self.local_shape[cut] or (found := self.assemble(part, dim)) is None:
            return None
        whole, take = found
        return write_through(whole, part, take, refusal=refusal_of_what_is_old(self.name))


def is_followed(part: Tensor) -> bool:
    """Whether autograd wants a gradient of what becomes of a part."""
    return torch.is_grad_enabled() and part.requires_grad
