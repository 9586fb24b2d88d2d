"""`Plan`: what was decided for each table of a model on a mesh: a value that can be read, saved and replayed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tulle.cost import Characteristics, Cost, Network
from tulle.errors import PlanError
from tulle.sync import AUTO, Choice, check_scheme
from tulle.tables import PLACEMENTS

FORMAT = 1
BUCKET_BYTES = 25 * 1024 * 1024
"""Dense gradients travel in buckets of this size unless a plan says otherwise (DDP's default too)."""
AT_STEP, AT_READ = "step", "read"
SCHEDULES = (AT_STEP, AT_READ)
"""When a replica is updated: in `optimizer.step()`, or when somebody reads it afterwards."""


@dataclass(frozen=True, slots=True)
class TablePlan:
    """What was decided for one table.

    Args:
        name: The parameter's name in the model.
        rows: Rows of the table.
        width: Columns.
        scheme: How its gradient is synchronized: a scheme's name, or `"auto"` to choose by the first gradients; or how
            the table is split, `"rows"` or `"columns"`.
        reason: Why, in one sentence.
        density: Share of rows that one rank touches in a step, 0 to 1; None if it was not measured.
        candidates: Predicted cost by scheme.
        characteristics: Zen's four numbers of its gradients by name, where they were measured.
        measured: What the exchange that it takes part in was seen to take, after the fact.
    """

    name: str
    rows: int
    width: int
    scheme: str
    reason: str = ""
    density: float | None = None
    candidates: Mapping[str, Cost] | None = None
    characteristics: Mapping[str, float] | None = None
    measured: Cost | None = None

    def with_choice(self, choice: Choice | None, measured: Cost | None) -> TablePlan:
        """The same with a choice that was made, if any, and what was measured, if anything."""
        if choice is None:
            return replace(self, measured=measured)
        return replace(
            self,
            scheme=choice.scheme,
            reason=choice.reason,
            density=choice.density,
            candidates=dict(choice.candidates),
            characteristics=_ratios(choice.characteristics),
            measured=measured,
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """What was decided for a model on a mesh. Made by `tulle.plan`, read by `tulle.distribute`.

    Args:
        mesh: Size of each axis by name.
        tables: One entry for each table with sparse gradients.
        bucket_bytes: Size of a bucket of dense gradients.
        network: The measured network of axis `data`, None if nothing had to be chosen by cost.
        wire_dtype: In which the values of sparse gradients travel, by name; None loses nothing.
        offers: What would pay if the model were written otherwise, a sentence each. Nobody does it unasked.
        schedule: `"step"`, or `"read"`: then the all-reduce of dense gradients, and the update that waits for it, may
            take until a parameter is read, in the next forward say. The numbers are the same.

    Example:
        >>> plan = Plan(mesh={"data": 4}, tables=(TablePlan("source.weight", 8000, 256, "allgather", "given"),))
        >>> print(plan.explain())
        mesh data=4, dense gradients all-reduced in buckets of 25 MiB
        source.weight (8,000 x 256): allgather: given
    """

    mesh: Mapping[str, int]
    tables: tuple[TablePlan, ...] = ()
    bucket_bytes: int = BUCKET_BYTES
    network: Network | None = None
    wire_dtype: str | None = None
    offers: tuple[str, ...] = ()
    schedule: str = AT_STEP

    @property
    def schemes(self) -> dict[str, str]:
        """The scheme of each table by name; of one that is split its placement."""
        return {table.name: table.scheme for table in self.tables}

    @property
    def placements(self) -> dict[str, str]:
        """How each table that is split is split, by name."""
        return {table.name: table.scheme for table in self.tables if table.scheme in PLACEMENTS}

    def with_rows_split(self, tables: Mapping[str, tuple[int, int]], reason: str) -> Plan:
        """The same with some tables, `(rows, width)` by name, split by rows for a reason."""
        others = tuple(table for table in self.tables if table.name not in tables)
        split = tuple(TablePlan(name, *shape, "rows", reason) for name, shape in tables.items())
        return replace(self, tables=others + split)

    def explain(self) -> str:
        """What was chosen for each table, why, and what the other candidates were predicted to cost."""
        axes = ", ".join(f"{name}={size}" for name, size in self.mesh.items())
        lines = [f"mesh {axes}, dense gradients all-reduced in buckets of {self.bucket_bytes / 2**20:g} MiB"]
        if self.schedule == AT_READ:
            lines.append("replicas are updated when they are read, not in the optimizer's step")
        if self.wire_dtype:
            lines.append(f"values of sparse gradients travel as {self.wire_dtype}")
        for table in self.tables:
            lines.append(f"{table.name} ({table.rows:,} x {table.width:,}): {table.scheme}: {table.reason}")
            if table.characteristics:
                lines.append("  " + ", ".join(f"{name} {value:.4g}" for name, value in table.characteristics.items()))
            lines += [_line(name, cost) for name, cost in (table.candidates or {}).items()]
            if table.measured:
                lines.append(_line("measured", table.measured))
        lines += [f"offered: {offer}" for offer in self.offers]
        return "\n".join(lines)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON; the file is complete or absent."""
        target = Path(path)
        aside = target.with_name(f".{target.name}.{os.getpid()}")
        aside.write_text(json.dumps(self.to_json(), indent=2) + "\n", encoding="utf-8")
        aside.replace(target)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Read what `save` wrote.

        Raises:
            PlanError: If the file is missing or is not a plan, saying what is wrong.
        """
        try:
            parsed = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise PlanError(f"cannot read a plan from {os.fspath(path)!r}: {error}") from error
        try:
            return Plan.from_json(parsed)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PlanError(
                f"{os.fspath(path)!r} is not a plan that this version reads ({type(error).__name__}: {error}): "
                "write it with Plan.save"
            ) from error

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "format": FORMAT,
            "mesh": dict(self.mesh),
            "bucket_bytes": self.bucket_bytes,
            "network": _network_to_json(self.network) if self.network else None,
            "wire_dtype": self.wire_dtype,
            "offers": list(self.offers),
            "schedule": self.schedule,
            "tables": [_table_to_json(table) for table in self.tables],
        }

    @staticmethod
    def from_json(parsed: Mapping[str, Any]) -> Plan:
        """From plain values, checked."""
        if parsed["format"] != FORMAT:
            raise ValueError(f"format {parsed['format']!r}, expected {FORMAT}")
        bucket_bytes = int(parsed["bucket_bytes"])
        if bucket_bytes <= 0:
            raise ValueError(f"bucket_bytes {bucket_bytes}, expected a positive number")
        return Plan(
            mesh={str(name): int(size) for name, size in parsed["mesh"].items()},
            tables=tuple(_table_from_json(table) for table in parsed["tables"]),
            bucket_bytes=bucket_bytes,
            network=_network_from_json(parsed["network"]) if parsed["network"] else None,
            wire_dtype=parsed.get("wire_dtype"),
            offers=tuple(str(offer) for offer in parsed.get("offers", ())),
            schedule=_check_schedule(parsed.get("schedule", AT_STEP)),
        )

    def check(self, mesh: Mapping[str, int], tables: Mapping[str, tuple[int, int]]) -> None:
        """Check that the plan is for this mesh and these tables.

        Args:
            mesh: Size of each axis by name.
            tables: `(rows, width)` of each table of the model by name.

        Raises:
            PlanError: Naming what differs.
        """
        _check_schedule(self.schedule)
        if dict(self.mesh) != dict(mesh):
            raise PlanError(f"the plan is for the mesh {dict(self.mesh)}, this one is {dict(mesh)}: make a plan for it")
        for table in self.tables:
            shape = tables.get(table.name)
            if shape is None:
                known = ", ".join(tables) or "none"
                raise PlanError(
                    f"the plan has a table {table.name!r}, the model's tables with sparse gradients are: {known}"
                )
            if shape != (table.rows, table.width):
                raise PlanError(
                    f"the plan has {table.name!r} with {table.rows} x {table.width}, "
                    f"the model has it with {shape[0]} x {shape[1]}"
                )


def _check_schedule(schedule: str) -> str:
    if schedule not in SCHEDULES:
        raise PlanError(f"the plan has the schedule {schedule!r}, expected one of {', '.join(SCHEDULES)}")
    return schedule


def _line(name: str, cost: Cost) -> str:
    return f"  {name:<20} {cost.seconds * 1e3:9.3f} ms {cost.bytes / 1e6:9.3f} MB {cost.messages:4d} messages"


def _ratios(looks: Characteristics) -> dict[str, float]:
    return {
        "density": looks.density,
        "overlap_ratio": looks.overlap_ratio,
        "densification_ratio": looks.densification_ratio,
        "skewness_ratio": looks.skewness_ratio,
    }


def _cost_from_json(parsed: Mapping[str, Any]) -> Cost:
    return Cost(parsed["bytes"], parsed["messages"], parsed["seconds"])


def _network_to_json(network: Network) -> dict[str, Any]:
    nested = {"inside": network.inside, "across": network.across}
    values = asdict(network) | {name: _network_to_json(part) if part else None for name, part in nested.items()}
    return {name: value for name, value in values.items() if value != float("inf")}  # JSON has no infinity


def _network_from_json(parsed: dict[str, Any]) -> Network:
    nested = {name: _network_from_json(parsed[name]) for name in ("inside", "across") if parsed.get(name)}
    numbers = {name: float(value) for name, value in parsed.items() if isinstance(value, int | float | str)}
    local_ranks = int(parsed.get("local_ranks", 1))
    values: dict[str, Any] = numbers | nested | {"local_ranks": local_ranks}
    return Network(**values)


def _table_to_json(table: TablePlan) -> dict[str, Any]:
    candidates = [{"scheme": name, **asdict(cost)} for name, cost in (table.candidates or {}).items()]
    return asdict(table) | {"candidates": candidates}


def _table_from_json(parsed: Mapping[str, Any]) -> TablePlan:
    candidates = {candidate["scheme"]: _cost_from_json(candidate) for candidate in parsed.get("candidates", ())}
    return TablePlan(
        name=str(parsed["name"]),
        rows=int(parsed["rows"]),
        width=int(parsed["width"]),
        scheme=check_scheme(parsed["scheme"], extra=(AUTO, *PLACEMENTS)),
        reason=str(parsed.get("reason", "")),
        density=None if parsed.get("density") is None else float(parsed["density"]),
        candidates=candidates or None,
        characteristics=parsed.get("characteristics"),
        measured=_cost_from_json(parsed["measured"]) if parsed.get("measured") else None,
    )
