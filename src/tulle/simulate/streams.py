"""What a table's gradients look like on any number of ranks: from recorded ids, and beyond them by a fitted `Law`.

A record of m batches serves m ranks, one batch each, whether they are of one step or of several; what further ranks
hold is drawn from the law that the record follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import median

import numpy as np
import torch
from torch import Tensor

from tulle.cost import Characteristics
from tulle.errors import PlanError
from tulle.partition import scatter
from tulle.presence import TEXT_EXPONENT, Presence
from tulle.simulate.law import Array, Law, drawn, fitted
from tulle.workload import TableProfile

_CELLS = 2**24
"""Ranks times rows that are kept at most of who holds what; of more rows a sample is drawn, as large as that."""
_CANDIDATES = 2**22
"""So many rows are drawn from at most; a larger table is sampled."""
_SAMPLING_KEY, _SHUFFLING_KEY = 3, 5
_TABLES = 4096
"""Of so many the records are kept, and the laws: a model may have hundreds of tables."""
_ORDERED = 0.45
"""Recorded rows whose mean number is below this share of the table's rows are of a table ordered by frequency."""


def looks(table: TableProfile, ranks: int, *, batches: float = 1.0) -> Characteristics:
    """What one step's gradients of a table look like on so many ranks.

    Args:
        table: With the rows that were looked up in some steps, on some ranks; where there are none, `tokens` lookups a
            rank are drawn by the law of words.
        ranks: How many.
        batches: How many of the recorded batches each of them works on. Whole numbers are recorded batches taken
            together; of parts all is drawn.

    Raises:
        PlanError: If the profile has neither rows nor a number of lookups.

    Example:
        >>> steps = tuple(tuple(torch.arange(0, 40 + rank, 1 + rank + step) for rank in range(2)) for step in range(3))
        >>> table = TableProfile("source.weight", 1000, 64, 4, True, ("rows",), "source", stream=steps)
        >>> looks(table, 4).rows_per_rank, looks(table, 4).union_rows
        ((20, 14, 14, 11), 28)
        >>> looks(table, 1200).union_rows
        333
    """
    return _looks(_Same(table), ranks, batches)


def law_of(table: TableProfile) -> Law:
    """The law that a table's recorded batches follow, or that of words if none was recorded.

    Raises:
        PlanError: If the profile has neither rows nor a number of lookups.
    """
    return _followed(_Same(table))[0]


@dataclass(frozen=True, slots=True, eq=False)
class _Same:
    """A table as a key: the same only if its stream is, which a profile's comparison leaves out."""

    table: TableProfile

    def __hash__(self) -> int:
        return hash((self.table, id(self.table.stream)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.table == other.table and self.table.stream is other.table.stream


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """What was recorded of a table.

    Args:
        batches: Distinct rows of each batch; those of one step stand together.
        rows: `[distinct rows]` of all batches, the most frequent ones first.
        times_held: `[distinct rows]`, of how many batches each is.
        is_ordered: Whether the table's rows seem to be numbered by frequency.
    """

    batches: tuple[Tensor, ...]
    rows: Tensor
    times_held: Tensor
    is_ordered: bool = True


@lru_cache(maxsize=_TABLES)
def _recorded(same: _Same) -> Recorded:
    table = same.table
    typical = median(_rows_of(step) for step in table.stream) if table.stream else 0
    steps = sorted(table.stream, key=lambda step: abs(_rows_of(step) - typical))  # the most typical first
    batches = tuple(rows for step in steps for rows in step)
    nothing = torch.empty(0, dtype=torch.int64)
    rows, times_held = torch.unique(torch.cat([nothing, *batches]), return_counts=True)
    if not len(rows):
        return Recorded(batches, rows, times_held)
    is_ordered = float(rows.double().mean()) < _ORDERED * table.rows
    order = (
        torch.arange(len(rows)) if is_ordered else scatter(rows, _SHUFFLING_KEY).argsort()
    )  # of equally frequent ones
    order = order[times_held[order].argsort(descending=True, stable=True)]
    return Recorded(batches, rows[order], times_held[order], is_ordered)


@lru_cache(maxsize=_TABLES)
def _followed(same: _Same) -> tuple[Law, Array]:
    """The law that a table's batches follow, and how large those are, in turn, that are drawn to be like them."""
    table, recorded = same.table, _recorded(same)
    if not recorded.batches:
        return _law_of_words(table), np.ones(1)
    if not len(recorded.rows):
        return Law(table.rows, 0.0, TEXT_EXPONENT, table.rows), np.zeros(1)
    law = fitted(recorded.times_held.numpy(), len(recorded.batches), table.rows)
    return law, _sizes(recorded.batches, law)


def _rows_of(step: Sequence[Tensor]) -> int:
    return sum(len(rows) for rows in step)


def _law_of_words(table: TableProfile) -> Law:
    if table.tokens <= 0:
        raise PlanError(
            f"the profile has neither rows that were looked up in table {table.name!r} nor how many lookups there are: "
            "profile some steps of training, or set `tokens`"
        )
    return Law(table.rows, table.tokens / (np.log(table.rows) + np.euler_gamma), TEXT_EXPONENT, np.inf)


@lru_cache(maxsize=16)  # each may take 2^24 bytes
def _looks(same: _Same, ranks: int, batches: float) -> Characteristics:
    table, recorded = same.table, _recorded(same)
    known = _together(recorded.batches, int(batches)) if batches == int(batches) else []
    is_known = ranks <= len(known)
    presence = Presence.of(known[:ranks]) if is_known else _beyond(same, known, ranks, batches)
    rows_per_rank = tuple(round(rows) for rows in presence.counts().tolist())
    return Characteristics(table.rows, table.width, table.value_bytes, rows_per_rank, presence)


def _together(batches: tuple[Tensor, ...], count: int) -> list[Tensor]:
    """So many batches each taken as one; what is left over is left out."""
    if count == 1:
        return list(batches)
    firsts = range(0, len(batches) - count + 1, count)
    return [torch.unique(torch.cat(batches[first : first + count])) for first in firsts]


def _beyond(same: _Same, known: Sequence[Tensor], ranks: int, batches: float) -> Presence:
    """What ranks hold that are known, and drawn batches for all further ranks."""
    law, sizes = _followed(same)
    law = replace(law, scale=batches * law.scale)
    share = min(1.0, _CELLS / (ranks * max(1.0, law.distinct(ranks))), _CANDIDATES / law.rows)
    generator = np.random.default_rng((law.rows, ranks))
    rows = _rows_at(same, share)
    found = drawn(law, _places(law.rows, share), np.resize(sizes, ranks - len(known)), generator)
    held = [_sampled(rows_held, share) for rows_held in known] + [rows[torch.from_numpy(which)] for which in found]
    return replace(Presence.of(held), share=share)


def _sizes(batches: Sequence[Tensor], law: Law) -> Array:
    counts = np.array([len(batch) for batch in batches], dtype=np.float64)
    return np.where(counts > 0, law.batches(counts), 0.0)


def _places(rows: int, share: float) -> Array:
    """Places by frequency, from 1: all of them, or a sample of that share."""
    return 1 + ((np.arange(round(rows * share)) + 0.5) / share).astype(np.int64).astype(np.float64)


@lru_cache(maxsize=32)  # each may take 2^25 bytes
def _rows_at(same: _Same, share: float) -> Tensor:
    """`[places]` which row is at each place.

    A row that was recorded once may be at many places, and others that were not recorded are as frequent. So as many
    batches are drawn as were recorded: rows that were recorded take the places that came out, by how often they did.
    """
    recorded, (law, sizes) = _recorded(same), _followed(same)
    generator = np.random.default_rng(law.rows)
    places = _places(law.rows, share)
    known = _sampled(recorded.rows, share)[: len(places)]
    times = np.zeros(len(places), dtype=np.int64)
    for held in drawn(law, places, np.resize(sizes, len(recorded.batches)), generator):
        times[held] += 1
    by_times = torch.from_numpy((-times).argsort(kind="stable"))
    others = _not_among(recorded.rows, law.rows, len(places) - len(known))
    if not recorded.is_ordered:
        others = others[torch.from_numpy(generator.permutation(len(others)))]
    rows = torch.empty(len(places), dtype=torch.int64)
    rows[by_times[: len(known)]] = known
    rows[by_times[len(known) :].sort().values] = others
    return rows


def _not_among(known: Tensor, num_rows: int, count: int) -> Tensor:
    """So many of the rows that were not recorded, ascending: all of them, or a sample."""
    steps = ((torch.arange(count) + 0.5) * ((num_rows - len(known)) / max(1, count))).long()
    gaps = known.sort().values - torch.arange(len(known))  # of the others, so many come before each that was recorded
    return steps + torch.searchsorted(gaps, steps, right=True)


def _sampled(rows: Tensor, share: float) -> Tensor:
    return rows[_is_sampled(rows, share)]


def _is_sampled(rows: Tensor, share: float) -> Tensor:
    return scatter(rows, _SAMPLING_KEY) < share * 2**31
