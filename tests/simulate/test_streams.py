"""What tables look like on more ranks than were recorded comes from the record, by a law that fits it."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tulle.errors import PlanError
from tulle.presence import presence_like
from tulle.simulate import law_of, looks
from tulle.simulate.law import BEND, Law, fitted
from tulle.workload import TableProfile


def zipf_batches(rows, exponent, lookups, count, *, seed=0, bend=float("inf"), shuffled=False):
    """Distinct rows of batches of independent lookups."""
    generator = np.random.default_rng(seed)
    places = np.arange(1, rows + 1)
    chances = (places**-exponent * (1 + places / bend) ** -BEND).cumsum()
    numbers = generator.permutation(rows) if shuffled else np.arange(rows)
    drawn = [np.searchsorted(chances, generator.random(lookups) * chances[-1]) for _ in range(count)]
    return [torch.from_numpy(np.unique(numbers[each])) for each in drawn]


def table_of(batches, rows, *, ranks=1, tokens=0.0):
    stream = tuple(tuple(batches[first : first + ranks]) for first in range(0, len(batches), ranks))
    return TableProfile("source.weight", rows, 64, 4, True, ("rows",), "source", stream=stream, tokens=tokens)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    exponent=st.floats(0.5, 1.2),
    rows=st.sampled_from([3_000, 30_000, 100_000]),
    recorded=st.sampled_from([4, 8, 16]),
    seed=st.integers(0, 100),
)
def test_the_union_on_eight_times_the_recorded_ranks_is_predicted_to_five_per_cent(exponent, rows, recorded, seed):
    batches = zipf_batches(rows, exponent, 3_000, 8 * recorded, seed=seed)
    predicted = looks(table_of(batches[:recorded], rows, ranks=4), 8 * recorded)
    assert predicted.union_rows == pytest.approx(len(torch.unique(torch.cat(batches))), rel=0.05)
    assert np.mean(predicted.rows_per_rank) == pytest.approx(np.mean([len(batch) for batch in batches]), rel=0.05)


@pytest.mark.parametrize("exponent", [0.7, 1.0])
def test_so_is_that_of_words_which_are_rarer_from_some_place_on(exponent):
    batches = zipf_batches(100_000, exponent, 3_000, 128, bend=3_000.0)
    predicted = looks(table_of(batches[:16], 100_000, ranks=4), 128)
    assert predicted.union_rows == pytest.approx(len(torch.unique(torch.cat(batches))), rel=0.05)


def test_what_words_look_like_by_default_is_not_as_good():
    """The twin of the test above: one that assumes an exponent instead of fitting it misses by far."""
    batches = zipf_batches(30_000, 0.6, 3_000, 64)
    assumed = presence_like(30_000, tuple(len(batch) for batch in batches)).growth()[-1]
    assert assumed < 0.94 * len(torch.unique(torch.cat(batches)))


def test_recorded_ranks_are_taken_as_they_are():
    batches = zipf_batches(1_000, 1.0, 200, 4)
    table = table_of(batches, 1_000, ranks=4)
    found = looks(table, 3)
    assert found.rows_per_rank == tuple(len(batch) for batch in batches[:3])
    assert found.spread.rows.tolist() == torch.unique(torch.cat(batches[:3])).tolist()


def test_other_steps_stand_in_for_further_ranks_and_stay_when_there_are_more():
    batches = zipf_batches(1_000, 1.0, 200, 6)
    table = table_of(batches, 1_000, ranks=2)
    all_recorded, beyond = looks(table, 6), looks(table, 9)
    assert sorted(all_recorded.rows_per_rank) == sorted(len(batch) for batch in batches)
    assert beyond.rows_per_rank[:6] == all_recorded.rows_per_rank
    held = beyond.spread.held[:6]
    assert torch.equal(beyond.spread.rows[held.any(0)], all_recorded.spread.rows)


def test_ranks_that_were_drawn_overlap_as_recorded_ones_do():
    batches = zipf_batches(20_000, 1.0, 2_000, 24, shuffled=True)
    real = looks(table_of(batches, 20_000), 24)
    drawn = looks(table_of(batches[:8], 20_000), 24)
    assert drawn.overlap_ratio == pytest.approx(real.overlap_ratio, rel=0.05)
    assert drawn.skewness_ratio == pytest.approx(real.skewness_ratio, rel=0.1)


def test_a_table_ordered_by_frequency_stays_skewed():
    batches = zipf_batches(20_000, 1.0, 2_000, 24)
    real = looks(table_of(batches, 20_000), 24)
    drawn = looks(table_of(batches[:8], 20_000), 24)
    assert real.skewness_ratio > 5
    assert drawn.skewness_ratio == pytest.approx(real.skewness_ratio, rel=0.1)


def test_very_many_rows_are_sampled_and_counted_as_all(monkeypatch):
    monkeypatch.setattr("tulle.simulate.streams._CANDIDATES", 50_000)
    rows = 100_000
    batches = zipf_batches(rows, 0.7, 1_000, 40)
    predicted = looks(table_of(batches[:8], rows), 40)
    assert predicted.spread.share == 0.5
    assert predicted.union_rows == pytest.approx(len(torch.unique(torch.cat(batches))), rel=0.05)


def test_a_law_finds_the_exponent_and_the_bend():
    batches = zipf_batches(50_000, 0.9, 8_000, 32, bend=2_000.0)
    law = law_of(table_of(batches, 50_000))
    assert law.exponent == pytest.approx(0.9, abs=0.1)
    assert 1_000 < law.bend < 4_000
    straight = law_of(table_of(zipf_batches(50_000, 0.9, 8_000, 32), 50_000))
    assert straight.exponent == pytest.approx(0.9, abs=0.05)
    assert straight.bend > 50_000


def test_a_law_tells_how_large_a_batch_has_so_many_rows():
    law = Law(10_000, 50.0, 1.0, float("inf"))
    sizes = np.array([0.1, 1.0, 7.0])
    rows = np.array([law.distinct(size) for size in sizes])
    assert law.batches(rows) == pytest.approx(sizes, rel=0.01)


def test_one_batch_alone_is_taken_for_words():
    [batch] = zipf_batches(10_000, 1.0, 1_000, 1)
    law = law_of(table_of([batch], 10_000))
    assert law.exponent == pytest.approx(1.0, abs=1e-3)
    assert law.distinct(1) == pytest.approx(len(batch), rel=0.01)


def test_all_rows_in_all_batches_stay_all_rows():
    law = fitted(np.full(50, 4), batches=4, rows=50)
    assert law.distinct(1) == pytest.approx(50, rel=0.01)
    assert looks(table_of([torch.arange(50)] * 4, 50), 30).union_rows == 50


def test_a_table_that_nobody_looked_up_has_no_rows_anywhere():
    table = table_of([torch.empty(0, dtype=torch.int64)] * 2, 100)
    assert looks(table, 5).rows_per_rank == (0,) * 5


def test_without_a_record_words_are_drawn_for_the_number_of_lookups():
    found = looks(table_of([], 30_000, tokens=4_096.0), 16)
    assert 1_000 < np.mean(found.rows_per_rank) < 2_000
    with pytest.raises(PlanError, match=r"neither rows that were looked up in table 'source.weight'"):
        looks(table_of([], 30_000), 16)


def test_tables_that_differ_in_their_streams_only_are_not_confused():
    few, many = (table_of(zipf_batches(5_000, 1.0, lookups, 4), 5_000) for lookups in (50, 2_000))
    assert few == many  # a profile's comparison leaves streams out
    assert looks(few, 20).union_rows < 0.5 * looks(many, 20).union_rows


@pytest.mark.parametrize("part", [0.25, 0.5, 2.0, 3.0])
def test_batches_of_another_size_have_the_rows_that_they_would_have(part):
    recorded = zipf_batches(30_000, 0.9, 3_000, 16, bend=3_000.0)
    other = zipf_batches(30_000, 0.9, round(part * 3_000), 32, bend=3_000.0, seed=1)
    found = looks(table_of(recorded, 30_000), 32, batches=part)
    assert np.mean(found.rows_per_rank) == pytest.approx(np.mean([len(batch) for batch in other]), rel=0.05)
    assert found.union_rows == pytest.approx(len(torch.unique(torch.cat(other))), rel=0.05)


def test_recorded_batches_are_taken_together_where_a_rank_works_on_several():
    recorded = zipf_batches(1_000, 1.0, 200, 5)
    found = looks(table_of(recorded, 1_000), 2, batches=2)
    pairs = [torch.unique(torch.cat(pair)) for pair in zip(*[iter(looks_order(recorded))] * 2, strict=False)]
    assert sorted(found.rows_per_rank) == sorted(len(pair) for pair in pairs)


def looks_order(batches):
    """Steps of one rank in the order in which they are taken: the most typical first."""
    sizes = sorted(len(batch) for batch in batches)
    typical = sizes[len(sizes) // 2]
    return sorted(batches, key=lambda batch: abs(len(batch) - typical))
