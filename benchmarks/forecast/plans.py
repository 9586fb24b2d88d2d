"""Plans to be timed beside the planner's own: those that people would pick by hand, and random legal ones."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from tulle.pipeline import Piece, partition
from tulle.pipeline.calls import placed_as_one
from tulle.plan import AT_READ, AT_STEP, BUCKET_BYTES, Memory, Plan, TablePlan
from tulle.sync import FLAT
from tulle.workload import Profile, TableProfile

MICRO_BATCHES = (2, 4, 8)
BUCKETS_BYTES = (2**20, 4 * 2**20, BUCKET_BYTES)
_SCHEMES = ("balanced", "holders", "densify")


def by_hand(profile: Profile, ranks: int, *, pipes: bool) -> dict[str, Plan]:
    """What people would try, by what they would call it.

    Args:
        profile: Of the model.
        ranks: How many there are.
        pipes: Whether the job's batches can be cut for stages.
    """
    mesh = {"data": ranks}
    found: dict[str, Plan] = {}
    if tables := [table for table in profile.tables if table.is_sparse]:
        found["allgather"] = Plan(mesh, _planned(tables, dict.fromkeys(_names(tables), "allgather")))
        for placement in ("rows", "columns"):
            chosen = {table.name: placement if placement in table.placements else "allgather" for table in tables}
            if placement in chosen.values():
                found[placement] = Plan(mesh, _planned(tables, chosen))
                found[f"{placement}, read"] = Plan(mesh, _planned(tables, chosen), schedule=AT_READ)
        for scheme in _SCHEMES:
            found[scheme] = Plan(mesh, _planned(tables, dict.fromkeys(_names(tables), scheme)))
        return found
    found["replicas"] = Plan(mesh)
    found["replicas, small buckets"] = Plan(mesh, bucket_bytes=BUCKETS_BYTES[0])
    found["replicas, read"] = Plan(mesh, schedule=AT_READ)
    found["replicas, sharded state"] = Plan(mesh, memory=Memory(shard_optimizer=True))
    for micro_batches in MICRO_BATCHES if pipes else ():
        found[f"pipeline, {micro_batches} micro-batches"] = _pipeline(profile, ranks, 1, micro_batches)
    return found


def at_random(profile: Profile, ranks: int, *, pipes: bool, seed: int = 0) -> Iterator[tuple[str, Plan]]:
    """Legal plans without end, each with a name."""
    drawn = random.Random(seed)
    tables = [table for table in profile.tables if table.is_sparse]
    number = 0
    while True:
        number += 1
        pipe = drawn.choice([p for p in (1, 2, 4, 8) if ranks % p == 0]) if pipes else 1
        if pipe > 1:
            yield f"random {number}", _pipeline(profile, pipe, ranks // pipe, drawn.choice(MICRO_BATCHES))
            continue
        schemes = {table.name: drawn.choice([*FLAT, *2 * table.placements]) for table in tables}
        yield (
            f"random {number}",
            Plan(
                {"data": ranks},
                _planned(tables, schemes),
                bucket_bytes=drawn.choice(BUCKETS_BYTES),
                schedule=drawn.choice((AT_STEP, AT_READ)),
                memory=Memory(shard_optimizer=not tables and drawn.random() < 0.3),
            ),
        )


def rivals(profile: Profile, ranks: int, count: int, *, pipes: bool) -> dict[str, Plan]:
    """So many plans: first those by hand. On one rank they are all the same, so there are none."""
    if ranks == 1:
        return {}
    found = by_hand(profile, ranks, pipes=pipes)
    found |= islice(at_random(profile, ranks, pipes=pipes), max(0, count - len(found)))
    return dict(islice(found.items(), count))


def _planned(tables: Sequence[TableProfile], schemes: Mapping[str, str]) -> tuple[TablePlan, ...]:
    return tuple(TablePlan(t.name, t.rows, t.width, schemes[t.name], "a rival") for t in tables)


def _names(tables: Sequence[TableProfile]) -> list[str]:
    return [table.name for table in tables]


def _pipeline(profile: Profile, pipe: int, data: int, micro_batches: int) -> Plan:
    """Stages of like time, of whole blocks where a stage has all that is in one."""
    pieces = [Piece(piece.name, piece.forward_s + piece.backward_s) for piece in profile.modules]
    stages = placed_as_one(partition(pieces, pipe).assignment, {piece.name: piece.around for piece in profile.modules})
    mesh = {"pipe": pipe, "data": data} if data > 1 else {"pipe": pipe}
    return Plan(mesh, stages=stages, micro_batches=micro_batches)
