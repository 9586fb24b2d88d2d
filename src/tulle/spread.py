"""`Spread`: of which gradients a rank has a part only, because it has a part of the model only."""

from __future__ import annotations

from collections.abc import Iterable
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


def spread_of_all(parameters: Iterable[Tensor]) -> Spread | None:
    """Over which axes the gradients of some parameters, maybe of several models, make up the whole; None if all are."""
    axes = {axis.ranks: axis for parameter in parameters if (own := spread_of(parameter)) for axis in own.axes}
    return Spread(tuple(axes.values()), counts=True) if axes else None


def is_counted(parameter: Tensor, spread: Spread) -> bool:
    """Whether this rank counts a gradient in a sum over the axes of a spread: of one that is whole, the first does."""
    own = spread_of(parameter)
    known = () if own is None else [axis.ranks for axis in own.axes]
    is_first = all(axis.rank == 0 for axis in spread.axes if axis.ranks not in known)
    return is_first and (own is None or own.counts)
