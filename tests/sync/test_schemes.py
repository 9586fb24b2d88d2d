"""The choice of a scheme by cost: pure, and right where the answer is known."""

from dataclasses import replace

import pytest

from tulle.cost import Characteristics, Network
from tulle.errors import PlanError
from tulle.sync import SCHEMES, check_scheme, choose
from tulle.sync.schemes import ALIKE, FLAT

SLOW = Network(latency_s=5e-4, bandwidth_bytes_per_s=1.2e8)


def table(rows: int, num_rows: int = 50_000, width: int = 512, ranks: int = 4) -> Characteristics:
    return Characteristics(num_rows, width, 4, (rows,) * ranks)


def seconds(scheme: str, look: Characteristics) -> float:
    return SCHEMES[scheme].cost(look, SLOW, len(look.rows_per_rank)).seconds


def test_a_few_rows_of_a_large_table_travel_as_rows():
    few = table(1400)
    assert choose(few, SLOW, 4).scheme != "densify"
    assert seconds("allgather", few) < seconds("densify", few) / 5


@pytest.mark.parametrize("ranks", [3, 4, 16, 64])
def test_an_assumed_sparse_gradient_is_reduced_and_not_gathered(ranks):
    choice = choose(table(50_000, ranks=ranks), SLOW, ranks)
    predicted = dict(choice.candidates)
    # Where every row is touched, pushing rows to owners and back is a dense all-reduce by another name: a near tie.
    assert choice.scheme == "densify" or predicted["densify"].seconds > ALIKE * predicted[choice.scheme].seconds
    assert predicted[choice.scheme].bytes < 1.01 * predicted["densify"].bytes
    assert predicted["allgather"].bytes == pytest.approx(ranks / 2 * predicted["densify"].bytes, rel=0.01)
    eager = replace(SLOW, all_reduce_latency_s=SLOW.latency_s, all_reduce_bytes_per_s=2 * SLOW.bandwidth_bytes_per_s)
    assert choose(table(50_000, ranks=ranks), eager, ranks).scheme == "densify"


def test_gathering_loses_to_reducing_as_ranks_grow():
    # Densifying Assumed-sparse Tensors, figure 3: Transformer-big at 5,000 tokens a process.
    looks = [table(4000, 33_708, 1024, ranks) for ranks in (2, 64)]
    assert seconds("allgather", looks[0]) < seconds("densify", looks[0])
    assert seconds("allgather", looks[1]) > 2 * seconds("densify", looks[1])
    assert choose(looks[1], SLOW, 64).scheme != "allgather"


def test_the_choice_lists_every_candidate_and_takes_the_simplest_of_about_the_least_seconds():
    for look in (table(10), table(1400), table(40_000), table(4000, ranks=16)):
        choice = choose(look, SLOW, len(look.rows_per_rank))
        predicted = {name: cost.seconds for name, cost in choice.candidates}
        assert predicted == {name: seconds(name, look) for name in FLAT}
        alike = [name for name in FLAT if predicted[name] <= ALIKE * min(predicted.values())]
        assert choice.scheme == alike[0]
        assert f"{choice.scheme} predicted at " in choice.reason
        assert "densify" in choice.reason, "what DDP would do with a dense gradient is always told"


@pytest.mark.parametrize(("ranks", "gathered", "reduced"), [(4, 3.0, 1.5), (64, 63.0, 2 * 63 / 64)])
def test_costs_are_those_of_the_papers(ranks, gathered, reduced):
    """Zen, table of costs: AGsparse (n - 1) d M, dense ring all-reduce 2 (n - 1) / n M."""
    look = table(rows=500, num_rows=50_000, width=512, ranks=ranks)
    d_m = look.density * look.dense_bytes
    assert SCHEMES["allgather"].cost(look, SLOW, ranks).bytes == pytest.approx(gathered * d_m, rel=0.01)
    assert SCHEMES["densify"].cost(look, SLOW, ranks).bytes == pytest.approx(reduced * look.dense_bytes, rel=0.01)


def test_seconds_are_latency_and_bytes_over_bandwidth():
    cost = SCHEMES["densify"].cost(table(500), SLOW, 4)
    rounds = 6 + 1  # of the all-reduce, and of the row numbers
    assert cost.seconds == pytest.approx(rounds * SLOW.latency_s + cost.bytes / SLOW.bandwidth_bytes_per_s)


def test_an_unknown_scheme_is_named_with_those_that_there_are():
    with pytest.raises(PlanError, match=rf"^unknown scheme 'zen', expected one of auto, {', '.join(SCHEMES)}$"):
        check_scheme("zen")
    assert all(check_scheme(name) == name for name in ("auto", *SCHEMES, "hierarchical:allgather+balanced"))
