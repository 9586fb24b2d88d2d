"""*Zen* (Wang et al., OSDI'25): sparse schemes against AllReduce on up to 16 machines of 8 GPUs.

How tensors densify as machines are added comes from Zipf's law by `tulle.presence`, its exponent fitted to one
published number for each model; what schemes then cost comes from Zen's own arithmetic (`elements`). What tulle would
do with the same rows is priced by its own cost functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from elements import (
    GPUS,
    HIERARCHICAL,
    MACHINES,
    Elements,
    Natural,
    all_reduce_values,
    skewness,
    zen_values,
)
from evidence import Constant, Curve, Known, Panel, Published, Reproduction, Role, Row, explain_deviation

from tulle.presence import presence_like

PAPER = "*Zen: Empowering Distributed Training with Sparsity-driven Data Synchronization*, Wang et al., OSDI'25"
MEASURED, STUDY = "evaluation, communication", "NMT case study"
SLOW, FAST = 25e9 / 8, 100e9 / 8
SKEWED_PARTS = 128
LSTM = Natural("LSTM", 20e6, 406e6, 0.0113, 512, exponent=1.754)
DEEPFM = Natural("DeepFM", 68e6, 214e6, 0.028, 256, exponent=1.737)
NMT = Natural("NMT", 31e6, 112e6, 0.0247, 1024, exponent=1.131)
NATURAL = (LSTM, DEEPFM, NMT)
TOP_K = {"Llama3.2-3B": (2.02, 1.64), "OPT-2.7B": (2.10, 1.45), "Gemma2-2B": (2.04, 1.44)}
"""Language models whose gradients are cut to the largest 5%: throughput by that of AllReduce, at 25 and 100 Gbit/s."""
TOP_K_DENSITY, TOP_K_EXPONENT, TOP_K_VALUES = 0.05, 0.758, 2**18
NMT_GPUS = (8, 16, 32, 64, 128)


def top_k() -> Elements:
    """A gradient of which each of 16 machines sends the largest 5%; speed-ups do not depend on its size."""
    held = (round(TOP_K_DENSITY * TOP_K_VALUES),) * MACHINES
    growth = presence_like(TOP_K_VALUES, held, TOP_K_EXPONENT).growth()
    return Elements(1.0, [values / TOP_K_VALUES for values in growth], 1.0)


def one_gpu_a_machine(model: Natural, gpus: int) -> Elements:
    """The paper's case study of NMT: each GPU communicates with all others."""
    return Elements(model.embedding, model.densities[:gpus], skewness(model, gpus, 1))


def computed_s(reduced_s: float, ours_s: float, speedup: float) -> float:
    """What a step computes, if communication is not hidden and a speed-up of throughput was measured."""
    return (reduced_s - speedup * ours_s) / (speedup - 1.0)


def implied(slow: float, fast: float) -> float:
    """The speed-up of communication with which a step's speed-ups at 25 and at 100 Gbit/s agree, in this model."""
    share = SLOW / FAST
    left = ((fast - 1) - share * (slow - 1)) / (slow * (fast - 1) - share * fast * (slow - 1))
    return 1.0 / left


def crossing(model: Natural, values: Callable[[Elements], float], target: float = 1.0) -> float:
    """The number of GPUs from which a scheme takes the target's share of AllReduce or more; infinite if none."""
    for gpus in range(2, MACHINES * GPUS + 1):
        tables = one_gpu_a_machine(model, gpus)
        if values(tables) >= target * tables.all_reduce:
            return float(gpus)
    return float("inf")


def natural_rows() -> list[Row]:
    """Of models that are sparse of themselves."""
    study = one_gpu_a_machine(NMT, MACHINES * GPUS)
    sparcml = [model.seconds(lambda one: one.hierarchical, SLOW) / model.seconds(zen_values, SLOW) for model in NATURAL]
    blocks = [model.seconds(lambda one: one.blocks, SLOW) / model.seconds(zen_values, SLOW) for model in NATURAL]
    return [
        _row(
            "LSTM: skewness over 128 parts",
            skewness(LSTM, SKEWED_PARTS, 1),
            "x",
            70,
            "section 2.3, a lower bound",
            Role.FITTED,
        ),
        _row("LSTM: communication, Zen by AllReduce, 25 Gbit/s", speedup(LSTM), "x", 6.77, MEASURED, Role.CHECKED),
        _row("DeepFM: communication, Zen by AllReduce, 25 Gbit/s", speedup(DEEPFM), "x", 2.10, MEASURED, Role.FITTED),
        Row(
            "DeepFM: densification within a machine",
            DEEPFM.densities[GPUS - 1] / DEEPFM.density,
            "x",
            Published(0.052 / 0.028, "table of models, and density after a machine's sum", Known.DERIVED),
            Role.CHECKED,
        ),
        _row(
            "NMT: Balanced Parallelism below AllReduce, 128 GPUs",
            100 * (1 - study.balanced / study.all_reduce),
            "%",
            36,
            STUDY,
            Role.FITTED,
        ),
        _row(
            "NMT: AGsparse loses from",
            crossing(NMT, lambda one: one.allgather),
            "GPUs",
            40,
            STUDY,
            Role.CHECKED,
        ),
        _row("most of SparCML by Zen, communication", max(sparcml), "x", 2.82, MEASURED, Role.CHECKED),
        _row("most of OmniReduce by Zen, communication", max(blocks), "x", 5.16, MEASURED, Role.CHECKED),
    ]


def speedup(model: Natural, bytes_per_s: float = SLOW, machines: int = MACHINES) -> float:
    """Communication: AllReduce by Zen."""
    return model.seconds(all_reduce_values, bytes_per_s, machines) / model.seconds(zen_values, bytes_per_s, machines)


def throughput_rows() -> list[Row]:
    """Whole steps: computation is fitted to one number, the others follow."""
    reduced_s, ours_s = (LSTM.seconds(values, SLOW) for values in (all_reduce_values, zen_values))
    other_s = computed_s(reduced_s, ours_s, 3.1)

    def by(values: Callable[[Elements], float], rate: float) -> float:
        return (other_s + LSTM.seconds(values, rate)) / (other_s + LSTM.seconds(zen_values, rate))

    where = "evaluation, throughput"
    rows = [
        _row(
            "LSTM: throughput, Zen by AllReduce, 25 Gbit/s", by(all_reduce_values, SLOW), "x", 3.1, where, Role.FITTED
        ),
        _row("LSTM: ... by SparCML, 25 Gbit/s", by(lambda one: one.hierarchical, SLOW), "x", 1.67, where, Role.CHECKED),
        _row(
            "LSTM: ... by SparCML, 100 Gbit/s", by(lambda one: one.hierarchical, FAST), "x", 1.44, where, Role.CHECKED
        ),
        _row("LSTM: ... by OmniReduce, 25 Gbit/s", by(lambda one: one.blocks, SLOW), "x", 2.48, where, Role.CHECKED),
    ]
    cut = top_k()
    role = {"Gemma2-2B": Role.FITTED}
    for name, published in (("Gemma2-2B", 3.51), ("OPT-2.7B", 3.44)):
        what = f"{name}: communication, Zen by AllReduce, 25 Gbit/s"
        rows.append(_row(what, cut.all_reduce / cut.zen, "x", published, MEASURED, role.get(name, Role.CHECKED)))
    for name, (slow, fast) in TOP_K.items():
        rest = computed_s(cut.all_reduce, cut.zen, slow)
        share = SLOW / FAST
        ours = (rest + share * cut.all_reduce) / (rest + share * cut.zen)
        rows.append(_row(f"{name}: throughput, Zen by AllReduce, 100 Gbit/s", ours, "x", fast, where, Role.CHECKED))
    return rows


def tulle_rows() -> tuple[list[Row], list[list[str]]]:
    """What tulle's cost functions say of the same rows, and what the planner would take."""
    rows: list[Row] = []
    cells: list[list[str]] = []
    for model, published in ((LSTM, 6.77), (DEEPFM, 2.10), (NMT, None)):
        for name, rate in (("25", SLOW), ("100", FAST)):
            reduced_s = model.seconds(all_reduce_values, rate)
            ways = {"Zen": model.seconds(zen_values, rate)} | model.tulle_s(rate)
            best = min((way for way in ways if way != "Zen"), key=ways.__getitem__)
            told = [f"{reduced_s / seconds:.2f}" for seconds in ways.values()]
            cells.append([model.name, f"{name} Gbit/s", f"{reduced_s * 1e3:,.0f}", *told, best])
            if rate == SLOW:
                paper = Published(published, MEASURED, Known.READ) if published else None
                what = f"{model.name}: communication, tulle's {best} by AllReduce, 25 Gbit/s"
                rows.append(Row(what, reduced_s / ways[best], "x", paper, Role.BEYOND))
    return rows, cells


def panels() -> list[Panel]:
    """Schemes of the case study, and speed-ups by machines."""
    ways: dict[str, Callable[[Elements], float]] = {
        "AGsparse": lambda one: one.allgather,
        "SparCML": lambda one: one.hierarchical,
        "OmniReduce": lambda one: one.blocks,
        "Balanced Parallelism": lambda one: one.balanced,
        "Zen, with hash bitmap": zen_values,
    }
    studies = {gpus: one_gpu_a_machine(NMT, gpus) for gpus in NMT_GPUS}
    lines = [
        Curve(name, NMT_GPUS, [values(one) / one.all_reduce for one in studies.values()])
        for name, values in ways.items()
    ]
    dots = [
        Curve("paper: AGsparse even", [40], [1.0], is_published=True),
        Curve("paper: Balanced Parallelism", [128], [0.64], is_published=True),
    ]
    counts = (2, 4, 8, 16)
    speedups = [Curve(m.name, counts, [speedup(m, SLOW, machines) for machines in counts]) for m in NATURAL]
    measured = [
        Curve("paper: LSTM", [16], [6.77], is_published=True),
        Curve("paper: DeepFM", [16], [2.10], is_published=True),
    ]
    return [
        Panel("nmt", "NMT: communication by that of AllReduce", "GPUs", "times AllReduce", [*lines, *dots], True),
        Panel("machines", "Communication, Zen by AllReduce, 25 Gbit/s", "machines of 8", "x", [*speedups, *measured]),
    ]


def reproduce() -> Reproduction:
    """All of Zen's figures."""
    ours, cells = tulle_rows()
    rows = [*natural_rows(), *throughput_rows(), *ours]
    heads = ["model", "link", "AllReduce, ms", "Zen", "allgather", HIERARCHICAL, "rows", "best of tulle's"]
    return Reproduction(
        "zen",
        PAPER,
        CONSTANTS,
        rows,
        panels(),
        _remarks(rows),
        [("Communication by that of AllReduce, times faster", heads, cells)],
    )


CONSTANTS = (
    Constant(
        "values outside tables and in them", "LSTM 20 + 406 M, DeepFM 68 + 214 M, NMT 31 + 112 M", "table of models"
    ),
    Constant("density on one GPU", "LSTM 1.13%, DeepFM 2.80%, NMT 2.47%", "table of models"),
    Constant("testbeds", "16 machines of 8 V100; 25 and 100 Gbit/s", "testbed"),
    Constant("width of a row", "512, 256, 1024", "assumed; Zen counts elements, to which it is nothing"),
    Constant(
        "Zipf exponent, LSTM",
        f"{LSTM.exponent}",
        "skewness 70 over 128 parts, which the paper gives as a lower bound",
        True,
    ),
    Constant("Zipf exponent, DeepFM", f"{DEEPFM.exponent}", "speed-up of communication 2.10", True),
    Constant("Zipf exponent, NMT", f"{NMT.exponent}", "Balanced Parallelism 36% below AllReduce at 128 GPUs", True),
    Constant("exponent of a top-5% gradient", f"{TOP_K_EXPONENT}", "Gemma2-2B's speed-up of communication 3.51", True),
    Constant("hashing", "6 ms for 11.1 M values", "section 3.2, of DeepFM"),
    Constant(
        "computation of a step", "by model", "throughput by AllReduce at 25 Gbit/s; nothing is hidden behind it", True
    ),
    Constant("link", "its nominal rate for all schemes", "assumed; its efficiency cancels in ratios"),
    Constant("tulle's network", "20 us a round; GPUs of a machine share its link; NVLink 100 GB/s", "assumed"),
)


def _row(what: str, ours: float, unit: str, paper: float, where: str, role: Role) -> Row:
    return Row(what, ours, unit, Published(paper, where, Known.READ), role)


def _remarks(rows: Sequence[Row]) -> list[str]:
    """Of what was checked, how far it holds."""
    checked = [row for row in rows if row.role is Role.CHECKED]
    near = [row for row in checked if abs(row.deviation) <= 0.15]
    causes = {
        "LSTM: communication, Zen by AllReduce, 25 Gbit/s": "the paper says that skewness is above 70: "
        "the law that gives just 70 was taken",
        "DeepFM: densification within a machine": "DeepFM has 26 tables, small ones that all ranks touch and "
        "large ones that hardly two share: one Zipf law cannot densify little within a machine and much between "
        "machines",
        "most of SparCML by Zen, communication": "SparCML is priced by equation 2 without its own latency and work",
        "most of OmniReduce by Zen, communication": "OmniReduce is priced by its bytes alone; its aggregators, "
        "which look ahead, are not modelled",
        "LSTM: ... by SparCML, 25 Gbit/s": "SparCML is priced by equation 2 without its own latency and work",
        "LSTM: ... by SparCML, 100 Gbit/s": "SparCML is priced by equation 2 without its own latency and work",
        "LSTM: ... by OmniReduce, 25 Gbit/s": "OmniReduce is priced by its bytes alone",
    }
    agreeing = {name: implied(*published) for name, published in TOP_K.items()}
    causes["Llama3.2-3B: throughput, Zen by AllReduce, 100 Gbit/s"] = (
        "its two speed-ups agree with one of communication of "
        f"{agreeing['Llama3.2-3B']:.1f}, where those of OPT-2.7B and Gemma2-2B agree with {agreeing['OPT-2.7B']:.1f} "
        f"and {agreeing['Gemma2-2B']:.1f}, as if it had been measured under other conditions"
    )
    other = "not known"
    beyond = [row for row in rows if row.role is Role.BEYOND]
    return [
        f"Of {len(checked)} numbers that nothing was fitted to, {len(near)} come out within 15%.",
        *[
            explain_deviation(row, cause=causes.get(row.what, other), tolerance=0.15)
            for row in checked
            if row not in near
        ],
        *[
            f"{row.what}: {row.ours:.2f} x" + (f", the paper's Zen {row.paper.value} x." if row.paper else ".")
            for row in beyond
        ],
    ]
