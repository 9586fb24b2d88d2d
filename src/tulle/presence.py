"""`Presence`: which ranks hold which rows of a table, as measured in one step, or as Zipf's law would have it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from tulle.partition import Contiguous, Partition

TEXT_EXPONENT = 1.0
"""Zipf exponent of rows of which only the number is known: that of the first thousands of words of real text."""
_ROWS_DRAWN = 2**20
"""A model of a larger table is drawn for a sample of so many of its rows."""
_MOST_COPIES = 128
"""Of a row of a sample, when owners are counted."""


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
        for rank, part in enumerate(places.split([len(part) for part in indices])):
            held[rank, part] = True
        return Presence(rows, held)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.held)

    def counts(self) -> Tensor:
        """`[ranks]` float64: rows that each rank holds."""
        return _of_whole(self.held.sum(1), self.share)

    def growth(self) -> list[float]:
        """Distinct rows of the first 1, 2, ... n ranks together."""
        first_holder = self.held.int().argmax(0)
        new = torch.bincount(first_holder, minlength=self.ranks) if len(self.rows) else torch.zeros(self.ranks)
        return (new.cumsum(0).double() / self.share).tolist()

    def union(self, ranks: Sequence[int]) -> float:
        """Distinct rows of some ranks together."""
        return int(self.held[list(ranks)].any(0).sum()) / self.share

    def owned(self, partition: Partition) -> tuple[Tensor, Tensor]:
        """Rows by owner: `[ranks, owners]` of each rank's, and `[owners]` of all ranks' together; float64.

        A row of a sample stands for several that are held alike, each with an owner of its own where a hash deals them
        out: the fullest owner is that of a table in which each of them is there so many times.
        """
        by_owner, together = self.dealt(partition.place(self.rows)[0], partition.ranks)
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
        by_owner *= looked_up / counted / by_owner.sum(0).clamp(min=1e-30)
        return by_owner, together / counted

    def dealt(self, owner: Tensor, owners: int) -> tuple[Tensor, Tensor]:
        """As `owned`, where row i of `rows` has the owner `owner[i]`."""
        each = [torch.bincount(owner[held], minlength=owners) for held in self.held]
        together = torch.bincount(owner, minlength=owners)
        by_owner = _of_whole(torch.stack([*each, together])[:-1], self.share)
        by_owner *= (self.counts() / by_owner.sum(1).clamp(min=1e-30))[:, None]
        return by_owner, _of_whole(together, self.share)

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
        """Mean overlap over the pairs of ranks that both hold rows."""
        first, second = torch.triu_indices(self.ranks, self.ranks, offset=1)
        is_held = self.held.any(1)
        ratios = self.overlaps()[first, second][is_held[first] & is_held[second]]
        return float(ratios.mean()) if len(ratios) else 0.0

    def parts(self, num_rows: int) -> list[float]:
        """Share of its rows that a rank has in each of as many contiguous parts as there are ranks, mean over ranks."""
        shares = self._shares_in_parts(num_rows)
        return (shares.mean(0) if len(shares) else shares.new_zeros(self.ranks)).tolist()

    def skewness_ratio(self, num_rows: int) -> float:
        """Zen's skewness ratio over as many contiguous parts as there are ranks, mean over ranks that hold rows."""
        shares = self._shares_in_parts(num_rows)
        return float(shares.max(1).values.mean()) * self.ranks if len(shares) else 1.0

    def _shares_in_parts(self, num_rows: int) -> Tensor:
        """`[holding ranks, parts]`."""
        by_part, _ = self.owned(Contiguous(num_rows, self.ranks))
        total = by_part.sum(1, keepdim=True)
        return (by_part / total.clamp(min=1e-30))[total.squeeze(1) > 0]

    def among(self, members: Sequence[int]) -> Presence:
        """Of some of the ranks."""
        held = self.held[list(members)]
        kept = held.any(0)
        return Presence(self.rows[kept], held[:, kept], self.share)

    def at(self, rows_per_rank: tuple[int, ...], num_rows: int) -> Presence:
        """Of other ranks: the first of these, or, for more, rows drawn so that they densify as these do."""
        if len(rows_per_rank) <= self.ranks:
            return self.among(range(len(rows_per_rank)))
        return presence_like(num_rows, rows_per_rank, _exponent(self, num_rows))


@lru_cache(maxsize=64)
def presence_like(num_rows: int, rows_per_rank: tuple[int, ...], exponent: float = TEXT_EXPONENT) -> Presence:
    """Rows drawn without replacement, the i-th with a weight of `i ** -exponent`: the same draw every time.

    Source: Efraimidis and Spirakis, *Weighted random sampling with a reservoir* (2006), by Gumbel keys.
    """
    drawn = min(num_rows, _ROWS_DRAWN)
    share = drawn / num_rows if num_rows else 1.0
    ranks_of_rows = torch.arange(drawn, dtype=torch.float32) / share + 1.0
    log_weights = -exponent * ranks_of_rows.log()
    generator = torch.Generator().manual_seed(num_rows)
    indices: list[Tensor] = []
    for count in rows_per_rank:
        keys = log_weights - torch.empty(drawn).exponential_(generator=generator).log()
        indices.append(keys.topk(min(drawn, round(count * share))).indices)
    found = Presence.of(indices) if indices else Presence(torch.empty(0, dtype=torch.long), torch.empty(0, 0) > 0)
    return Presence((found.rows / share).long(), found.held, share)


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
    by_chance = (1 - share) * counts.sum()
    kept = (1 - by_chance / off.square().sum().clamp(min=1e-30)).clamp(share, 1.0)
    return (mean + kept.sqrt() * off) / share


def _exponent(measured: Presence, num_rows: int) -> float:
    """The Zipf exponent with which drawn rows densify as measured ones do, by bisection."""
    counts = tuple(round(count) for count in measured.counts().tolist())
    target = measured.growth()[-1]
    low, high = 0.0, 3.0
    for _ in range(8):
        middle = (low + high) / 2
        if presence_like(num_rows, counts, middle).growth()[-1] > target:
            low = middle  # too many distinct rows: the law must be steeper
        else:
            high = middle
    return (low + high) / 2
