"""The promise that rows are dealt evenly, whatever the ids look like: Zen's theorem 2 (OSDI'25, section 3.2)."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tulle import partition
from tulle.partition import Contiguous, Hashed, Partition, share
from tulle.presence import presence_like

NUM_ROWS = 2**27
RANKS = [2, 3, 8, 16, 64, 100, 128]
COUNTS = [1000, 10_000, 100_000]
EVERY_SET = 4.0
"""The c of theorem 2's `1 + c sqrt(n log n / m)` for all sets of this file at once.

By Chernoff's bound one owner of n exceeds it with a probability of at most `n ** (-c * c / 3)` where the root is at
most 1 / c, any of them with `n` times that: `c = sqrt(6)` gives the theorem's 1 - 1 / n for one set. Here are ten
thousand sets, and with two owners `c = 4` is 4.7 standard deviations.
"""
ONE_SET = math.sqrt(6)
"""The c that all but one in n sets stay within."""


def bound(ranks: int, count: int, factor: float) -> float:
    return 1 + factor * math.sqrt(ranks * math.log(ranks) / count)


def imbalance(counts: Tensor) -> float:
    """`max_j n |I_j| / |I|` of the rows at each owner, 1 if all have as many (Zen, OSDI'25, section 3.2)."""
    total = int(counts.sum())
    return float(counts.max()) * len(counts) / total if total else 1.0


def unevenness(partition: Partition, rows: Tensor) -> float:
    owner, _ = partition.place(rows)
    return imbalance(torch.bincount(owner, minlength=partition.ranks))


def unevenness_of_each(partition: Partition, sets: Tensor) -> list[float]:
    """Of `[sets, rows]` as many numbers."""
    owner, _ = partition.place(sets)
    apart = owner + partition.ranks * torch.arange(len(sets)).unsqueeze(1)
    counts = torch.bincount(apart.view(-1), minlength=partition.ranks * len(sets)).view(len(sets), -1)
    return [imbalance(one) for one in counts]


def multiplicative_owner(rows: Tensor, ranks: int) -> Tensor:
    """Knuth's hash: what a partition is that multiplies and takes the upper bits."""
    return (rows * 2654435761 % 2**32) * ranks >> 32


def multiples(step: int, count: int) -> Tensor:
    """The multiples of `step`, and, where there are too few of them, the rows beside them."""
    rows = torch.arange(0, NUM_ROWS, step)[:count]
    beside = torch.arange(-(-count // len(rows)))
    return (rows.unsqueeze(1) + beside).view(-1)[:count].clamp(max=NUM_ROWS - 1).unique()


@settings(max_examples=60)
@given(kind=st.sampled_from([Contiguous, Hashed]), num_rows=st.integers(1, 3000), ranks=st.integers(1, 140))
def test_each_row_has_a_place_of_its_own_and_is_found_there(kind, num_rows, ranks):
    partition = kind(num_rows, ranks)
    rows = torch.arange(num_rows)
    owner, place = partition.place(rows)
    assert owner.min() >= 0
    assert owner.max() < ranks
    assert place.min() >= 0
    assert place.max() < partition.places
    assert len(torch.unique(owner * partition.places + place)) == num_rows
    for rank in range(ranks):
        assert torch.equal(partition.rows(rank, place[owner == rank]), rows[owner == rank])


@settings(max_examples=60)
@given(
    kind=st.sampled_from([Contiguous, Hashed]),
    num_rows=st.integers(2**20, 2**40),
    ranks=st.integers(1, 4096),
    seed=st.integers(0, 2**31),
)
def test_rows_of_tables_of_any_size_are_found_where_they_were_placed(kind, num_rows, ranks, seed):
    partition = kind(num_rows, ranks)
    rows = torch.randint(num_rows, (100,), generator=torch.Generator().manual_seed(seed))
    owner, place = partition.place(rows)
    assert owner.max() < ranks
    assert place.max() < partition.places
    found = torch.stack([partition.rows(int(rank), one) for rank, one in zip(owner, place, strict=True)])
    assert torch.equal(found, rows)


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_what_a_gpu_keeps_of_all_rows_deals_them_as_arithmetic_does(ranks, monkeypatch):
    partitions = [Hashed(num_rows, ranks) for num_rows in (50, 1000, 1)]
    tables = torch.randint(3, (200,), generator=torch.Generator().manual_seed(0))
    rows = torch.tensor([one.num_rows for one in partitions])[tables] - 1 - tables
    rows.clamp_(min=0)
    expected = [Hashed.place_in(rows, tables, partitions), partitions[1].place(rows)]
    monkeypatch.setattr(partition, "_is_kept", lambda rows, num_rows: True)
    kept = [Hashed.place_in(rows, tables, partitions), partitions[1].place(rows)]
    for ours, theirs in zip(itertools.chain(*kept), itertools.chain(*expected), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.dtype == theirs.dtype


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("count", COUNTS)
def test_skewed_and_clustered_rows_are_dealt_evenly(ranks, count):
    zipf = presence_like(2**20, (count,)).rows
    assert unevenness(Hashed(2**20, ranks), zipf) <= bound(ranks, count, EVERY_SET)
    for begin in (0, NUM_ROWS // 3, NUM_ROWS - count):
        rows = torch.arange(begin, begin + count)
        assert unevenness(Hashed(NUM_ROWS, ranks), rows) <= bound(ranks, count, EVERY_SET)


@pytest.mark.parametrize(("shares", "ranks"), [(2, 2), (8, 16), (4, 6)])
def test_rows_of_one_share_are_dealt_evenly_to_owners_and_would_not_be_if_owners_were_the_shares(shares, ranks):
    rows = torch.arange(50_000)
    owners = Hashed(NUM_ROWS, ranks)
    for number in range(shares):
        mine = rows[share(rows, shares) == number]
        assert len(mine) == pytest.approx(len(rows) / shares, rel=0.1)
        assert unevenness(owners, mine) <= bound(ranks, len(mine), EVERY_SET)
    as_owned = rows[Hashed(NUM_ROWS, shares).place(rows)[0] == 0]
    assert unevenness(owners, as_owned) >= math.gcd(shares, ranks)


@pytest.mark.parametrize("ranks", RANKS)
def test_every_stride_is_dealt_evenly_and_all_but_one_in_n_within_the_bound_of_the_theorem(ranks):
    strided = torch.arange(2, 1025).unsqueeze(1) * torch.arange(1000)
    uneven = unevenness_of_each(Hashed(NUM_ROWS, ranks), strided)
    assert max(uneven) <= bound(ranks, 1000, EVERY_SET)
    assert sum(one > bound(ranks, 1000, ONE_SET) for one in uneven) <= len(uneven) / ranks


@pytest.mark.parametrize("ranks", [2, 8, *(pytest.param(r, marks=pytest.mark.slow) for r in RANKS if r not in (2, 8))])
@pytest.mark.parametrize("count", COUNTS)
def test_multiples_of_what_the_partition_itself_divides_by_are_dealt_evenly(ranks, count):
    partition = Hashed(NUM_ROWS, ranks)
    first, second = partition.sides
    powers = [2**power for power in range(1, 24, 2)]
    for step in (*powers, ranks, first, second, first - 1, first + 1, 2 * first, first * ranks, partition.places):
        rows = multiples(step, count)
        assert unevenness(partition, rows) <= bound(ranks, len(rows), EVERY_SET), step


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("count", COUNTS)
def test_sets_made_to_unbalance_other_partitions_are_dealt_evenly(ranks, count):
    for rows in adversarial_sets(ranks, count).values():
        assert unevenness(Hashed(NUM_ROWS, ranks), rows) <= bound(ranks, count, EVERY_SET)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("count", COUNTS)
def test_the_bound_can_break_for_those_other_partitions(ranks, count):
    sets = adversarial_sets(ranks, count)
    owners = {
        "modulo": sets["modulo"] % ranks,
        "contiguous": Contiguous(NUM_ROWS, ranks).place(sets["contiguous"])[0],
        "multiplicative": multiplicative_owner(sets["multiplicative"], ranks),
    }
    for name, owner in owners.items():
        uneven = imbalance(torch.bincount(owner, minlength=ranks))
        assert uneven == ranks, name
        assert uneven > bound(ranks, count, EVERY_SET), name


def adversarial_sets(ranks: int, count: int) -> dict[str, Tensor]:
    """By partition, rows that it deals all to one owner."""
    candidates = torch.arange(2 * ranks * count)
    return {
        "modulo": torch.arange(count) * ranks,
        "contiguous": torch.arange(count),
        "multiplicative": candidates[multiplicative_owner(candidates, ranks) == 0][:count],
    }


@pytest.mark.parametrize("num_rows", [0, 1, 2, 40, 97, 1000])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_owners_hold_each_row_once_where_its_place_says(num_rows, ranks):
    partition = Hashed(num_rows, ranks)
    found = []
    for owner in range(ranks):
        rows, places = partition.held(owner)
        assert all(
            torch.equal(one, other)
            for one, other in zip(partition.place(rows), (places * 0 + owner, places), strict=True)
        )
        found += rows.tolist()
    assert sorted(found) == list(range(num_rows))
