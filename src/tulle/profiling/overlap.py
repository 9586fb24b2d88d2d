"""`overlap`: by what factors computation and an exchange take longer beside each other.

    alone     backward ───────▏
              all-reduce ───────────────▏          twice as long, so that it is the last to end
    beside    backward ─────────▏
              all-reduce ──────────────────▏

What either takes longer is what the time in which they do not disturb each other costs: `tulle.plan.contention`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch

from tulle.comm import all_reduce, barrier, gather_values, now_s
from tulle.cost import Network
from tulle.mesh import Axis
from tulle.profiling.steps import Twin

_SIDE = 512
_PRODUCTS_S = 0.03
_LONGEST_S = 0.25
"""A backward that takes longer would need an exchange of very many bytes beside it."""
_LONGER = 2
_MOST_BYTES = 2**28
_BUDGET_S = 3.0
"""For about so long it is measured."""
_FEWEST, _MOST = 5, 15
_LABEL = "network probe"

Prepared = Callable[[], Callable[[], object]]
"""Does what comes before, and gives what is timed."""


def overlap(axis: Axis, network: Network, twin: Twin | None) -> tuple[float, float]:
    """By what factor computation takes longer beside an all-reduce, and an all-reduce beside computation.

    Every rank of the axis must call it.

    Args:
        axis: All of whose ranks work at once.
        network: Of the axis.
        twin: Whose backward is the computation; None, or if that takes too long, for matrix products.
    """
    is_short = twin is not None and slowest_s(partial(_backward, twin), axis, 1)[0] < _LONGEST_S
    prepare = partial(_backward, twin) if twin is not None and is_short else _products(axis)
    alone_s = slowest_s(prepare, axis, _FEWEST)[0]
    rate = network.all_reduce_bytes_per_s or network.bandwidth_bytes_per_s
    sent_bytes = _LONGER * alone_s * rate / 2  # a ring sends nearly all of it twice
    tensor = torch.zeros(min(_MOST_BYTES, max(4096, round(sent_bytes))) // 4, device=axis.device)
    exchange = partial(all_reduce, tensor, axis, label=_LABEL)
    repeats = min(max(_FEWEST, round(_BUDGET_S / (6 * alone_s))), _MOST)
    alone_s, _ = slowest_s(prepare, axis, repeats)
    exchanged_s, _ = slowest_s(lambda: lambda: exchange().wait(), axis, repeats)
    computed_s, both_s = slowest_s(prepare, axis, repeats, beside=exchange)
    if twin is not None:
        twin.clear()  # or the next backward adds to these gradients, which torch cannot do with rows of fp16 on CPUs
    shared_s = min(alone_s, exchanged_s)
    slowdown = 1 + max(0.0, computed_s - alone_s) / shared_s
    # An exchange that ended first has taken no longer than what was computed beside it.
    link_slowdown = 1 + max(0.0, both_s - max(exchanged_s, computed_s)) / shared_s
    return slowdown, link_slowdown


def slowest_s(
    prepare: Prepared, axis: Axis, repeats: int, beside: Callable[[], Any] | None = None
) -> tuple[float, float]:
    """Seconds until the work is done, and what is beside it too: medians of the slowest rank, all ranks at once.

    Args:
        prepare: Gives the work each time anew; what that takes does not count.
        axis: Every rank of which must call it.
        repeats: How many count; one more comes first.
        beside: Begins what is waited for behind the work.
    """
    seconds: list[tuple[float, float]] = []
    for _ in range(repeats + 1):
        work = prepare()
        barrier(axis)
        begin_s = now_s()
        under_way = beside() if beside else None
        work()
        computed_s = _settled_s(axis) - begin_s
        if under_way is not None:
            under_way.wait()
        seconds.append((computed_s, _settled_s(axis) - begin_s))
    mine = [median(parts) for parts in zip(*seconds[1:], strict=True)]
    computed_s, both_s = (max(of_ranks) for of_ranks in zip(*gather_values(mine, axis, label=_LABEL), strict=True))
    return computed_s, both_s


def _settled_s(axis: Axis) -> float:
    """The time, when what was begun on the device has ended, but for exchanges that nobody waited for."""
    if axis.device.type == "cuda":
        torch.cuda.current_stream(axis.device).synchronize()
    return now_s()


def _backward(twin: Twin) -> Callable[[], object]:
    twin.clear()
    return twin.forward(twin.samples[0]).backward


def _products(axis: Axis) -> Prepared:
    left = torch.randn(_SIDE, _SIDE, device=axis.device)

    def one() -> None:
        _ = left @ left

    one_s, _ = slowest_s(lambda: one, axis, _FEWEST)
    count = max(1, round(_PRODUCTS_S / one_s))

    def many() -> None:
        for _ in range(count):
            one()

    return lambda: many
