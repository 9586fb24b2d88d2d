"""The plan's explanation: what was chosen, what else would have cost, why, and what of it came true, part by part."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import tulle.report.quantity as quantity
from tulle.plan import Plan, Prediction, are_apart
from tulle.report.marks import Bar, Key, Segment
from tulle.report.records import Run
from tulle.report.series import FloatArray, mean_over_ranks, median, over_ranks, parts_of_step, warmed_up

PART_COLOURS = {"forward": "sky", "backward": "blue", "waiting": "orange", "optimizer": "teal", "other": "grey"}
PART_LABELS = {"backward": "backward, without waiting", "waiting": "waiting for communication"}
STAGE_COLOURS = ("blue", "plum")
"""Of neighbours, in turn."""
NARROW = 0.04
"""Of the longest stage: a piece that is narrower has no name in it."""


@dataclass(frozen=True, slots=True)
class Compared:
    """A part of a step, seconds; None where it was not predicted."""

    part: str
    predicted_s: float | None
    measured_s: float

    @property
    def ratio(self) -> float | None:
        """How many times as long as predicted it took; None where nothing was predicted, or nothing measured."""
        if not self.predicted_s or math.isnan(self.measured_s):
            return None
        return self.measured_s / self.predicted_s


def compared(prediction: Prediction, run: Run) -> list[Compared]:
    """The parts of a step, predicted and measured: medians over the steps of means over the ranks.

    Args:
        prediction: Of the plan.
        run: Of a training under it.
    """
    measured = {name: _typical(matrix) for name, matrix in parts_of_step(run).items()}
    found = [Compared(name, prediction.parts_s.get(name), seconds) for name, seconds in measured.items()]
    return [*found, Compared("step", prediction.step_s, _typical(over_ranks(run, lambda log: log.step_s)))]


def _typical(matrix: FloatArray) -> float:
    return median(mean_over_ranks(warmed_up(matrix)))


@dataclass(frozen=True, slots=True)
class Row:
    """A part of a step in words."""

    part: str
    predicted: str
    measured: str
    ratio: str


@dataclass(frozen=True, slots=True)
class Explained:
    """The explanation of a plan as the page shows it.

    Args:
        lead: What was predicted, and how sure that is.
        decided: What was chosen, a sentence each.
        runner_up: What the second best plan does otherwise.
        binding: What keeps the step from being faster.
        changes: What would change the choice.
        bars: Of the chosen plan, the runner-up, and what was measured.
        legend: Of the bars.
        rows: Predicted beside measured.
        stages: Of the pipeline, a bar each; none without one.
        stages_caption: What their lengths mean.
    """

    lead: str
    decided: tuple[str, ...]
    runner_up: tuple[str, ...]
    binding: str
    changes: tuple[str, ...]
    bars: tuple[Bar, ...]
    legend: tuple[Key, ...]
    rows: tuple[Row, ...]
    stages: tuple[Bar, ...]
    stages_caption: str


def planned(run: Run) -> Explained | None:
    """Return the explanation of the run's plan, or None if nothing was predicted."""
    plan = run.plan.whole if run.plan else None
    if plan is None or plan.prediction is None:
        return None
    prediction = plan.prediction
    found = compared(prediction, run)
    other = _other_batch(plan, prediction, run)
    stages, caption = _stages(plan, run.pieces)
    sure = (
        "no plan is faster"
        if prediction.is_exact
        else f"no plan takes less than {quantity.duration(prediction.bound_s)}"
    )
    return Explained(
        lead=f"A step of {quantity.plural(prediction.batch, 'sample')} was predicted to take "
        f"{quantity.duration(prediction.step_s)} on {quantity.plural(prediction.ranks, 'rank')}, and {sure}."
        + (f" Those that ran were of {quantity.plural(other, 'sample')}: compare with care." if other else ""),
        decided=_decided(plan),
        runner_up=prediction.runner_up,
        binding=prediction.binding,
        changes=prediction.changes,
        bars=_bars(prediction, found, other),
        legend=tuple(Key(colour, PART_LABELS.get(name, name)) for name, colour in PART_COLOURS.items()),
        rows=tuple(_row(one) for one in found),
        stages=stages,
        stages_caption=caption,
    )


def _decided(plan: Plan) -> tuple[str, ...]:
    """All but tables, which have a section of their own, and stages, which are drawn."""
    bare = replace(plan, tables=(), offers=(), prediction=None, memory=replace(plan.memory, recompute=()))
    lines = [line for line in bare.explain().splitlines() if not line.startswith("stages (")]
    if plan.micro_batches > 1:
        lines.append(f"{plan.micro_batches} micro-batches, taken by {plan.pipeline_schedule}")
    if plan.memory.recompute:
        lines.append(f"{quantity.plural(len(plan.memory.recompute), 'module')} recomputed in backward")
    return tuple(lines)


def _other_batch(plan: Plan, prediction: Prediction, run: Run) -> int:
    """Samples of a step as it ran, of all replicas, if that is another size than was predicted; else 0."""
    replicas = plan.mesh.get("data", 1)
    called = _typical(over_ranks(run, lambda log: log.samples)) * replicas
    return round(called) if are_apart(called, prediction.batch) else 0


def _bars(prediction: Prediction, found: list[Compared], other_batch: int) -> tuple[Bar, ...]:
    measured = {one.part: one.measured_s for one in found}
    step_s = measured.pop("step")
    longest_s = max(prediction.step_s, prediction.runner_up_s or 0.0, step_s if step_s > 0 else 0.0)
    bars = [
        Bar("this plan", "predicted", quantity.duration(prediction.step_s), _segments(prediction.parts_s, longest_s))
    ]
    if prediction.runner_up_s is not None:
        slower = f"predicted, {prediction.runner_up_s / prediction.step_s - 1:+.1%}"
        whole = Segment(
            "muted", f"runner-up: {quantity.duration(prediction.runner_up_s)}", 100 * prediction.runner_up_s / longest_s
        )
        bars.append(Bar("runner-up", slower, quantity.duration(prediction.runner_up_s), (whole,)))
    if step_s > 0:
        off = f"{step_s / prediction.step_s - 1:+.0%} against what was predicted"
        compared_to = f"of {quantity.plural(other_batch, 'sample')}" if other_batch else off
        bars.append(
            Bar("measured", f"median, {compared_to}", quantity.duration(step_s), _segments(measured, longest_s))
        )
    return tuple(bars)


def _segments(parts_s: Mapping[str, float], longest_s: float) -> tuple[Segment, ...]:
    taken = [(name, parts_s[name]) for name in PART_COLOURS if parts_s.get(name, 0.0) > 0]
    return tuple(
        Segment(
            PART_COLOURS[name], f"{PART_LABELS.get(name, name)}: {quantity.duration(part_s)}", 100 * part_s / longest_s
        )
        for name, part_s in taken
    )


def _row(one: Compared) -> Row:
    return Row(
        PART_LABELS.get(one.part, one.part),
        quantity.MISSING if one.predicted_s is None else quantity.duration(one.predicted_s),
        quantity.duration(one.measured_s),
        quantity.MISSING if one.ratio is None else quantity.ratio(one.ratio),
    )


def _stages(plan: Plan, pieces: Mapping[str, float]) -> tuple[tuple[Bar, ...], str]:
    """A bar for each stage with a segment for each module, as wide as it takes long, if that is known."""
    by_stage: dict[int, list[str]] = {}
    for name, stage in plan.stages.items():
        by_stage.setdefault(stage, []).append(name)
    seconds = {name: _within(name, pieces) for name in plan.stages}
    is_timed = bool(pieces) and all(one is not None for one in seconds.values())
    widths = {name: (one or 0.0) if is_timed else 1.0 for name, one in seconds.items()}
    longest = max((sum(widths[name] for name in names) for names in by_stage.values()), default=0.0) or 1.0
    bars = []
    for stage, names in sorted(by_stage.items()):
        segments = [
            Segment(
                STAGE_COLOURS[n % len(STAGE_COLOURS)],
                (name or "the model") + (f": {quantity.duration(widths[name])}" if is_timed else ""),
                100 * widths[name] / longest,
                name if widths[name] > NARROW * longest else "",
            )
            for n, name in enumerate(names)
        ]
        ends = names if len(names) < 3 else (names[0], "…", names[-1])
        told = ", ".join(name or "the model" for name in ends)
        memory = plan.prediction.memory_bytes if plan.prediction else ()
        value = (
            quantity.duration(sum(widths[name] for name in names))
            if is_timed
            else quantity.plural(len(names), "module")
        )
        if stage < len(memory):
            value += f", {quantity.size(memory[stage])}"
        bars.append(Bar(f"stage {stage}", told, value, tuple(segments)))
    length = "as wide as its forward and backward of the profiled batch take" if is_timed else "all of one width"
    return tuple(bars), f"A piece is a module, {length}; memory is what a rank was predicted to need."


def _within(name: str, pieces: Mapping[str, float]) -> float | None:
    """Seconds of a module that is a piece, or is made of pieces."""
    found = [taken_s for piece, taken_s in pieces.items() if not name or piece == name or piece.startswith(f"{name}.")]
    return sum(found) if found else None
