"""A measured `Network` as JSON holds it, which knows no infinity."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from tulle.cost import Network


def network_to_json(network: Network) -> dict[str, Any]:
    """A measured network as plain values."""
    nested = {"inside": network.inside, "across": network.across}
    values = asdict(network) | {name: network_to_json(part) if part else None for name, part in nested.items()}
    return {name: value for name, value in values.items() if value != float("inf")}  # JSON has no infinity


def network_from_json(parsed: dict[str, Any]) -> Network:
    """A measured network from plain values; what an older version did not measure costs nothing."""
    nested = {name: network_from_json(parsed[name]) for name in ("inside", "across") if parsed.get(name)}
    numbers = {name: float(value) for name, value in parsed.items() if isinstance(value, int | float | str)}
    local_ranks = int(parsed.get("local_ranks", 1))
    values: dict[str, Any] = numbers | nested | {"local_ranks": local_ranks}
    return Network(**values)
