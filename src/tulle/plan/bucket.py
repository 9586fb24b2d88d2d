"""`Bucket`: dense gradients that travel together, and when they do, as `tulle.engine` lays them out and sends them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tulle.cost import Cost, Network, all_reduce_cost
from tulle.engine.buckets import FIRST_BUCKET_BYTES
from tulle.engine.turns import order_of_pieces
from tulle.plan.work import Work


@dataclass(frozen=True, slots=True)
class Bucket:
    """Dense gradients of one stage that travel together.

    Args:
        name: For people.
        pieces: In the order of backward: with the last one's backward it is full, with its forward it is read first.
        cost: Of its all-reduce.
        ready_s: When it is full, from the begin of backward.
        is_carried: Whether it is sent in the next step only, if updates wait for reads.
    """

    name: str
    pieces: tuple[Work, ...]
    cost: Cost
    ready_s: float
    is_carried: bool = False

    @property
    def number(self) -> int:
        """Of the piece with which it is full."""
        return self.pieces[-1].number

    @property
    def stage(self) -> int:
        """Of all its pieces."""
        return self.pieces[0].stage


def buckets_of(pieces: Sequence[Work], bucket_bytes: int, network: Network, ranks: int) -> list[Bucket]:
    """Cut a stage's pieces, the last first, into buckets that are full when they have so many bytes, or come to an end.

    The first is small, so that communication begins early, as in `tulle.engine.buckets`.
    """
    found: list[list[Work]] = []
    ready_s: list[float] = []
    limit_bytes, filled_bytes, now_s = min(FIRST_BUCKET_BYTES, bucket_bytes), bucket_bytes, 0.0
    for work in reversed(pieces):
        now_s += work.backward_s + work.all_reduced_again.seconds
        if not work.parameters_bytes:
            continue
        if filled_bytes >= limit_bytes:
            limit_bytes = bucket_bytes if found else limit_bytes
            found.append([])
            ready_s.append(0.0)
            filled_bytes = 0
        found[-1].append(work)
        ready_s[-1] = now_s
        filled_bytes += work.parameters_bytes
    costs = [all_reduce_cost(sum(work.parameters_bytes for work in part), network, ranks) for part in found]
    return [
        Bucket(f"bucket {number}", tuple(part), cost, ready)
        for number, (part, cost, ready) in enumerate(zip(found, costs, ready_s, strict=True))
    ]


def by_urgency(buckets: Sequence[Bucket], until_s: float) -> list[Bucket]:
    """In the order in which a wire takes them whose updates wait for reads: what the next forward reads first, first.

    What the wire has not begun with when rows of the next step come is carried over: these pass it.

    Args:
        buckets: In the order of backward.
        until_s: When they come, from the begin of backward.
    """
    order = order_of_pieces(
        [bucket.ready_s for bucket in buckets],
        [bucket.number for bucket in buckets],
        [[bucket.cost.seconds] for bucket in buckets],
    )
    found: list[Bucket] = []
    now_s = 0.0
    for number, _ in order:
        now_s = max(now_s, buckets[number].ready_s)
        found.append(replace(buckets[number], is_carried=now_s >= until_s))
        now_s += buckets[number].cost.seconds
    return found
