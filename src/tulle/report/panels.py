"""The charts of the page, each with its legend and what it says in words."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from markupsafe import Markup

import tulle.report.quantity as quantity
from tulle.report.chart import SERIES, Chart, Curve, Frame, Layer, draw_curves, draw_stack
from tulle.report.marks import Key
from tulle.report.predicted import PART_COLOURS, PART_LABELS
from tulle.report.records import FloatArray, IntArray, Run
from tulle.report.series import (
    Thinned,
    mean_over_ranks,
    median,
    over_ranks,
    parts_of_step,
    relative_difference,
    smooth,
    steps_of,
    thin,
    tokens_per_s,
    traffic_keys,
    traffic_of,
    warmed_up,
)

VALIDATION_NAMES = ("valid_loss", "validation_loss", "val_loss")
SMOOTH_FROM = 90
COLOURED_TABLES = len(SERIES) - 1


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart of the page. Without data there is no chart, and `missing` says how to record it."""

    title: str
    chart: Chart | None = None
    legend: tuple[Key, ...] = ()
    caption: str = ""
    missing: Markup | None = None


def loss_panel(run: Run, baseline: Run | None) -> Panel:
    """Draw the loss over the steps, mean over the ranks; the baseline's lies broad and pale under it."""
    steps, loss = steps_of(run), _loss(run)
    if not np.isfinite(loss).any():
        diverged = np.isinf(loss).any()
        text = "Every recorded loss was infinite or not a number." if diverged else _MISSING_LOSS
        return Panel("Loss", missing=Markup(text))
    curves: list[Curve] = []
    legend: list[Key] = []
    if baseline is not None:
        curves.append(Curve(thin(steps_of(baseline), _loss(baseline)), "orange", "wide"))
        legend.append(Key("orange", f"baseline: {quantity.plural(baseline.processes, 'process')}", "wide"))
        curves.append(Curve(_without_range(thin(steps, loss)), "blue"))
    else:
        curves += _trend(thin(steps, loss), "blue")
    legend.append(Key("blue", f"this run: {quantity.plural(run.processes, 'process')}", "line"))
    for name in VALIDATION_NAMES:
        values = mean_over_ranks(over_ranks(run, lambda log, name=name: log.values.get(name)))
        if np.isfinite(values).any():
            curves.append(Curve(thin(steps, values, points=60), "plum", "points"))
            legend.append(Key("plum", name, "points"))
    frame = Frame("loss", "Loss over the steps, mean over the ranks", "loss", from_zero=False)
    return Panel("Loss", draw_curves(frame, curves), tuple(legend), _loss_caption(run, baseline))


_MISSING_LOSS = "No loss was recorded. Call <code>tulle.log(loss=loss)</code> after each step to see its curve."


def _loss(run: Run) -> FloatArray:
    return mean_over_ranks(over_ranks(run, lambda log: log.loss))


def _loss_caption(run: Run, baseline: Run | None) -> str:
    steps, loss = steps_of(run), _loss(run)
    words = []
    if baseline is not None:
        words.append(_difference_in_words(*relative_difference((steps, steps_of(baseline)), (loss, _loss(baseline)))))
    elif len(run.ranks) > 1:
        words.append(f"Mean over {quantity.plural(len(run.ranks), 'rank')}.")
    if baseline is None:
        words.append(_trend_in_words(thin(steps, loss)))
    infinite = steps[np.isinf(loss)]
    if len(infinite):
        where = quantity.plural(len(infinite), "step")
        words.append(f"It was not finite in {where}, first in step {infinite[0]:,}: the curve has gaps there.")
    return " ".join(word for word in words if word)


def _difference_in_words(common: IntArray, difference: FloatArray) -> str:
    if len(common) == 0:
        return "The two runs have no step with a loss in common."
    over = f"Over {quantity.plural(len(common), 'common step')}"
    if not difference.any():
        return f"{over} the two curves are identical."
    worst = int(difference.argmax())
    return (
        f"{over} the two curves differ by {quantity.share(float(difference.mean()))} on average "
        f"and by at most {quantity.share(float(difference[worst]))} (step {common[worst]:,})."
    )


def throughput_panel(run: Run, baseline: Run | None) -> Panel:
    """Draw tokens per second of all ranks together, or steps per second if no tokens were logged."""
    title, steps = "Throughput", steps_of(run)
    if len(steps) == 0:
        return Panel(title, missing=Markup("No step was recorded."))
    series, unit, missing = tokens_per_s(run), "tokens/s, all ranks together", None
    logged_tokens = bool(np.isfinite(series).any())
    if not logged_tokens:
        series, unit = _steps_per_s(run), "steps/s"
        missing = Markup(
            "No tokens were recorded. Call <code>tulle.log(tokens=…)</code> after each step, with the number "
            "of tokens that this rank processed, to see tokens per second."
        )
    if not np.isfinite(series).any():
        return Panel(title, missing=Markup("No time was recorded for any step."))
    thinned = thin(steps, series)
    curves, legend = _trend(thinned, "blue"), ()
    words = [f"Median {quantity.rate(median(warmed_up(series)))} {unit.partition(',')[0]}."]
    if baseline is not None:
        before = tokens_per_s(baseline) if logged_tokens else _steps_per_s(baseline)
        if np.isfinite(before).any():
            curves.insert(0, Curve(_smoothed(thin(steps_of(baseline), before)), "orange", "wide"))
            legend = (
                Key("orange", f"baseline: {quantity.plural(baseline.processes, 'process')}", "wide"),
                Key("blue", f"this run: {quantity.plural(run.processes, 'process')}", "line"),
            )
            factor = median(warmed_up(series)) / median(warmed_up(before))
            words.append(f"That is {factor:.2f} times the baseline's.")
    words.append(_trend_in_words(thinned))
    chart = draw_curves(Frame("throughput", "Throughput over the steps", unit), curves)
    return Panel(title, chart, legend, " ".join(word for word in words if word), missing)


def _steps_per_s(run: Run) -> FloatArray:
    step_s = mean_over_ranks(over_ranks(run, lambda log: log.step_s))
    return np.divide(1.0, step_s, out=np.full(len(step_s), math.nan), where=step_s > 0)


def time_panel(run: Run) -> Panel:
    """Draw the parts of each step, stacked, mean over the ranks."""
    title, steps = "Where each step's time went", steps_of(run)
    parts = {name: mean_over_ranks(part) for name, part in parts_of_step(run).items()}
    whole = sum(parts.values(), np.zeros(len(steps)))
    recorded = np.isfinite(whole) & (whole > 0)
    if not recorded.any():
        return Panel(title, missing=Markup("No step was recorded."))
    steps, whole = steps[recorded], whole[recorded]
    thinned = {name: thin(steps, part[recorded]) for name, part in parts.items()}
    top_s, beyond = _top(thin(steps, whole).mean)
    unit = quantity.unit_for(top_s, quantity.SECOND_UNITS)
    layers = [Layer(part.mean * unit.factor, PART_COLOURS[name]) for name, part in thinned.items()]
    frame = Frame("time", "Time of each step by part", f"{unit.name} a step", top=top_s * unit.factor)
    legend = tuple(Key(PART_COLOURS[name], PART_LABELS.get(name, name)) for name in parts)
    means = {name: float(warmed_up(part[recorded]).mean()) for name, part in parts.items()}
    mean_s = sum(means.values())
    words = [
        f"Of a mean step of {quantity.duration(mean_s)}, {quantity.duration(means['waiting'])} "
        f"({quantity.share(means['waiting'] / mean_s)}) went into waiting for communication."
    ]
    if beyond:
        slowest = int(whole.argmax())
        words.append(
            f"Step {steps[slowest]:,} took {quantity.duration(float(whole[slowest]))} and reaches beyond the chart."
        )
    chart = draw_stack(frame, thinned["forward"].edges, layers)
    return Panel(title, chart, legend, " ".join(words))


def bytes_panel(run: Run) -> Panel:
    """Draw the bytes that a rank sends in each step, stacked by table and scheme."""
    title, steps = "Bytes sent over the steps", steps_of(run)
    series = {key: traffic_of(run, key) for key in traffic_keys(run)}
    if not any(sent.any() for sent in series.values()):
        return Panel(title, missing=missing_traffic(run))
    total = sum(series.values(), np.zeros(len(steps)))
    top_bytes, beyond = _top(thin(steps, total).mean)
    unit = quantity.unit_for(top_bytes, quantity.BYTE_UNITS)
    colours = traffic_colours(run)
    heights: dict[str, FloatArray] = {}
    for key, sent in series.items():
        colour = colours[key]
        heights[colour] = heights.get(colour, 0.0) + thin(steps, sent).mean * unit.factor
    layers = [Layer(height, colour) for colour, height in heights.items()]
    frame = Frame(
        "bytes", "Bytes that a rank sends in each step", f"{unit.name} a step and rank", top=top_bytes * unit.factor
    )
    caption = "Mean over the ranks; the colours are those of the bars by table."
    if beyond:
        largest = int(total.argmax())
        caption += f" Step {steps[largest]:,} sent {quantity.size(float(total[largest]))} and reaches beyond the chart."
    return Panel(title, draw_stack(frame, thin(steps, total).edges, layers), (), caption)


def traffic_colours(run: Run) -> dict[tuple[str, str], str]:
    """Give each (table, scheme) a colour, the one with the most bytes first; the small ones share grey."""
    colours = [colour for colour in SERIES if colour != "grey"]
    return {key: colours[place] if place < COLOURED_TABLES else "grey" for place, key in enumerate(traffic_keys(run))}


def missing_traffic(run: Run) -> Markup:
    """Say why there is no traffic to show."""
    if run.processes <= 1:
        return Markup("One process sends nothing. Start more with <code>tulle run --processes 4</code>.")
    return Markup(
        "No traffic was recorded. Give the model and its optimizer to <code>tulle.distribute</code>: "
        "it counts what it sends."
    )


def _trend(thinned: Thinned, colour: str) -> list[Curve]:
    """A noisy series is drawn faint with its running mean on top; in a long one the range takes its place."""
    if len(thinned.steps) < SMOOTH_FROM:
        return [Curve(thinned, colour)]
    if thinned.is_binned:
        return [Curve(_smoothed(thinned), colour)]
    return [Curve(thinned, colour, "faint"), Curve(_without_range(_smoothed(thinned)), colour)]


def _trend_in_words(thinned: Thinned) -> str:
    if len(thinned.steps) < SMOOTH_FROM:
        return ""
    return f"Bold: running mean; faint: {'the range of the steps' if thinned.is_binned else 'each step'}."


def _smoothed(thinned: Thinned) -> Thinned:
    window = max(len(thinned.steps) // 30, 1) | 1
    return replace(thinned, mean=smooth(thinned.mean, window))


def _without_range(thinned: Thinned) -> Thinned:
    return replace(thinned, low=thinned.mean, high=thinned.mean)


def _top(heights: Sequence[float] | FloatArray) -> tuple[float, bool]:
    """Return the top of a stacked chart, and whether a few heights (a slow first step) reach beyond it."""
    highest, usual = float(np.max(heights)), float(np.percentile(heights, 97, method="lower"))
    if highest > 1.6 * usual > 0:
        return 1.25 * usual, True
    return 1.05 * highest, False
