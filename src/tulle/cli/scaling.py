"""A plan on clusters that nobody has to have: what `tulle simulate` computes, as values and as tables."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from tulle.errors import PlanError
from tulle.plan import Plan, footprints
from tulle.plan.deal import looks_ahead
from tulle.plan.exchange import Tariff
from tulle.plan.lower import lower
from tulle.plan.plan import TOLD
from tulle.plan.prediction import some
from tulle.plan.search import best_plan
from tulle.plan.work import DATA, is_within, samples_a_rank
from tulle.report import quantity
from tulle.report.forecast import bits
from tulle.simulate import Change, Point, Step, Stragglers, Weather, law_of, looks, sweep
from tulle.workload import Cluster, Profile, TableProfile


@dataclass(frozen=True, slots=True)
class Job:
    """A plan for a profiled model, on as many ranks as there are.

    Args:
        plan: As it was made; axis `data` grows and shrinks with the cluster.
        profile: Of the model.
        is_strong: Whether a step has the same samples on all clusters, instead of as many a rank.
        batch: Samples of a step on the first cluster; None for as many a rank as the plan was made for.
        is_replanned: Whether each cluster gets the plan that is best on it.
        lookahead: Whether the training loop goes through `tulle.lookahead`; None for what the plan was made for, or
            else the profile saw.
    """

    plan: Plan
    profile: Profile
    is_strong: bool = False
    batch: int | None = None
    is_replanned: bool = False
    lookahead: bool | None = None
    tariff: Tariff = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tariff", Tariff(self.profile))

    def over(self, changes: Sequence[Change], weather: Weather | None = None) -> list[Point]:
        """Simulate it on one cluster after the other.

        Raises:
            PlanError: If the plan does not fit a cluster, or a step has not a sample for each replica there.
        """
        first: list[tuple[int, int]] = []  # samples and ranks

        def batch_on(cluster: Cluster) -> int:
            if not first:
                first.append((self.batch or self._samples_of(cluster), cluster.ranks))
            samples, ranks = first[0]
            return samples if self.is_strong else max(1, round(samples * cluster.ranks / ranks))

        return sweep(self.profile.cluster, changes, self._step_on, batch_on, weather)

    def on(self, cluster: Cluster) -> Plan:
        """The plan with axis `data` so long that all ranks of a cluster are in its mesh.

        Raises:
            PlanError: If their number is no multiple of the other axes.
        """
        fixed = {name: size for name, size in self.plan.mesh.items() if name != DATA}
        others = math.prod(fixed.values())
        if cluster.ranks % others:
            raise PlanError(
                f"the plan's other axes have {others} ranks ({fixed}), which does not divide the "
                f"{cluster.ranks} of {quantity.plural(cluster.hosts, 'host')} x {cluster.processes_per_host}: "
                f"simulate a multiple of {others} ranks"
            )
        data = cluster.ranks // others
        mesh = dict(self.plan.mesh)
        if "data" in mesh or data == 1:
            return replace(self.plan, mesh=mesh | ({"data": data} if "data" in mesh else {}))
        return replace(self.plan, mesh={"data": data} | mesh)

    def _step_on(self, cluster: Cluster, batch: int) -> Step:
        ahead = self.looks_ahead
        replanned = best_plan(self.profile, cluster, batch=batch, lookahead=ahead) if self.is_replanned else None
        plan = replanned or self.on(cluster)
        if batch < plan.mesh.get(DATA, 1):
            raise PlanError(
                f"a step of {quantity.plural(batch, 'sample')} is too small for {plan.mesh[DATA]} replicas on "
                f"{cluster.ranks} ranks, each of which needs one: give --batch, or fewer ranks"
            )
        return lower(plan, self.profile, cluster, batch=batch, lookahead=ahead, tariff=self.tariff)

    @property
    def looks_ahead(self) -> bool:
        """Whether the training loop goes through `tulle.lookahead`."""
        return looks_ahead(self.plan, self.profile) if self.lookahead is None else self.lookahead

    def needed_bytes(self, point: Point) -> int:
        """What the rank needs that needs most, of the plan that was given."""
        peaks = footprints(self.on(point.cluster), self.profile, point.cluster, batch=point.batch, tariff=self.tariff)
        return max(one.peak_bytes for one in peaks)

    def _samples_of(self, cluster: Cluster) -> int:
        return max(1, round(samples_a_rank(self.plan, self.profile) * cluster.ranks))


def load(plan: Path, profile: Path | None) -> tuple[Plan, Profile]:
    """A plan and the profile that belongs to it.

    Args:
        plan: The file of the plan.
        profile: That of the profile; None for the one that the plan's file names as its `profile`, from its own folder
            on, or for `profile.json` beside it.

    Raises:
        PlanError: If one of them is missing or broken, or the profile is of another model.
    """
    loaded = Plan.load(plan)
    parsed = json.loads(plan.read_text(encoding="utf-8"))
    named = parsed.get("profile") or "profile.json"
    if not isinstance(named, str):
        raise PlanError(f"{str(plan)!r} is not a plan that this version reads (profile is {named!r}, expected a path)")
    beside = plan.parent / named
    if profile is None and not beside.exists():
        raise PlanError(f"a plan alone does not say how long anything takes: give --profile, or put {beside} there")
    path = profile or beside
    found = Profile.load(path)
    told = f"{str(plan)!r} is no plan for the model of {str(path)!r}"
    if parsed.get("model", found.model) != found.model:
        raise PlanError(f"{told}: it was made for {parsed['model']!r}, the profile is of {found.model!r}")
    _check_same_modules(loaded, found, told)
    _check_same_tables(loaded, found, told)
    return loaded, found


def _check_same_modules(plan: Plan, profile: Profile, told: str) -> None:
    """Refuse a plan that names modules of which the profile knows nothing: no piece, none around one, none within."""
    pieces = [piece.name for piece in profile.modules]
    around = {outer for piece in profile.modules for outer in piece.around}
    for field_name, names in (("stages", plan.stages), ("tensor_parallel", plan.tensor_parallel)):
        others = [
            name
            for name in names
            if name not in around and not any(is_within(one, name) or is_within(name, one) for one in pieces)
        ]
        if others:
            raise PlanError(
                f"{told}: the plan's {field_name} name {some([repr(one) for one in others])}, which that has not"
            )


def _check_same_tables(plan: Plan, profile: Profile, told: str) -> None:
    """Refuse a plan of other tables: one that was made of a profile says something of each with sparse gradients."""
    known = {table.name for table in profile.tables}
    if plan.prediction is not None and (others := [table.name for table in plan.tables if table.name not in known]):
        raise PlanError(
            f"{told}: the plan has {some([repr(one) for one in others])} among its tables, which that has not"
        )
    planned = {table.name: (table.rows, table.width) for table in plan.tables}
    for table in profile.tables:
        size = planned.get(table.name)
        if size is None and table.is_sparse and plan.prediction is not None:
            raise PlanError(f"{told}: that has a table {table.name!r}, of which the plan says nothing")
        if size is not None and size != (table.rows, table.width):
            raise PlanError(
                f"{told}: table {table.name!r} has {table.rows} x {table.width} there, {size[0]} x {size[1]} planned"
            )


def describe(job: Job, points: Sequence[Point], stragglers: Stragglers | None = None) -> list[dict[str, Any]]:
    """The points as plain values; each scales from the one of fewest ranks with such a network.

    Args:
        job: That was simulated.
        points: Of a sweep.
        stragglers: Which ranks were slow.
    """
    base: dict[object, Point] = {}
    for point in sorted(points, key=lambda point: point.cluster.ranks):
        base.setdefault(_network(point), point)
    return [
        _described(point, base[_network(point)])
        | _memory(job, point)
        | ({SLOW: stragglers.count(point.cluster.ranks)} if stragglers else {})
        for point in points
    ]


def _memory(job: Job, point: Point) -> dict[str, Any]:
    """What a rank needs, and whether it has less; a plan that is made for a cluster fits it."""
    if job.is_replanned:
        return {"memory_bytes": None, "lacks_memory": False}
    needed_bytes, limit_bytes = job.needed_bytes(point), point.cluster.machine.memory_bytes
    return {"memory_bytes": needed_bytes, "lacks_memory": limit_bytes is not None and needed_bytes > limit_bytes}


def _network(point: Point) -> tuple[float, float]:
    """Bandwidth, and latency of one message."""
    across = point.cluster.across
    return across.bandwidth_bytes_per_s, across.pair_latency_s or across.latency_s


def _described(point: Point, base: Point) -> dict[str, Any]:
    cluster, forecast = point.cluster, point.forecast
    bandwidth_bytes_per_s, latency_s = _network(point)
    return {
        "hosts": cluster.hosts,
        "processes_per_host": cluster.processes_per_host,
        "ranks": cluster.ranks,
        "bandwidth_bytes_per_s": bandwidth_bytes_per_s,
        "latency_s": latency_s,
        "mesh": dict(forecast.step.mesh),
        "batch": point.batch,
        "step_s": forecast.step_s,
        "computing_s": forecast.device_s,
        "communicating_s": forecast.exposed_s,
        "idle_s": forecast.idle_s,
        "busy_by_kind_s": forecast.by_kind,
        "standing_by_kind_s": {kind or "idle": taken_s for kind, taken_s in forecast.standing_by_kind.items()},
        "sent_bytes": forecast.sent_bytes,
        "samples_per_s": point.samples_per_s,
        "efficiency": point.efficiency(base),
    }


def describe_tables(job: Job, point: Point) -> list[dict[str, Any]]:
    """What the gradients of the tables look like at a point, and by which law."""
    ranks = point.forecast.step.shape[1]
    batches = point.batch / job.profile.batch / ranks
    return [_described_table(table, ranks, batches) for table in job.profile.tables if table.stream or table.tokens]


def _described_table(table: TableProfile, ranks: int, batches: float) -> dict[str, Any]:
    found, law = looks(table, ranks, batches=batches), law_of(table)
    return {
        "name": table.name,
        "rows": table.rows,
        "width": table.width,
        "recorded_batches": sum(len(step) for step in table.stream),
        "ranks": ranks,
        "density": found.density,
        "overlap_ratio": found.overlap_ratio,
        "densification_ratio": found.densification_ratio,
        "union_rows": found.union_rows,
        "exponent": law.exponent,
        "bend": law.bend if law.bend < law.rows else None,
    }


def points_table(found: Mapping[str, Any]) -> Table:
    """One row a cluster.

    Args:
        found: What `tulle simulate --json` prints.
    """
    rows = found["points"]
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    told = [name for name in _TOLD if len({row.get(name) for row in rows}) > 1 or (name == SLOW and SLOW in rows[0])]
    headings = ["hosts", "ranks", *(_TOLD[name] for name in told), "step", "computes", "waits", "idle", "sent"]
    for heading in [*headings, "samples/s", "scaling"]:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            quantity.count(row["hosts"]),
            quantity.count(row["ranks"]),
            *(_shown(name, row[name]) for name in told),
            *(_milliseconds(row[name]) for name in ("step_s", "computing_s", "communicating_s", "idle_s")),
            quantity.size(row["sent_bytes"]),
            quantity.rate(row["samples_per_s"]),
            quantity.share(row["efficiency"]),
        )
    table.caption = "\n".join(_caption(found, has_networks=any(name != SLOW for name in told)))
    table.caption_justify = "left"
    return table


SLOW = "stragglers"
_TOLD = {"bandwidth_bytes_per_s": "bandwidth", "latency_s": "latency", SLOW: "slow"}
"""What has a column where it differs between clusters, or where it was asked for."""


def _caption(found: Mapping[str, Any], *, has_networks: bool) -> Iterator[str]:
    """What the numbers mean, a line each."""
    rows, is_strong = found["points"], found["scaling"] == "strong"
    batch, a_rank = rows[0]["batch"], _a_rank(rows[0])
    each = quantity.plural(int(a_rank), "sample") if a_rank == int(a_rank) else f"{quantity.ratio(a_rank)} samples"
    dealt = f"{quantity.plural(batch, 'sample')} a step" if is_strong else f"{each} a rank and step"
    yield f"{'Strong' if is_strong else 'Weak'} scaling: {dealt}. Times in ms, of one rank and step;"
    yield "waits: for communication; idle: for slower ranks or other stages."
    fewest = "the fewest ranks with such a network" if has_networks else "the fewest ranks"
    yield f"Scaling: samples a second and rank, by those of {fewest}."
    if not all(row.get(SLOW, 1) for row in rows):
        yield "No rank is slow where the share of stragglers is less than half a rank."
    if lacking := [quantity.plural(row["ranks"], "rank") for row in rows if row["lacks_memory"]]:
        yield f"Not enough memory on a rank: with {some(lacking)}."
    if found["splits_tables"]:
        yield f"Rows of split tables are told {TOLD[found['lookahead']]}."


def _shown(name: str, value: float) -> str:
    if name == SLOW:
        return quantity.count(value)
    return quantity.duration(value) if name == "latency_s" else bits(value)


def _milliseconds(value_s: float) -> str:
    return f"{value_s * 1e3:,.3g}" if value_s < 1 else f"{value_s * 1e3:,.0f}"


def _a_rank(row: Mapping[str, Any]) -> float:
    return row["batch"] / row["ranks"]


def tables_table(rows: Sequence[dict[str, Any]]) -> Table:
    """One row a table of the model."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("table", overflow="fold")
    for heading in ("rows x width", "density", "overlap", "densification", "union", "law"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            Text(row["name"]),
            f"{row['rows']:,} x {row['width']:,}",
            quantity.share(row["density"]),
            quantity.share(row["overlap_ratio"]),
            quantity.ratio(row["densification_ratio"]),
            quantity.share(row["union_rows"] / row["rows"]),
            f"i^-{row['exponent']:.2f}" if row["ranks"] > row["recorded_batches"] else quantity.MISSING,
        )
    recorded, ranks = rows[0]["recorded_batches"], rows[0]["ranks"]
    table.caption = (
        f"On {quantity.plural(ranks, 'rank')} of axis data; {quantity.plural(recorded, 'recorded batch')}, "
        "and by their law what is beyond them."
    )
    table.caption_justify = "left"
    return table
