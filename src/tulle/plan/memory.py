"""`memory_from_json`: what a plan's JSON says of memory, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tulle.entries import Entries
from tulle.memory import Memory


def memory_from_json(parsed: Mapping[str, Any]) -> Memory:
    """From what `Memory.to_json` gave; what is not there is not done.

    Raises:
        PlanError: If a `Memory` has no such entry, or an entry is not what it can be.

    Example:
        >>> memory_from_json({"recompute": ["h.0"]}).recompute
        ('h.0',)
    """
    entries = Entries.of(parsed, "", Memory)
    return Memory(
        shard_optimizer=parsed.get("shard_optimizer", False),
        full_shard=parsed.get("full_shard", False),
        recompute=entries.names("recompute"),
        offload=entries.names("offload"),
        precision=parsed.get("precision"),
    ).checked()
