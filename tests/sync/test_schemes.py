"""The choice of a scheme by cost: pure, and right where the answer is known."""

import pytest

from tulle.cost import Characteristics, Network
from tulle.errors import PlanError
from tulle.sync import SCHEMES, check_scheme, choose

SLOW = Network(latency_s=5e-4, bandwidth_bytes_per_s=1.2e8)


def table(rows: int, num_rows: int = 50_000, width: int = 512, ranks: int = 4) -> Characteristics:
    return Characteristics(num_rows, width, 4, (rows,) * ranks)


def test_a_few_rows_of_a_large_table_are_gathered():
    assert choose(table(1400), SLOW, 4).scheme == "allgather"


def test_an_assumed_sparse_gradient_is_made_dense():
    assert choose(table(40_000), SLOW, 4).scheme == "densify"


def test_gathering_loses_to_reducing_as_ranks_grow():
    # Densifying Assumed-sparse Tensors, figure 3: Transformer-big at 5,000 tokens a process.
    choices = [choose(table(4000, 33_708, 1024, ranks), SLOW, ranks).scheme for ranks in (2, 4, 64)]
    assert choices[0] == "allgather"
    assert choices[-1] == "densify"


@pytest.mark.parametrize(("ranks", "gathered", "reduced"), [(4, 3.0, 1.5), (64, 63.0, 2 * 63 / 64)])
def test_costs_are_those_of_the_papers(ranks, gathered, reduced):
    """Zen, table of costs: AGsparse (n - 1) d M, dense ring all-reduce 2 (n - 1) / n M."""
    look = table(rows=500, num_rows=50_000, width=512, ranks=ranks)
    d_m = look.density * look.dense_bytes
    assert SCHEMES["allgather"].cost(look, SLOW, ranks).bytes == pytest.approx(gathered * d_m, rel=0.01)
    assert SCHEMES["densify"].cost(look, SLOW, ranks).bytes == pytest.approx(reduced * look.dense_bytes, rel=0.01)


def test_seconds_are_latency_and_bytes_over_bandwidth():
    cost = SCHEMES["densify"].cost(table(500), SLOW, 4)
    assert cost.seconds == pytest.approx(6 * SLOW.latency_s + cost.bytes / SLOW.bandwidth_bytes_per_s)


def test_an_unknown_scheme_is_named_with_those_that_there_are():
    with pytest.raises(PlanError, match=r"unknown scheme 'zen', expected one of auto, allgather, densify"):
        check_scheme("zen")
