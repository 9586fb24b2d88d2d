"""Plans of full sharding that several tests put on."""

from dataclasses import replace

from tulle.plan import Memory, plan_for_later

FULL = Memory(full_shard=True)


def planned(kind, shape, memory):
    tables = {"words.weight": (40, 8)} if kind == "words" else {}
    return replace(plan_for_later(shape, tables), memory=memory)
