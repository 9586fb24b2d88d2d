"""`Spread`: of which gradients a rank has a part only, because it has a part of the model only."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tulle.mesh import Axis

_SPREAD = "_tulle_spread"


@dataclass(frozen=True, slots=True)
class Spread:
    """How the gradients of a model that is split over ranks make up the whole.

    Args:
        axes: Over which the model is split; ranks along them have different parameters, or parts of one.
        counts: Whether this rank's gradient is to be counted: of a parameter that several ranks hold, only one's is.
        is_part: Whether this rank has a part of the parameter only.
    """

    axes: tuple[Axis, ...]
    counts: bool
    is_part: bool = False

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        """A copied or pickled parameter is a plain one."""
        return type(None), ()


def spread_over(parameter: Tensor, spread: Spread) -> None:
    """Note how a parameter's gradient is spread."""
    setattr(parameter, _SPREAD, spread)


def spread_of(parameter: Tensor) -> Spread | None:
    """How a parameter's gradient is spread; None of one that is whole on every rank."""
    return getattr(parameter, _SPREAD, None)
