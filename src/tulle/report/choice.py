"""Which scheme each table got, and why: the candidates with predicted and, after the fact, measured cost."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import tulle.report.quantity as quantity
from tulle.report.characteristics import ObservedTable
from tulle.report.records import Candidate, Measured, Run, TableChoice
from tulle.report.series import mean_over_ranks, median, over_ranks


@dataclass(frozen=True, slots=True)
class CandidateRow:
    """A scheme that was considered for a table, in words: what it was predicted to take, and what it took."""

    scheme: str
    chosen: bool
    predicted_time: str
    measured_time: str
    predicted_size: str
    measured_size: str
    messages: str


@dataclass(frozen=True, slots=True)
class Choice:
    """The scheme that one table got, in words."""

    name: str
    shape: str
    looks: str
    scheme: str
    reason: str
    candidates: tuple[CandidateRow, ...]

    @property
    def was_weighed(self) -> bool:
        """Whether there was anything to choose from; else the user, or the plan's maker, said it."""
        return len(self.candidates) > 1


def choices(run: Run, tables: Sequence[ObservedTable]) -> tuple[Choice, ...]:
    """Return which scheme each table got and why, with what was measured beside what was predicted."""
    observed = {table.name: table for table in tables}
    return tuple(_choice(run, table, observed.get(table.name)) for table in (run.plan.tables if run.plan else ()))


def _choice(run: Run, table: TableChoice, observed: ObservedTable | None) -> Choice:
    # Predicted and measured of the same steps belong together; the plan's prediction is of the step of the choice.
    candidates = (observed.candidates if observed else ()) or table.candidates
    if table.scheme not in {candidate.scheme for candidate in candidates}:
        candidates = (Candidate(table.scheme, math.nan, math.nan, math.nan), *candidates)
    return Choice(
        name=table.name,
        shape=f"{quantity.count(table.rows)} rows × {quantity.count(table.width)}",
        looks=_looks(table, observed),
        scheme=table.scheme,
        reason=table.reason,
        candidates=tuple(
            _row(candidate, table, _measured(run, table, observed, candidate)) for candidate in candidates
        ),
    )


def _looks(table: TableChoice, observed: ObservedTable | None) -> str:
    looks = observed.characteristics if observed else table.characteristics
    if looks is None:
        return "" if table.density is None else f"{quantity.share(table.density)} of the rows a step"
    words = f"{quantity.share(looks.density)} of the rows a step"
    if observed is not None and observed.ranks == 1:
        return words
    return (
        f"{words}, overlap {quantity.share(looks.overlap_ratio)}, densification "
        f"{quantity.ratio(looks.densification_ratio)}, skewness {quantity.ratio(looks.skewness_ratio)}"
    )


def _row(candidate: Candidate, table: TableChoice, measured: Measured) -> CandidateRow:
    return CandidateRow(
        scheme=candidate.scheme,
        chosen=candidate.scheme == table.scheme,
        predicted_time=quantity.duration(candidate.seconds),
        measured_time=quantity.duration(measured.seconds),
        predicted_size=quantity.size(candidate.bytes),
        measured_size=quantity.size(measured.bytes),
        messages=quantity.count(candidate.messages),
    )


def _measured(run: Run, table: TableChoice, observed: ObservedTable | None, candidate: Candidate) -> Measured:
    """Return what a scheme took: as observed, else as the plan says, else the bytes that the ranks counted."""
    measured = observed.measured.get(candidate.scheme) if observed else None
    if measured is None and candidate.scheme == table.scheme:
        measured = table.measured
    if measured is None:
        measured = Measured(math.nan, math.nan, math.nan)
    if math.isnan(measured.bytes):
        return replace(measured, bytes=_counted_bytes(run, table.name, candidate.scheme))
    return measured


def _counted_bytes(run: Run, table: str, scheme: str) -> float:
    """Return the median bytes that a rank sent in the steps in which the table went by this scheme."""
    sent = mean_over_ranks(over_ranks(run, lambda log: log.traffic.get((table, scheme))))
    return median(sent[sent > 0])
