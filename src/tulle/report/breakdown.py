"""What the page shows as bars and tables: time by rank, bytes by table, texts, values."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

import tulle.report.quantity as quantity
from tulle.report.marks import Bar, Segment
from tulle.report.panels import traffic_colours
from tulle.report.predicted import PART_COLOURS, PART_LABELS
from tulle.report.records import Run, Text
from tulle.report.series import (
    mean_over_ranks,
    mean_parts_of_rank,
    over_ranks,
    parts_of_step,
    steps_of,
    traffic_keys,
    traffic_of,
    warmed_up,
)

RANKS_SHOWN = 12
EARLIER_TEXTS = 4
TEXT_ROWS = 40
TEXT_CHARACTERS = 20_000
OTHER = "other"
"""As records call the scheme of what goes by none."""
SMALL = 1e-3
"""Of the most bytes: what sends less shares one bar."""


def rank_bars(run: Run) -> tuple[Bar, ...]:
    """Return each rank's mean step; of many ranks, those that wait least and those that wait most."""
    parts = parts_of_step(run)
    means = {log.rank: mean_parts_of_rank(parts, row) for row, log in enumerate(run.ranks) if len(log.steps)}
    if len(means) > RANKS_SHOWN:
        by_waiting = sorted(means, key=lambda rank: means[rank]["waiting"])
        kept = by_waiting[: RANKS_SHOWN // 2] + by_waiting[-RANKS_SHOWN // 2 :]
        means = {rank: means[rank] for rank in kept}
    longest_s = max((sum(mean.values()) for mean in means.values()), default=0.0)
    return tuple(_rank_bar(rank, mean, longest_s) for rank, mean in means.items() if longest_s > 0)


def _rank_bar(rank: int, mean: Mapping[str, float], longest_s: float) -> Bar:
    segments = tuple(
        Segment(
            PART_COLOURS[name],
            f"{PART_LABELS.get(name, name)}: {quantity.duration(part_s)}",
            100 * part_s / longest_s,
        )
        for name, part_s in mean.items()
    )
    waiting = f"waits {quantity.duration(mean['waiting'])}"
    return Bar(f"rank {rank}", waiting, quantity.duration(sum(mean.values())), segments)


def traffic_bars(run: Run) -> tuple[Bar, ...]:
    """Return the mean bytes that a rank sends in a step for each (table, scheme), the most first.

    What was sent in the first steps only, as the initial parameters are, is in `traffic_at_the_start`.
    """
    colours = traffic_colours(run)
    sent = {key: float(warmed_up(traffic_of(run, key)).mean()) for key in traffic_keys(run)}
    most_bytes = max(sent.values(), default=0.0)
    small = {key: bytes_sent for key, bytes_sent in sent.items() if 0 < bytes_sent < SMALL * most_bytes}
    if len(small) == 1:
        small.clear()  # one bar for one is no gain
    bars = [
        _traffic_bar(
            name,
            _how_it_was_sent(run, name, scheme),
            bytes_sent,
            colour=colours[name, scheme],
            percent=100 * bytes_sent / most_bytes,
        )
        for (name, scheme), bytes_sent in sent.items()
        if bytes_sent > 0 and (name, scheme) not in small
    ]
    if small:
        names = ", ".join(dict.fromkeys(name for name, _ in small))
        together = sum(small.values())
        bars.append(_traffic_bar("others", names, together, colour="grey", percent=100 * together / most_bytes))
    return tuple(bars)


def _traffic_bar(name: str, detail: str, bytes_sent: float, *, colour: str, percent: float) -> Bar:
    value = quantity.size(bytes_sent)
    return Bar(name, detail, value, (Segment(colour, value, percent),))


def traffic_at_the_start(run: Run) -> str:
    """Return in words what a rank sent in the first steps only; empty if there was none."""
    sent = {key: traffic_of(run, key) for key in traffic_keys(run)}
    at_start = {name: float(one.sum()) for (name, _), one in sent.items() if one.any() and not warmed_up(one).any()}
    return ", ".join(f"{name} {quantity.size(bytes_sent)}" for name, bytes_sent in at_start.items())


def _how_it_was_sent(run: Run, name: str, scheme: str) -> str:
    messages = quantity.plural(_mean_messages(run, (name, scheme)), "message")
    return messages if scheme in ("", OTHER) else f"{scheme}, {messages}"


def _mean_messages(run: Run, key: tuple[str, str]) -> int:
    messages = over_ranks(run, lambda log: log.traffic_messages.get(key, np.zeros(len(log.steps))))
    return round(float(np.nanmean(warmed_up(messages))))


@dataclass(frozen=True, slots=True)
class LoggedText:
    """A text as it is shown: rows of source, reference and translation, or as it stands."""

    step: int
    rows: tuple[tuple[str, str, str], ...]
    text: str
    cut: str


@dataclass(frozen=True, slots=True)
class LoggedTexts:
    """All texts of one name: the latest, some earlier ones, and how many more there were."""

    name: str
    latest: LoggedText
    earlier: tuple[LoggedText, ...]
    left_out: int


def logged_texts(run: Run) -> tuple[LoggedTexts, ...]:
    """Return the texts that the script logged, by name, the latest first."""
    by_name: dict[str, dict[int, Text]] = {}
    for log in reversed(run.ranks):  # what rank 0 logged counts
        for text in log.texts:
            by_name.setdefault(text.name, {})[text.step] = text
    shown = []
    for name, texts in sorted(by_name.items()):
        newest_first = [_logged_text(texts[step]) for step in sorted(texts, reverse=True)]
        earlier = newest_first[1 : EARLIER_TEXTS + 1]
        left_out = len(newest_first) - 1 - len(earlier)
        shown.append(LoggedTexts(name, newest_first[0], tuple(earlier), left_out))
    return tuple(shown)


def _logged_text(text: Text) -> LoggedText:
    rows = [line.split("\t") for line in text.text.splitlines() if line.strip()]
    if text.name == "samples" and rows and all(len(row) == 3 for row in rows):
        cut = f"{TEXT_ROWS} of {len(rows):,} rows" if len(rows) > TEXT_ROWS else ""
        return LoggedText(text.step, tuple((row[0], row[1], row[2]) for row in rows[:TEXT_ROWS]), "", cut)
    long = len(text.text) > TEXT_CHARACTERS
    cut = f"the first {TEXT_CHARACTERS:,} of {len(text.text):,} characters" if long else ""
    return LoggedText(text.step, (), text.text[:TEXT_CHARACTERS], cut)


@dataclass(frozen=True, slots=True)
class LoggedValue:
    """A number that the script logged beside loss and tokens."""

    name: str
    first: str
    lowest: str
    highest: str
    last: str
    last_step: str


def logged_values(run: Run) -> tuple[LoggedValue, ...]:
    """Return the numbers that the script logged beside loss and tokens, each the mean over its ranks."""
    steps = steps_of(run)
    shown = []
    for name in sorted({name for log in run.ranks for name in log.values}):
        values = mean_over_ranks(over_ranks(run, lambda log, name=name: log.values.get(name)))
        logged = ~np.isnan(values)
        if logged.any():
            some = values[logged]
            numbers = (some[0], some.min(), some.max(), some[-1])
            first, lowest, highest, last = (quantity.decimal(float(number)) for number in numbers)
            shown.append(LoggedValue(name, first, lowest, highest, last, f"{steps[logged][-1]:,}"))
    return tuple(shown)
