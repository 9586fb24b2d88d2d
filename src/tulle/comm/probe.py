"""Measures what an axis' network gives, and how fast its ranks handle rows while all do: what the cost model rests on.

Small exchanges tell latencies, large ones bandwidths, for exchanges in rounds and for the backend's all-reduce apart:
gloo's smallest all-reduce takes several times its smallest exchange, and at 10 Gbit/s their rates differ too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import median

import torch

from tulle.comm.collectives import all_reduce, barrier
from tulle.comm.lane import hosts_of
from tulle.comm.levels import levels
from tulle.comm.parts import all_gather_parts, all_to_all_parts
from tulle.comm.scratch import let_go, release
from tulle.comm.through_memory import shared
from tulle.comm.traffic import now_s
from tulle.cost import Network
from tulle.mesh import Axis
from tulle.rows import Merge

ALONE = Network(latency_s=0.0, bandwidth_bytes_per_s=float("inf"))
"""The network of an axis of one rank: nothing travels."""
_LABEL = "network probe"
_SMALL_REPEATS = 20
_SMALL_REDUCED_BYTES = 4096
"""Of 8 bytes most parts of gloo's ring would be empty, and skipped: half the time of any real all-reduce."""
_LARGE_REPEATS = 4
_LARGE_BYTES = 4 * 1024 * 1024
_WORK_ROWS, _WORK_WIDTH = 4096, 256
"""More takes longer than a rank keeps a core that others want, and would be most of what a small model ever needs."""
_SORTED_NUMBERS = 65536
"""Fewer are sorted before the last rank has a core: what was measured would be how long it waits for one."""


def probe(axis: Axis) -> Network:
    """Measure the network of an axis once; the same numbers on all ranks. Every rank of the axis must call it.

    Takes about as long as sending 50 MB, and is remembered for the axis.
    """
    if axis.size == 1:
        return ALONE
    if not axis.measured:
        work_s = _slowest(_work_s(axis), axis)
        work_bytes = _WORK_ROWS * _WORK_WIDTH * 4
        nothing_travels = replace(
            ALONE,
            sum_bytes_per_s=work_bytes / work_s["sum"],
            copy_bytes_per_s=work_bytes / work_s["copy"],
            number_s=work_s["sort"] / _SORTED_NUMBERS,
        )
        axis.measured.append(_with_hosts(_measure(axis, axis, nothing_travels), axis))
    return axis.measured[0]


def _with_hosts(flat: Network, axis: Axis) -> Network:
    """Measure inside hosts and between them too, where both have several ranks."""
    inside, across = hosts_of(axis)
    if inside is None or across is None or inside.size == 1 or across.size == 1:
        return flat
    networks = _measure(inside, axis, flat), _measure(across, axis, flat)
    return replace(flat, local_ranks=inside.size, inside=networks[0], across=networks[1])


def _measure(axis: Axis, whole: Axis, works: Network) -> Network:
    """Measure an axis, or all its like at once; the slowest numbers of the whole axis, on all its ranks.

    Args:
        axis: What is measured.
        whole: All whose ranks exchange at once, as they do in training: each along its own such axis.
        works: How fast they handle rows meanwhile.
    """
    # What a rank sends to each, so that it sends as many bytes in all; what is reduced lies there, too.
    lengths = {size: max(1, size // (axis.size - 1)) for size in (8, _LARGE_BYTES)}
    room = torch.zeros(lengths[_LARGE_BYTES] * axis.size, dtype=torch.uint8, device=axis.device)
    parts = {size: room[: length * axis.size].split(length) for size, length in lengths.items()}

    def exchange(size: int) -> None:
        all_lengths = [lengths[size]] * axis.size
        release(all_to_all_parts(parts[size], all_lengths, axis, label=_LABEL, most_bytes=size).wait(), axis)

    def exchange_in_pairs() -> None:
        partner = axis.rank ^ 1
        pair = [8 * (rank in (axis.rank, partner)) for rank in range(axis.size)]
        all_to_all_parts([room[:n] for n in pair], pair, axis, label=_LABEL).wait()

    def gather() -> None:
        part = room[: lengths[_LARGE_BYTES]]
        release(all_gather_parts(part, [len(part)] * axis.size, axis, label=_LABEL).wait(), axis)

    def reduce(size: int) -> None:
        all_reduce(room[:size], axis, label=_LABEL).wait()

    # Of large ones the least times: what other programs do adds only. Small ones, and local work, are slowed by the
    # other ranks themselves: medians.
    seconds = {
        "exchange": median(_times(lambda: exchange(8), _SMALL_REPEATS, whole)),
        "large exchange": min(_times(lambda: exchange(_LARGE_BYTES), _LARGE_REPEATS, whole)),
        "pair": median(_times(exchange_in_pairs, _SMALL_REPEATS, whole)),
        "all-reduce": median(_times(lambda: reduce(_SMALL_REDUCED_BYTES), _SMALL_REPEATS, whole)),
        "large all-reduce": min(_times(lambda: reduce(_LARGE_BYTES), _LARGE_REPEATS, whole)),
    }
    if shared(axis) is not None or levels(axis) is not None:  # else what is gathered goes as what is exchanged
        seconds["large gather"] = min(_times(gather, _LARGE_REPEATS, whole))
    let_go(axis)
    agreed = _slowest(seconds, whole)
    gather_s = agreed.get("large gather")
    reduced_bytes = 2 * (axis.size - 1) / axis.size * _LARGE_BYTES
    return replace(
        works,
        latency_s=agreed["exchange"],
        bandwidth_bytes_per_s=_LARGE_BYTES / _beyond(agreed["large exchange"], agreed["exchange"]),
        all_reduce_latency_s=agreed["all-reduce"],
        all_reduce_bytes_per_s=reduced_bytes / _beyond(agreed["large all-reduce"], agreed["all-reduce"]),
        gather_bytes_per_s=_LARGE_BYTES / _beyond(gather_s, agreed["exchange"]) if gather_s else None,
        pair_latency_s=agreed["pair"],
    )


def _slowest(seconds: Mapping[str, float], axis: Axis) -> dict[str, float]:
    """Of each of these numbers the largest on any rank of an axis."""
    largest = torch.tensor([*seconds.values()], dtype=torch.float64, device=axis.device)
    return dict(zip(seconds, all_reduce(largest, axis, label=_LABEL, op="max").wait().tolist(), strict=True))


def _beyond(total_s: float, latency_s: float) -> float:
    # On a busy machine a large exchange may take no longer than a small one: no rate is infinite.
    return max(total_s - latency_s, total_s / 2)


def _work_s(axis: Axis) -> dict[str, float]:
    """Seconds to sort the numbers of rows that occur about twice, to add the rows up, and to gather as many."""
    values = torch.ones(_WORK_ROWS, _WORK_WIDTH, device=axis.device)
    numbers, indices = (torch.arange(n, device=axis.device) * 7919 % (n // 2) for n in (_SORTED_NUMBERS, _WORK_ROWS))
    merge = Merge.of(indices)
    return {
        "sort": median(_times(lambda: Merge.of(numbers), _LARGE_REPEATS + 1, axis)),
        "sum": median(_times(lambda: merge.sum(values), _LARGE_REPEATS + 1, axis)),
        "copy": median(_times(lambda: values[merge.order], _LARGE_REPEATS + 1, axis)),
    }


def _times(work: Callable[[], object], repeats: int, axis: Axis) -> list[float]:
    """Seconds of each repeat on this rank; all ranks begin together."""
    times: list[float] = []
    for _ in range(repeats):
        barrier(axis)
        begin_s = now_s()
        work()
        if axis.device.type == "cuda":
            torch.cuda.synchronize(axis.device)
        times.append(now_s() - begin_s)
    return times
