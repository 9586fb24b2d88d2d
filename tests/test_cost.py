"""The cost model's plain values are the formulas that their docstrings give."""

import pytest

from tulle.cost import Characteristics, Network, exchange_cost


def test_density_is_the_mean_share_of_rows_that_a_rank_holds():
    looks = Characteristics(num_rows=1000, width=8, value_bytes=4, rows_per_rank=(100, 200, 0, 300))
    assert looks.density == pytest.approx(0.15)


@pytest.mark.parametrize(("num_rows", "rows_per_rank"), [(0, (0, 0)), (1000, ())])
def test_nothing_has_density_zero(num_rows, rows_per_rank):
    assert Characteristics(num_rows, 8, 4, rows_per_rank).density == 0.0


@pytest.mark.parametrize(("num_rows", "index_bytes"), [(1, 4), (2**31, 4), (2**31 + 1, 8)])
def test_a_row_number_takes_four_bytes_as_long_as_every_row_has_one(num_rows, index_bytes):
    looks = Characteristics(num_rows, width=16, value_bytes=2, rows_per_rank=(1,))
    assert looks.index_bytes == index_bytes
    assert looks.row_bytes == 16 * 2 + index_bytes
    assert looks.dense_bytes == num_rows * 16 * 2


def test_an_exchange_costs_its_latencies_and_its_bytes():
    network = Network(latency_s=1e-3, bandwidth_bytes_per_s=1e6)
    assert exchange_cost(5e5, 4, network).seconds == pytest.approx(0.504)
    assert exchange_cost(5e5, 4, network, rounds=1).seconds == pytest.approx(0.501)
    assert exchange_cost(2.6, 4, network).bytes == 3
    assert exchange_cost(2.6, 4, network).messages == 4


def test_where_nothing_travels_nothing_is_paid():
    alone = Network(latency_s=0.0, bandwidth_bytes_per_s=float("inf"))
    assert exchange_cost(0.0, 0, alone).seconds == 0.0
