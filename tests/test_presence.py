"""Which ranks hold which rows: every number of `Presence` against counting sets, and the model's counts."""

from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tulle.cost import Characteristics, Network
from tulle.partition import Contiguous, Hashed
from tulle.presence import Presence, Remembering, presence_like
from tulle.sync import scheme_named

NUM_ROWS = 50
held_sets = st.lists(st.sets(st.integers(0, NUM_ROWS - 1), max_size=30), min_size=1, max_size=5)


def presence_of(sets: list[set[int]]) -> Presence:
    return Presence.of([torch.tensor(sorted(rows), dtype=torch.int64) for rows in sets])


@given(sets=held_sets)
def test_rows_and_counts_are_those_of_the_ranks(sets):
    presence = presence_of(sets)
    assert presence.ranks == len(sets)
    assert presence.rows.tolist() == sorted(set().union(*sets))
    assert presence.counts().tolist() == [len(rows) for rows in sets]
    assert [set(presence.rows[held].tolist()) for held in presence.held] == sets


@given(sets=held_sets)
def test_growth_and_union_count_distinct_rows(sets):
    presence = presence_of(sets)
    assert presence.growth() == [len(set().union(*sets[: first + 1])) for first in range(len(sets))]
    for ranks in ([0], list(range(0, len(sets), 2)), list(range(len(sets)))):
        assert presence.union(ranks) == len(set().union(*(sets[rank] for rank in ranks)))


def test_one_that_remembers_answers_as_any_other_and_looks_once():
    presence = presence_of([{1, 5, 9}, {5, 7}, {1, 40, 41}])
    remembering = Remembering.like(presence)
    for partition in (Contiguous(NUM_ROWS, 3), Hashed(NUM_ROWS, 3)):
        by_owner, owned = remembering.owned(partition)
        assert owned.tolist() == presence.owned(partition)[1].tolist()
        assert by_owner is remembering.owned(partition)[0]
    assert remembering.among([0, 2]) is remembering.among(range(0, 3, 2))
    assert remembering.among([0, 2]).held.tolist() == presence.among([0, 2]).held.tolist()
    assert remembering.in_blocks(10) is remembering.in_blocks(10)
    assert remembering.in_blocks(10).rows.tolist() == presence.in_blocks(10).rows.tolist()


@given(sets=held_sets, kind=st.sampled_from([Contiguous, Hashed]), owners=st.integers(1, 6))
def test_owned_rows_are_those_that_the_partition_places(sets, kind, owners):
    partition = kind(NUM_ROWS, owners)
    by_owner, owned = presence_of(sets).owned(partition)

    def count(rows: set[int]) -> list[int]:
        owner, _ = partition.place(torch.tensor(sorted(rows), dtype=torch.int64))
        return torch.bincount(owner, minlength=owners).tolist()

    expected = torch.tensor([count(rows) for rows in sets], dtype=torch.float64)
    found = torch.zeros_like(expected).index_put(tuple(by_owner.pairs), by_owner.count)
    assert found.tolist() == expected.tolist()
    assert not by_owner.even.any()
    assert by_owner.of_ranks().tolist() == expected.sum(1).tolist()
    assert by_owner.at_owners().tolist() == expected.sum(0).tolist()
    assert by_owner.reached().tolist() == (expected > 0).sum(1).tolist()
    assert by_owner.reached(from_owners=True).tolist() == (expected > 0).sum(0).tolist()
    assert by_owner.largest().tolist() == expected.max(1).values.tolist()
    assert owned.tolist() == count(set().union(*sets))


@given(sets=held_sets)
def test_overlap_is_the_mean_over_pairs_that_hold_rows(sets):
    ratios = [len(a & b) / min(len(a), len(b)) for a, b in combinations(sets, 2) if a and b]
    expected = sum(ratios) / len(ratios) if ratios else 0.0
    assert presence_of(sets).overlap_ratio() == pytest.approx(expected)


@given(sets=held_sets)
def test_skewness_is_the_fullest_part_over_the_mean_part(sets):
    parts = len(sets)
    part_rows = -(-NUM_ROWS // parts)
    ratios = [
        max(sum(row // part_rows == part for row in rows) for part in range(parts)) * parts / len(rows)
        for rows in sets
        if rows
    ]
    expected = sum(ratios) / len(ratios) if ratios else 1.0
    assert presence_of(sets).skewness_ratio(NUM_ROWS) == pytest.approx(expected)


@given(sets=held_sets, block_rows=st.integers(1, NUM_ROWS))
def test_a_block_is_held_by_whom_any_of_its_rows_is(sets, block_rows):
    in_blocks = presence_of(sets).in_blocks(block_rows)
    expected = presence_of([{row // block_rows for row in rows} for rows in sets])
    assert torch.equal(in_blocks.rows, expected.rows)
    assert torch.equal(in_blocks.held, expected.held)


@given(sets=held_sets, ranks=st.integers(1, 5))
def test_fewer_ranks_are_the_first_ones(sets, ranks):
    kept = sets[:ranks]
    fewer = presence_of(sets).at(tuple(len(rows) for rows in kept), NUM_ROWS)
    assert torch.equal(fewer.rows, presence_of(kept).rows)
    assert torch.equal(fewer.held, presence_of(kept).held)


def test_more_ranks_densify_as_the_measured_ones_do():
    measured = presence_like(10_000, (500, 510, 520, 530), exponent=1.3)
    more = measured.at((500, 510, 520, 530) * 2, 10_000)
    assert more.counts().tolist() == [500, 510, 520, 530] * 2
    assert more.growth()[3] == pytest.approx(measured.growth()[3], rel=0.03)
    alike = presence_like(10_000, (500, 510, 520, 530) * 2, exponent=1.3)
    assert more.growth()[-1] == pytest.approx(alike.growth()[-1], rel=0.05)


@pytest.mark.parametrize("num_rows", [1, 40, 5000])
def test_a_model_holds_as_many_rows_as_asked_for(num_rows):
    counts = (0, 1, num_rows // 2, num_rows)
    model = presence_like(num_rows, counts)
    assert model.counts().tolist() == list(counts)
    assert model.rows.tolist() == list(range(num_rows))
    assert model.share == 1.0


def test_a_model_of_a_large_table_is_a_sample_that_stands_for_the_whole():
    num_rows = 2**22
    model = presence_like(num_rows, (4000, 2**21), exponent=0.0)
    assert model.share == 0.25
    assert model.counts().tolist() == pytest.approx([4000, 2**21], rel=1e-3)
    assert model.rows.max() < num_rows
    blocks = model.in_blocks(16)
    assert blocks.rows.max() < num_rows // 16
    assert blocks.union([1]) == pytest.approx(num_rows / 16, rel=0.01)  # half of all rows: no block of 16 stays empty
    assert blocks.union([0]) == pytest.approx(4000, rel=0.02)  # scattered rows: hardly two in one block


@pytest.mark.parametrize("num_rows", [2**26, 2**31, 2**40])
def test_few_rows_of_a_large_table_are_drawn_one_by_one(num_rows):
    counts = (100, 0, 60, 100)
    even, zipf, steep = (presence_like(num_rows, counts, exponent) for exponent in (0.0, 1.0, 2.0))
    for model in (even, zipf, steep):
        assert (model.share, model.counts().tolist()) == (1.0, [*counts]), "a sample of the table would have none"
        assert 0 <= model.rows.min() <= model.rows.max() < num_rows
    assert len(even.rows) == 260 > len(zipf.rows) > len(steep.rows) > 100
    looks = Characteristics(num_rows, 1, 4, counts)
    assert 1 < looks.densification_ratio <= 4
    assert scheme_named("ring").cost(looks, Network(1e-4, 1e9), 4).bytes > 4 * 100


def test_few_rows_of_a_large_table_overlap_as_those_of_the_law_itself():
    num_rows, counts = 2**22, (1000,) * 4
    generator = torch.Generator().manual_seed(0)
    log_weights = -torch.arange(1, num_rows + 1, dtype=torch.float64).log()
    keys = [log_weights - torch.empty_like(log_weights).exponential_(generator=generator).log() for _ in counts]
    drawn = Presence.of([one.topk(1000).indices for one in keys])
    assert len(presence_like(num_rows, counts).rows) == pytest.approx(len(drawn.rows), rel=0.05)


def test_ranks_of_a_model_share_more_rows_the_steeper_the_law():
    flat, steep = (presence_like(5000, (400, 400), exponent).overlap_ratio() for exponent in (0.0, 1.5))
    assert flat == pytest.approx(400 / 5000, abs=0.04)
    assert steep > 3 * flat


def batches_of(ranks, lookups, exponent, num_rows=100_000):
    """Distinct rows of independent lookups by Zipf's law."""
    generator = torch.Generator().manual_seed(0)
    chances = torch.arange(1, num_rows + 1, dtype=torch.float64).pow(-exponent).cumsum(0)
    drawn = (torch.rand(lookups, generator=generator, dtype=torch.float64) * chances[-1] for _ in range(ranks))
    return [torch.searchsorted(chances, one).unique() for one in drawn]


def sample_of(batches, one_of, num_rows=100_000):
    """As of a table too large to be looked at whole: every so many-th row."""
    kept = Presence.of([batch[batch % one_of == one_of // 2] for batch in batches])
    assert len(kept.rows) < num_rows
    return Presence(kept.rows, kept.held, 1 / one_of)


def fullest(presence, num_rows=100_000, ranks=256):
    """Rows that are looked up at the fullest owner, distinct rows there, and rows of the rank that has most."""
    by_owner, owned = presence.owned(Hashed(num_rows, ranks))
    return [by_owner.at_owners().max().item(), owned.max().item(), by_owner.of_ranks().max().item()]


@pytest.mark.parametrize("exponent", [0.7, 1.0])
@pytest.mark.parametrize("one_of", [4, 16])
def test_the_fullest_owner_of_a_sample_is_that_of_the_whole(exponent, one_of):
    batches = batches_of(256, 1000, exponent)
    sampled = sample_of(batches, one_of)
    assert fullest(sampled) == pytest.approx(fullest(Presence.of(batches)), rel=0.12)


def test_the_last_block_of_a_sample_has_the_last_owner():
    rows = torch.tensor([0, 500, 999])
    by_owner, owned = Presence(rows, torch.ones(2, 3) > 0, 1 / 100).in_blocks(2).owned(Contiguous(500, 100))
    assert (len(owned), len(by_owner.at_owners())) == (100, 100)


@pytest.mark.parametrize("kind", [Contiguous, Hashed])
def test_of_many_ranks_only_the_pairs_that_there_are_are_counted(monkeypatch, kind):
    sampled = sample_of(batches_of(32, 1000, 1.0), 4)
    partition = kind(100_000, 32)
    (listed, _), own = sampled.owned(partition), sampled.owned(partition)[0].own()
    monkeypatch.setattr("tulle.presence._PAIRS_LISTED", 0)
    counted, _ = sampled.owned(partition)
    assert torch.equal(listed.pairs, counted.pairs)
    assert torch.equal(listed.count, counted.count)
    whole = torch.zeros(32, 32, dtype=torch.float64).index_put(tuple(counted.pairs), counted.count)
    whole = counted.by_rank[:, None] * counted.by_owner * (counted.even[:, None] + whole)
    torch.testing.assert_close(own, whole.diagonal(), rtol=1e-12, atol=0.0)
    torch.testing.assert_close(counted.of_ranks(), whole.sum(1), rtol=1e-12, atol=0.0)
    torch.testing.assert_close(counted.at_owners(), whole.sum(0), rtol=1e-12, atol=0.0)
    assert counted.reached().tolist() == (whole > 0).sum(1).tolist()
    assert counted.reached(from_owners=True).tolist() == (whole > 0).sum(0).tolist()


def test_chance_makes_an_owner_of_a_sample_much_fuller():
    """The twin: counted as they are, and taken so many times."""
    batches = batches_of(256, 1000, 1.0)
    sampled = sample_of(batches, 16)
    raw = [16 * found for found in fullest(Presence(sampled.rows, sampled.held))]
    assert raw[0] > 1.5 * fullest(Presence.of(batches))[0]
    assert raw[1] > 1.2 * fullest(Presence.of(batches))[1]


def test_what_is_uneven_by_more_than_chance_stays_so_in_a_sample():
    batches = batches_of(16, 20_000, 1.0)
    whole, sampled = (one.skewness_ratio(100_000) for one in (Presence.of(batches), sample_of(batches, 4)))
    assert whole > 3
    assert sampled == pytest.approx(whole, rel=0.05)
