"""`timed_weights`: what of each piece's backward computes gradients of weights, which can be put off."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from tulle.comm import barrier, gather_values
from tulle.mesh import Axis
from tulle.pipeline.split_backward import Product, products_of
from tulle.profiling.laps import Laps
from tulle.profiling.steps import Twin

_REPEATS = 3
_LABEL = "the profile"


def timed_weights(twin: Twin, names: Sequence[str], axis: Axis) -> list[float]:
    """Seconds of each piece, of the slowest rank. Every rank of the axis must call it.

    Within backward each product computes the gradients of its weight and bias once more, by itself.

    Args:
        twin: What steps; it has stepped before.
        names: Of its pieces.
        axis: All of whose ranks step at once.
    """
    repeats: list[list[float]] = []
    for _ in range(_REPEATS):
        barrier(axis)
        repeats.append(_timed(twin, names))
    least = [min(times) for times in zip(*repeats, strict=True)]  # the first may be the first of its kind
    return max(gather_values(least, axis, label=_LABEL), key=sum)


def _timed(twin: Twin, names: Sequence[str]) -> list[float]:
    laps = Laps(twin.model, names, twin.device)
    found = [0.0] * len(names)

    def time(product: Product, owner: int, gradients: Sequence[Tensor | None]) -> None:
        product.note(gradients)
        if product.gradient is not None:
            with torch.no_grad():
                found[owner] += twin.seconds(product.compute)

    with laps.watching():
        laps.begin_forward()
        loss = twin.forward(twin.samples[0])
    hooks = [
        product.node.register_prehook(partial(time, product, laps.owner_of(product.node)))
        for product in products_of(loss)
    ]
    loss.backward()
    for hook in hooks:
        hook.remove()
    twin.clear()
    return found
