"""`weighed`: what each rank's backward weighs a number of all ranks' parts by, which all ranks must do alike.

The gradient of such a number goes to each rank's part as it is. So a penalty that ranks weigh differently, by their
shares of a batch say, moves each part by its own rank's weight, where one process would take their mean.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from tulle.mesh import Axis


@dataclass(slots=True)
class Weights:
    """By what backward has multiplied gradients of numbers of all ranks' parts, since the last backward.

    Args:
        is_asked: Whether there was such a number, which all ranks ask for alike.
        given: This rank's, in the order in which backward came to them.
    """

    is_asked: bool = False
    given: list[Tensor] = field(default_factory=list)

    @staticmethod
    def on(axis: Axis) -> Weights:
        """The weights noted for numbers over an axis."""
        return axis.kept.setdefault(Weights, Weights())

    def take(self) -> list[Tensor]:
        """Give the weights noted until now, and forget them."""
        taken, self.given, self.is_asked = self.given, [], False
        return taken


def weighed(number: Tensor, axis: Axis) -> Tensor:
    """Note what backward weighs a number by, of which all ranks have a part. Every rank of the axis must call it."""
    if number.requires_grad and axis.size > 1:
        weights = Weights.on(axis)
        weights.is_asked = True
        number.register_hook(lambda gradient: weights.given.append(gradient.detach()))
    return number
