"""`Turns`: the one order in which all ranks submit what travels, and how it is found for buckets that travel in pieces.

    ready            b0      b1      b2      end of backward         urgency: b2, b1, b0, as the next forward reads them
    as they come     b0 b0 b0 b0 b1 b1 b1 b1 b2 b2
    by urgency       b0 b0   b1 b1   b2 b2   b1 b1   b0 b0           nobody waits for b0 before its parameters are read

Nothing is negotiated: when buckets become ready and in which order they are read is what rank 0 saw in a few steps.

Source: Jayarajan et al., *Priority-based Parameter Propagation* (MLSys'19), slices and their order; Peng et al.,
*ByteScheduler* (SOSP'19); Li et al., *EmbRace* (ICPP'22), horizontal scheduling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from tulle.comm import gather_values, now_s
from tulle.cost import Network, all_reduce_cost
from tulle.engine.buckets import Bucket
from tulle.engine.slots import Traveller
from tulle.mesh import Axis

_LATENCY_SHARE = 0.2
"""A piece is so large that its latency is about this share of its time."""
_LEAST_BYTES, _MOST_BYTES = 256 * 1024, 8 * 1024 * 1024
"""Bounds of a piece, whatever was measured."""


class Turns:
    """Submits items, or pieces of them, in one order. Every rank makes one of the same items.

    Args:
        items: In the order in which they are submitted until `reorder` is called.
    """

    def __init__(self, items: Sequence[Traveller] = ()) -> None:
        self._items = items
        self._turns = [(item, submit) for item in items for submit in _submissions(item)]
        self._next = 0
        self._begin_s = 0.0
        self._ready_s: dict[int, float] = {}
        """Seconds from the begin of a backward until an item was complete, the least so far, by its identity."""

    def begin(self) -> None:
        """A backward has begun."""
        self._begin_s = now_s()

    def arrived(self, item: Traveller) -> None:
        """One of an item's gradients has come: submit, in the one order, whatever is complete."""
        if item.missing:
            return
        ready_s = now_s() - self._begin_s
        self._ready_s[id(item)] = min(ready_s, self._ready_s.get(id(item), ready_s))
        self._advance(at_end=False)

    def end(self) -> None:
        """A backward is over: submit everything."""
        self._advance(at_end=True)
        self._next = 0

    def reorder(self, read: Sequence[Bucket], axis: Axis, network: Network) -> None:
        """Take the best order for what was measured so far on rank 0. Every rank of the axis must call it.

        Args:
            read: Buckets in the order in which forward reads their parameters.
            axis: Whose ranks submit the items.
            network: What the axis gives.
        """
        end_s = now_s() - self._begin_s
        places = {id(bucket): place for place, bucket in enumerate(read)}
        mine = [(self._ready_s.get(id(item), end_s), places.get(id(item), len(places))) for item in self._items]
        heard = gather_values(mine, axis, label="the order of gradients")[0]
        # What is no bucket of replicas' gradients (tables, marks of buffers) is small or has a lane of its own.
        urgency = [
            place if isinstance(item, Bucket) and item.slots else -1
            for item, (_, place) in zip(self._items, heard, strict=True)
        ]
        pieces_s = [_pieces_s(item, network, axis.size) for item in self._items]
        order = order_of_pieces([ready_s for ready_s, _ in heard], urgency, pieces_s)
        submissions = [_submissions(item) for item in self._items]
        self._turns = [(self._items[item], submissions[item][piece]) for item, piece in order]

    def _advance(self, *, at_end: bool) -> None:
        while self._next < len(self._turns):
            item, submit = self._turns[self._next]
            if item.missing and not at_end:
                return
            submit()
            self._next += 1


def best_piece_bytes(network: Network, ranks: int) -> int:
    """How much to all-reduce at once: little, so that what is urgent need not wait long, but hardly slower than much.

    Example:
        >>> network = Network(latency_s=0.5e-3, bandwidth_bytes_per_s=118e6, all_reduce_latency_s=1.5e-3)
        >>> best_piece_bytes(network, 4)
        590000
    """
    latency_s = all_reduce_cost(0, network, ranks).seconds
    byte_s = (all_reduce_cost(_MOST_BYTES, network, ranks).seconds - latency_s) / _MOST_BYTES
    worth_bytes = latency_s / _LATENCY_SHARE / byte_s if byte_s else _MOST_BYTES
    return round(min(max(worth_bytes, _LEAST_BYTES), _MOST_BYTES))


def order_of_pieces(
    ready_s: Sequence[float], urgency: Sequence[int], pieces_s: Sequence[Sequence[float]]
) -> list[tuple[int, int]]:
    """In which order to send pieces over one wire, if whenever it is free the most urgent that is ready is sent.

    Args:
        ready_s: When each item is ready.
        urgency: How soon each is needed, the least number first.
        pieces_s: What each piece of each item takes.

    Returns:
        Number of item and piece, in the order.

    Example:
        >>> order_of_pieces(ready_s=[0.0, 1.5], urgency=[1, 0], pieces_s=[[1.0, 1.0, 1.0], [1.0, 1.0]])
        [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2)]
    """
    time_s = 0.0
    order: list[tuple[int, int]] = []
    sent = [0] * len(pieces_s)
    waiting = {item for item, pieces in enumerate(pieces_s) if pieces}
    while waiting:
        time_s = max(time_s, min(ready_s[item] for item in waiting))
        item = min((item for item in waiting if ready_s[item] <= time_s), key=lambda item: (urgency[item], item))
        order.append((item, sent[item]))
        time_s += pieces_s[item][sent[item]]
        sent[item] += 1
        if sent[item] == len(pieces_s[item]):
            waiting.remove(item)
    return order


def _submissions(item: Traveller) -> list[Callable[[], None]]:
    if isinstance(item, Bucket):
        return [partial(item.start_piece, piece) for piece in range(len(item.piece_sizes_bytes))]
    return [item.start]


def _pieces_s(item: Traveller, network: Network, ranks: int) -> list[float]:
    if isinstance(item, Bucket) and item.slots:
        return [all_reduce_cost(size_bytes, network, ranks).seconds for size_bytes in item.piece_sizes_bytes]
    return [0.0] * len(_submissions(item))
