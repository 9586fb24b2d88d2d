"""*Densifying Assumed-sparse Tensors* (Cavdar et al., ISC'19): gather against reduce on up to 1,200 processes.

The job: Transformer-big, whose table of 33,708 x 1,024 is both looked up and projected onto. TensorFlow made of its two
gradients one "sparse" one of `33,708 + source tokens + target tokens` rows, which Horovod gathers: *gather*. The paper
makes it dense and all-reduces it: *reduce*. Both are simulated as they were, beside a plan of tulle, on one cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from densifying_job import (
    FITTED,
    SINGLE_HOST_TOKENS,
    STRONG,
    STRONG_TOKENS,
    TABLE_BYTES,
    WAYS,
    WEAK,
    Fitted,
    Setting,
    plan_of,
    planned,
    reduce,
    strong,
    strong_efficiency,
    weak,
    weak_efficiency,
)
from evidence import Constant, Curve, Known, Panel, Published, Reproduction, Role, Row, explain_deviation

from tulle.cost import exchange_cost
from tulle.plan.plan import Plan
from tulle.simulate import Step

PAPER = "*Densifying Assumed-sparse Tensors*, Cavdar et al., ISC'19, arXiv 1905.04035"


def weak_curves() -> dict[str, dict[int, float]]:
    """Efficiency in per cent by way and processes."""
    return {
        name: {n: weak_efficiency(weak(n), way(weak(n))) for n in WEAK if name != "gather" or weak(n).is_held}
        for name, way in WAYS.items()
    }


def strong_curves() -> dict[str, dict[int, float]]:
    """Seconds of a step by way and processes."""
    return {name: {n: strong(n).seconds(WAYS[name](strong(n))) for n in STRONG} for name in ("reduce", "tulle")}


def month_by_hours(way: Callable[[Setting], Step]) -> float:
    """A step of 819,200 tokens on one host, in 16 steps of the most that fits, by one on 200 hosts."""
    one, many = Setting(2, 2, SINGLE_HOST_TOKENS), strong(400)
    rounds = STRONG_TOKENS / (2 * SINGLE_HOST_TOKENS)
    return rounds * one.seconds(way(one)) / many.seconds(way(many))


def reproduce() -> Reproduction:
    """All of the paper's figures."""
    weakly, strongly = weak_curves(), strong_curves()
    rows = [*_buffer_rows(), *_weak_rows(weakly), *_strong_rows(strongly)]
    heads = ["constant", "reduce, weak, 1,200", "tulle, weak, 1,200", "reduce, strong, 400", "tulle, strong, 400"]
    others = _otherwise()
    cells = [[name, *[f"{one:.1f}" for one in found]] for name, found in others.items()]
    tables = [("If what was fitted were otherwise: efficiency, %", heads, cells), _plans()]
    remarks = _remarks(rows, [*others.values()])
    return Reproduction("densifying", PAPER, CONSTANTS, rows, _panels(weakly, strongly), remarks, tables)


def _plans() -> tuple[str, Sequence[str], Sequence[Sequence[str]]]:
    cells: list[list[str]] = []
    for name, setting in (("weak", weak(WEAK[-1])), ("strong", strong(STRONG[-1]))):
        plan = plan_of(setting)
        mesh = ", ".join(f"{axis} {size}" for axis, size in plan.mesh.items())
        buckets = f"{plan.bucket_bytes / 2**20:g} MiB"
        cells.append([name, mesh, str(plan.micro_batches), buckets, plan.schedule, *_told(plan)])
    return "What the planner chose", ["scaling", "mesh", "micro-batches", "buckets", "update at the", "binding"], cells


def _told(plan: Plan) -> list[str]:
    return [plan.prediction.binding] if plan.prediction else [""]


def efficiencies(fitted: Fitted) -> tuple[float, ...]:
    """Reduce's and tulle's, weak scaling at 1,200 processes, then strong scaling at 400; per cent."""
    many, base, most = weak(WEAK[-1], fitted), strong(STRONG[0], fitted), strong(STRONG[-1], fitted)
    weakly = [weak_efficiency(many, way(many)) for way in (reduce, planned)]
    strongly = [
        strong_efficiency(most.seconds(way(most)), STRONG[-1], base.seconds(way(base))) for way in (reduce, planned)
    ]
    return *weakly, *strongly


def _otherwise() -> dict[str, tuple[float, ...]]:
    """The efficiencies that matter, with each fitted constant changed in turn."""
    others = {
        "as fitted": FITTED,
        "computation 10% faster": replace(FITTED, core_flop_per_s=1.1 * FITTED.core_flop_per_s),
        "all-reduce 20% slower": replace(FITTED, all_reduced_bytes_per_s=0.8 * FITTED.all_reduced_bytes_per_s),
        "computation beside communication not slowed": replace(FITTED, slowdown=1.0),
        "... 3 times slower": replace(FITTED, slowdown=3.0),
        "no noise": replace(FITTED, noise=0.0),
        "noise of 2%": replace(FITTED, noise=0.02),
    }
    return {name: efficiencies(fitted) for name, fitted in others.items()}


def _buffer_rows() -> list[Row]:
    timeline = weak(64)
    where = "Horovod timelines, 64 processes"

    def row(what: str, ours: float, unit: str, paper: float, role: Role) -> Row:
        return Row(what, ours, unit, Published(paper, where, Known.RECALLED), role)

    return [
        row("gather: buffer of a process", 64 * timeline.slices_bytes / 1e9, "GB", 11.4, Role.CHECKED),
        row("reduce: buffer of a process", TABLE_BYTES / 1e6, "MB", 139, Role.CHECKED),
        row("gather: the exchange", _moved_s(timeline) * 1e3, "ms", 4320, Role.FITTED),
        row("reduce: the exchange", timeline.reduced().seconds * 1e3, "ms", 169, Role.FITTED),
    ]


def _moved_s(setting: Setting) -> float:
    """Of the gather alone, without the sum that follows."""
    return exchange_cost((setting.processes - 1) * setting.slices_bytes, 0, setting.network).seconds


def _weak_rows(curves: dict[str, dict[int, float]]) -> list[Row]:
    recalled = "weak scaling, four processes a host"
    abstract = Published(91, "abstract", Known.READ)
    return [
        Row("gather: weak scaling, 16 processes", curves["gather"][16], "%", _recalled(84, recalled), Role.FITTED),
        Row("gather: weak scaling, 32 processes", curves["gather"][32], "%", _recalled(75, recalled), Role.FITTED),
        Row("reduce: weak scaling, 32 processes", curves["reduce"][32], "%", _recalled(95, recalled), Role.CHECKED),
        Row("reduce: weak scaling, 1,200 processes", curves["reduce"][1200], "%", abstract, Role.FITTED),
        Row("tulle: weak scaling, 1,200 processes", curves["tulle"][1200], "%", abstract, Role.BEYOND),
    ]


def _strong_rows(curves: dict[str, dict[int, float]]) -> list[Row]:
    abstract = Published(65, "abstract", Known.READ, is_bound=True)
    month = Published(121, "the authors' report of the same job, 1 to 200 hosts", Known.READ)
    rows: list[Row] = []
    for name, role in (("reduce", Role.CHECKED), ("tulle", Role.BEYOND)):
        of = curves[name]
        ours = strong_efficiency(of[400], 400, of[32])
        rows.append(Row(f"{name}: strong scaling, 400 processes", ours, "%", abstract, role))
        rows.append(Row(f"{name}: 200 hosts by one", month_by_hours(WAYS[name]), "x", month, role))
    return rows


def _recalled(value: float, where: str) -> Published:
    return Published(value, where, Known.RECALLED)


def _panels(weakly: dict[str, dict[int, float]], strongly: dict[str, dict[int, float]]) -> list[Panel]:
    dots = [
        Curve("paper, gather", [16, 32], [84, 75], is_published=True),
        Curve("paper, reduce", [32, 1200], [95, 91], is_published=True),
    ]
    lines = [Curve(name, [*of], [*of.values()]) for name, of in weakly.items()]
    efficiencies = [
        Curve(name, STRONG, [strong_efficiency(seconds, n, of[STRONG[0]]) for n, seconds in of.items()])
        for name, of in strongly.items()
    ]
    buffers = [
        Curve("gather", WEAK, [n * weak(n).slices_bytes / 1e9 for n in WEAK]),
        Curve("reduce", WEAK, [TABLE_BYTES / 1e9 for _ in WEAK]),
        Curve("paper, gather", [64], [11.4], is_published=True),
        Curve("paper, reduce", [64], [0.139], is_published=True),
    ]
    times = [
        Curve("gather", WEAK, [_moved_s(weak(n)) for n in WEAK]),
        Curve("reduce", WEAK, [weak(n).reduced().seconds for n in WEAK]),
        Curve("paper, gather", [64], [4.32], is_published=True),
        Curve("paper, reduce", [64], [0.169], is_published=True),
    ]
    paper_strong = Curve("paper, reduce", [400], [65], is_published=True)
    across = "processes"
    return [
        Panel("weak", "Weak scaling, 5,000 tokens a process", across, "efficiency, %", [*lines, *dots]),
        Panel(
            "strong", "Strong scaling, 819,200 tokens a step", across, "efficiency, %", [*efficiencies, paper_strong]
        ),
        Panel("memory", "The table's gradient on each process", across, "GB", buffers, True),
        Panel("time", "Exchange of the table's gradient", across, "s", times, True),
    ]


CONSTANTS = (
    Constant(
        "model",
        "6 + 6 layers, 1,024 wide, 4,096 inner, tied table of 33,708 rows",
        "Transformer-big; rows by arithmetic from 139 MB",
    ),
    Constant(
        "tokens of a process, weak scaling",
        "5,000 source and 5,000 target",
        "horovod#687, by the authors; agrees with 11.4 GB",
    ),
    Constant(
        "tokens of a step, strong scaling",
        "819,200",
        "recalled; is 32 processes of 25,600, the most that fits (the authors' report)",
    ),
    Constant("processes a host", "4 in weak, 2 in strong scaling", "abstract: 1,200 on 300 nodes, 400 on 200"),
    Constant("host", "48 cores, 192 GB, 200 GB/s of memory", "Stampede2's Skylake nodes; memory rate assumed"),
    Constant("fused gradients", "128 MiB", "HOROVOD_FUSION_THRESHOLD in horovod#554, by the authors"),
    Constant("latency", "2 us a round", "assumed, Omni-Path"),
    Constant("rate of a gather", "2.61 GB/s a process", "4,320 ms at 64 processes", True),
    Constant("rate of an all-reduce", "1.61 GB/s a process", "169 ms at 64 processes", True),
    Constant("computation", "62 Gflop/s a core", "the gather's weak scaling at 16 and 32 processes", True),
    Constant("computation beside communication", "takes 2 times longer", "the same", True),
    Constant(
        "noise", "0.5% of a step at 5,000 tokens, more for fewer by the square root", "reduce at 1,200 processes", True
    ),
    Constant("one process", "computes without noise and without communication: what efficiency is of", "assumed"),
)


def _remarks(rows: Sequence[Row], others: Sequence[tuple[float, ...]]) -> list[str]:
    by_name = {row.what: row for row in rows}
    causes = {
        "reduce: weak scaling, 32 processes": "what computation loses beside "
        "communication was fitted to gather, and may be less",
        "reduce: strong scaling, 400 processes": "at 2,048 tokens a process products are smaller and reach less of the "
        "cores' rate, which the model takes to be the same at any size",
        "reduce: 200 hosts by one": "the same, and steps on one host are taken not to wait for each other",
    }
    gathered, reduced = (by_name[f"{way}: buffer of a process"].ours for way in ("gather", "reduce"))
    largest = max(n for n in WEAK if weak(n).is_held)
    ours = by_name["tulle: weak scaling, 1,200 processes"], by_name["tulle: strong scaling, 400 processes"]
    asked = [
        f"{row.what}: {row.ours:.1f}%, {'at least' if row.ours >= row.paper.value else 'LESS than'} "
        f"the paper's {row.paper.value:g}%."
        for row in ours
        if row.paper
    ]
    ahead = [ours - theirs for theirs, ours, *_ in others]
    return [
        *asked,
        f"With each fitted constant changed in turn, tulle's plan is {min(ahead):.1f} to {max(ahead):.1f} points ahead "
        "of reduce at 1,200 processes; whether it reaches 91% depends on whether reduce does.",
        f"Reduce holds {gathered * 1e3 / reduced:.0f} times less than gather on 64 processes (paper: 82).",
        f"Gathered gradients of a host's four processes fit into its memory up to {largest} processes of those drawn.",
        *[explain_deviation(by_name[what], cause=cause, tolerance=0.05) for what, cause in causes.items()],
    ]
