"""`Presence`: which ranks hold which rows of a table, as measured in one step, or as Zipf's law would have it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from tulle.partition import Contiguous, Partition, scatter

T = TypeVar("T")
TEXT_EXPONENT = 1.0
"""Zipf exponent of rows of which only the number is known: that of the first thousands of words of real text."""
_ROWS_DRAWN = 2**20
"""A model of a larger table is drawn for a sample of so many of its rows."""
_FEW_ROWS = 256
"""If a rank had fewer rows in that sample, they are drawn one by one instead."""
_CELLS = 2**26
"""Then of ranks times rows so many are kept, and of more a sample."""
_SAMPLING_KEY = 3
_MOST_COPIES = 128
"""Of a row of a sample, when owners are counted."""
_RANKS_PAIRED = 64
"""Overlap is a mean over all pairs of ranks: of more of them, so many tell it as well."""
_PAIRS_LISTED = 2**22
"""Of more pairs of rank and owner only those are counted that there are: on 100,000 ranks all would take 80 GB."""


@dataclass(frozen=True, slots=True, eq=False)
class Dealt:
    """How many rows each rank has of each owner, `[ranks, owners]`, as a sparse matrix whose gaps are filled evenly.

        of rank r at owner o     by_rank[r] * by_owner[o] * (even[r] + count[r, o])

    Args:
        pairs: `[2, pairs]` int64, ranks and owners that have rows of each other.
        count: `[pairs]` float64, of these; of the others 0.
        even: `[ranks]` float64: what chance has taken from a sample is dealt to all owners alike.
        by_rank: `[ranks]` float64.
        by_owner: `[owners]` float64.
    """

    pairs: Tensor
    count: Tensor
    even: Tensor
    by_rank: Tensor
    by_owner: Tensor

    def own(self) -> Tensor:
        """`[ranks]`: of each rank at itself."""
        rank, owner = self.pairs
        is_own = rank == owner
        return self.by_rank * self.by_owner * (self.even + self._added(rank[is_own], self.count[is_own], self.even))

    def of_ranks(self) -> Tensor:
        """`[ranks]`: of each rank at all owners."""
        rank, owner = self.pairs
        counted = self._added(rank, self.count * self.by_owner[owner], self.by_rank)
        return self.by_rank * (self.even * self.by_owner.sum() + counted)

    def at_owners(self) -> Tensor:
        """`[owners]`: of all ranks at each owner."""
        rank, owner = self.pairs
        counted = self._added(owner, self.count * self.by_rank[rank], self.by_owner)
        return self.by_owner * ((self.even * self.by_rank).sum() + counted)

    def reached(self, *, from_owners: bool = False) -> Tensor:
        """`[ranks]` int64: how many owners have rows of each rank; from owners, of how many ranks each has some."""
        rank, owner = self.pairs
        is_even, many = self.even > 0, len(self.by_owner)
        if from_owners:
            return torch.bincount(owner[~is_even[rank]], minlength=many) + int(is_even.sum())
        return torch.where(is_even, many, torch.bincount(rank, minlength=len(self.even)))

    def largest(self) -> Tensor:
        """`[ranks]`: of each rank at the owner that has most of it, where owners are alike but for the pairs."""
        counted = torch.zeros_like(self.even).scatter_reduce(0, self.pairs[0], self.count, "amax")
        return self.by_rank * (self.even + counted)

    def scaled(self, by_rank: Tensor | float = 1.0, by_owner: Tensor | float = 1.0) -> Dealt:
        """The same with all of a rank's, and all of an owner's, multiplied."""
        return replace(self, by_rank=self.by_rank * by_rank, by_owner=self.by_owner * by_owner)

    @staticmethod
    def _added(places: Tensor, values: Tensor, like: Tensor) -> Tensor:
        return torch.zeros_like(like).index_add(0, places, values)


@dataclass(frozen=True, slots=True, eq=False)
class Presence:
    """Which ranks hold which of a table's rows.

    Args:
        rows: `[union]` int64, the rows that any rank holds, ascending, on the CPU.
        held: `[ranks, union]` bool, whether a rank holds a row.
        share: Share of all held rows that is listed: 1, or less in a sample, whose counts stand for `1 / share` each.
    """

    rows: Tensor
    held: Tensor
    share: float = 1.0

    @staticmethod
    def of(indices: Sequence[Tensor]) -> Presence:
        """From the distinct rows of each rank."""
        rows, places = torch.unique(torch.cat([part.long().cpu() for part in indices]), return_inverse=True)
        held = torch.zeros(len(indices), len(rows), dtype=torch.bool)
        lengths = torch.tensor([len(part) for part in indices])
        held[torch.arange(len(indices)).repeat_interleave(lengths), places] = True
        return Presence(rows, held)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.held)

    def once(self, ask: Callable[..., T], *about: Any) -> T:
        """What a function tells of it, which must not be changed in place.

        Args:
            ask: Is given the presence.
            about: What else it is given.
        """
        return ask(self, *about)

    def counts(self) -> Tensor:
        """`[ranks]` float64: rows that each rank holds."""
        return _of_whole(self.once(_listed), self.share)

    def growth(self) -> list[float]:
        """Distinct rows of the first 1, 2, ... n ranks together."""
        found, counts = torch.zeros(len(self.rows), dtype=torch.bool), list[float]()
        for held in self.held:
            found |= held
            counts.append(int(found.count_nonzero()) / self.share)
        return counts

    def union(self, ranks: Sequence[int]) -> float:
        """Distinct rows of some ranks together."""
        return int(self.held[list(ranks)].any(0).sum()) / self.share

    def owned(self, partition: Partition) -> tuple[Dealt, Tensor]:
        """Rows by owner: of each rank's, and `[owners]` float64 of all ranks' together.

        A row of a sample stands for several that are held alike, each with an owner of its own where a hash deals them
        out: the fullest owner is that of a table in which each of them is there so many times.
        """
        owner = partition.place(self.rows)[0].clamp(max=partition.ranks - 1)  # a sample's last block may end beyond
        by_owner, together = self.dealt(owner, partition.ranks)
        copies = min(_MOST_COPIES, round(1 / self.share))
        if copies == 1 or isinstance(partition, Contiguous):
            return by_owner, together
        holders, first = self.held.sum(0).double(), copies * torch.arange(len(self.rows))
        looked_up, together = torch.zeros_like(together), torch.zeros_like(together)
        for copy in range(copies):
            owner = partition.place((first + copy) % partition.num_rows)[0]
            looked_up += torch.bincount(owner, holders, minlength=partition.ranks)
            together += torch.bincount(owner, minlength=partition.ranks)
        counted = self.share * copies
        by_owner = by_owner.scaled(by_owner=looked_up / counted / by_owner.at_owners().clamp(min=1e-30))
        return by_owner, together / counted

    def dealt(self, owner: Tensor, owners: int) -> tuple[Dealt, Tensor]:
        """As `owned`, where row i of `rows` has the owner `owner[i]`."""
        pairs, count = self._pairs(owner, owners)
        held = self.once(_listed).double()
        mean, kept = held / owners, 1.0
        if self.share < 1:
            off = count.square().sum() - owners * mean.square().sum()
            kept = _kept(off, held.sum(), self.share)
        whole = self.counts() / held.clamp(min=1e-30)
        by_owner = Dealt(pairs, kept * count, (1 - kept) * mean, whole, torch.ones(owners, dtype=torch.float64))
        return by_owner, _of_whole(torch.bincount(owner, minlength=owners), self.share)

    def _pairs(self, owner: Tensor, owners: int) -> tuple[Tensor, Tensor]:
        """`[2, pairs]` ranks and owners that have rows of each other, and `[pairs]` float64, how many."""
        if self.ranks * owners <= _PAIRS_LISTED:
            rank, row = self.once(_places)
            listed = torch.bincount(rank * owners + owner.index_select(0, row), minlength=self.ranks * owners)
            numbers = listed.nonzero().squeeze(1)
            count = listed[numbers]
        else:
            rank, row = _places(self)
            numbers, count = torch.unique(rank * owners + owner[row], return_counts=True)
        return torch.stack([numbers // owners, numbers % owners]), count.double()

    def in_blocks(self, block_rows: int) -> Presence:
        """Which ranks hold anything of each block of consecutive rows: the blocks are the rows of the result.

        Rows of a sample lie apart: those that lie side by side in the sample stand for a block, as dense as a real one.
        """
        rows = self.rows if self.share == 1 else (self.rows * self.share).ceil().long()
        blocks, places = torch.unique(rows // block_rows, return_inverse=True)
        held = torch.zeros(self.ranks, len(blocks), dtype=torch.int32)
        held.index_add_(1, places, self.held.int())
        return Presence(blocks if self.share == 1 else (blocks / self.share).long(), held > 0, self.share)

    def overlaps(self) -> Tensor:
        """`[ranks, ranks]` float64: `|I_r n I_q| / min(|I_r|, |I_q|)`, 0 where either is empty (Zen, section 2.3)."""
        held = self.held.float()
        both = (held @ held.T).double()
        counts = both.diagonal()
        return both / torch.minimum(counts[:, None], counts[None, :]).clamp(min=1)

    def overlap_ratio(self) -> float:
        """Mean overlap over the pairs of ranks that both hold rows, of the first ranks if there are many."""
        if self.ranks > _RANKS_PAIRED:
            return self.among(range(_RANKS_PAIRED)).overlap_ratio()
        first, second = torch.triu_indices(self.ranks, self.ranks, offset=1)
        is_held = self.held.any(1)
        ratios = self.overlaps()[first, second][is_held[first] & is_held[second]]
        return float(ratios.mean()) if len(ratios) else 0.0

    def parts(self, num_rows: int) -> list[float]:
        """Share of its rows that a rank has in each of as many contiguous parts as there are ranks, mean over ranks."""
        by_part, total, is_holding = self._in_parts(num_rows)
        shares = by_part.scaled(by_rank=is_holding / total).at_owners()
        return (shares / is_holding.sum().clamp(min=1)).tolist()

    def skewness_ratio(self, num_rows: int) -> float:
        """Zen's skewness ratio over as many contiguous parts as there are ranks, mean over ranks that hold rows."""
        by_part, total, is_holding = self._in_parts(num_rows)
        fullest = (by_part.largest() / total)[is_holding]
        return float(fullest.mean()) * self.ranks if len(fullest) else 1.0

    def _in_parts(self, num_rows: int) -> tuple[Dealt, Tensor, Tensor]:
        """Rows by contiguous part, `[ranks]` all of each rank's, and whether it has any."""
        by_part, _ = self.owned(Contiguous(num_rows, self.ranks))
        total = by_part.of_ranks()
        return by_part, total.clamp(min=1e-30), total > 0

    def among(self, members: Sequence[int]) -> Presence:
        """The presence on some of the ranks, without rows that none of these holds."""
        held = self.held[list(members)]
        kept = held.any(0)
        return Presence(self.rows[kept], held[:, kept], self.share)

    def at(self, rows_per_rank: tuple[int, ...], num_rows: int) -> Presence:
        """Of other ranks: the first of these, or, for more, rows drawn so that they densify as these do."""
        if len(rows_per_rank) <= self.ranks:
            return self.among(range(len(rows_per_rank)))
        return presence_like(num_rows, rows_per_rank, _exponent(self, num_rows))


@dataclass(frozen=True, slots=True, eq=False)
class Remembering(Presence):
    """A presence that remembers what it was asked: a planner prices scheme after scheme on it, for several networks."""

    _kept: dict[object, Any] = field(init=False, repr=False, default_factory=dict)

    @staticmethod
    def like(presence: Presence) -> Remembering:
        """A presence with a memory."""
        return Remembering(presence.rows, presence.held, presence.share)

    def once(self, ask: Callable[..., T], *about: Any) -> T:
        """As of any presence; asked again it gives what it gave."""
        key = ask, about
        if key not in self._kept:
            self._kept[key] = ask(self, *about)
        return self._kept[key]

    def owned(self, partition: Partition) -> tuple[Dealt, Tensor]:
        """As of any presence."""
        return self.once(Presence.owned, partition)

    def in_blocks(self, block_rows: int) -> Presence:
        """As of any presence, remembering too."""
        return self.once(_in_blocks, block_rows)

    def among(self, members: Sequence[int]) -> Presence:
        """As of any presence, remembering too."""
        return self.once(_among, tuple(members))


def _listed(presence: Presence) -> Tensor:
    """`[ranks]` int32: rows of each rank that are listed."""
    return presence.held.sum(1, dtype=torch.int32)  # many times faster than in int64


def _places(presence: Presence) -> tuple[Tensor, Tensor]:
    """`[held]` each: who holds a row, and which, by rank."""
    rank, row = presence.held.nonzero().T.contiguous()
    return rank, row


def _in_blocks(presence: Presence, block_rows: int) -> Presence:
    return Remembering.like(Presence.in_blocks(presence, block_rows))


def _among(presence: Presence, members: Sequence[int]) -> Presence:
    return Remembering.like(Presence.among(presence, members))


@lru_cache(maxsize=64)
def presence_like(num_rows: int, rows_per_rank: tuple[int, ...], exponent: float = TEXT_EXPONENT) -> Presence:
    """Rows drawn without replacement, the i-th with a weight of `i ** -exponent`: the same draw every time.

    Source: Efraimidis and Spirakis, *Weighted random sampling with a reservoir* (2006), by Gumbel keys.
    """
    drawn = min(num_rows, _ROWS_DRAWN)
    share = drawn / num_rows if num_rows else 1.0
    most_rows = max(rows_per_rank, default=drawn)
    if share < 1 and most_rows < _FEW_ROWS / share and most_rows <= drawn // 8:
        return _of_few_rows(num_rows, rows_per_rank, exponent)
    ranks_of_rows = torch.arange(drawn, dtype=torch.float32) / share + 1.0
    log_weights = -exponent * ranks_of_rows.log()
    generator = torch.Generator().manual_seed(num_rows)
    indices: list[Tensor] = []
    for count in rows_per_rank:
        keys = log_weights - torch.empty(drawn).exponential_(generator=generator).log()
        indices.append(keys.topk(min(drawn, round(count * share))).indices)
    found = Presence.of(indices) if indices else Presence(torch.empty(0, dtype=torch.long), torch.empty(0, 0) > 0)
    return Presence((found.rows / share).long(), found.held, share)


def _of_few_rows(num_rows: int, rows_per_rank: tuple[int, ...], exponent: float) -> Presence:
    """As `presence_like`, where a sample of the table's rows would have next to none of those that a rank holds.

    Ranks draw from strata of consecutive rows, of which each has one row of a stratum at most: the frequent rows are
    each a stratum, and others lie in so many that a rank would hardly have two rows of one.
    """
    frequent = _ROWS_DRAWN // 2
    wide = np.geomspace(frequent, num_rows, _ROWS_DRAWN - frequent + 1).round()
    edges = torch.from_numpy(np.unique(np.concatenate([np.arange(frequent), wide])))
    first, size = edges[:-1], edges.diff()
    log_weights = size.log() - exponent * (first + (size + 1) / 2).log()
    generator = torch.Generator().manual_seed(num_rows)
    share = min(1.0, _CELLS / (len(rows_per_rank) * max(1, sum(rows_per_rank))))
    held: list[Tensor] = []
    for count in rows_per_rank:
        keys = log_weights - torch.empty_like(first).exponential_(generator=generator).log()
        strata = keys.topk(count).indices
        within = torch.rand(count, generator=generator, dtype=torch.float64)
        rows = (first[strata] + (within * size[strata]).floor()).long()
        held.append(rows[scatter(rows, _SAMPLING_KEY) < share * 2**31])
    return replace(Presence.of(held), share=share)


def _of_whole(counts: Tensor, share: float) -> Tensor:
    """`[..., places]` float64: how many there are at each place, from how many of a sample are there.

    Numbers in a sample differ by chance, and the largest of many most of all: it is no measure of the fullest place.
    What chance makes of their variance, `1 - share` of their mean, is taken off. If it is all of it, because rows are
    dealt out by a hash, so much is left as the whole would have by chance itself: `share`.

    Source: Efron and Morris, *Data Analysis Using Stein's Estimator and Its Generalizations* (1975), for estimates that
    are to spread as the truth does.
    """
    counts = counts.double()
    if share == 1:
        return counts
    mean = counts.mean(-1, keepdim=True)
    off = counts - mean
    return (mean + _kept(off.square().sum(), counts.sum(), share) * off) / share


def _kept(squares: Tensor, counted: Tensor, share: float) -> Tensor:
    """By what the differences from the mean, with such a sum of squares, are multiplied."""
    return (1 - (1 - share) * counted / squares.clamp(min=1e-30)).clamp(share, 1.0).sqrt()


def _exponent(measured: Presence, num_rows: int) -> float:
    """The Zipf exponent with which drawn rows densify as measured ones do, by bisection."""
    counts = tuple(round(count) for count in measured.counts().tolist())
    target = len(measured.rows) / measured.share
    low, high = 0.0, 3.0
    for _ in range(8):
        middle = (low + high) / 2
        like = presence_like(num_rows, counts, middle)
        if len(like.rows) / like.share > target:
            low = middle  # too many distinct rows: the law must be steeper
        else:
            high = middle
    return (low + high) / 2
