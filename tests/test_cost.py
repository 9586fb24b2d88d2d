"""The cost model's plain values are the formulas that their docstrings give."""

from dataclasses import replace

import pytest

from tulle.cost import (
    NOTHING,
    Characteristics,
    Cost,
    Network,
    all_gather_cost,
    all_reduce_cost,
    exchange_cost,
    work_cost,
)


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


def test_an_exchange_is_paced_by_the_fuller_direction_of_the_link():
    network = Network(latency_s=1e-3, bandwidth_bytes_per_s=1e6)
    assert exchange_cost(1e5, 1, network, received_bytes=5e5).seconds == pytest.approx(0.501)
    assert exchange_cost(5e5, 1, network, received_bytes=1e5).seconds == pytest.approx(0.501)
    assert exchange_cost(1e5, 1, network, received_bytes=5e5).bytes == 100_000, "what is sent is what is counted"


def test_an_all_reduce_sends_the_tensor_almost_twice_whatever_the_ranks():
    network = Network(latency_s=1e-3, bandwidth_bytes_per_s=1e6)
    assert all_reduce_cost(1e6, network, 4) == Cost(1_500_000, 6, pytest.approx(6e-3 + 1.5))
    assert all_reduce_cost(1e6, network, 64).bytes == 2 * 63 * 10**6 // 64
    assert all_reduce_cost(1e6, network, 1) == NOTHING


def test_what_was_measured_of_the_backends_all_reduce_is_taken_for_it():
    network = Network(1e-3, 1e6, all_reduce_latency_s=2e-2, all_reduce_bytes_per_s=3e6)
    assert all_reduce_cost(1e6, network, 4).seconds == pytest.approx(0.02 + 0.5)
    assert exchange_cost(1e6, 1, network).seconds == pytest.approx(1.001), "and for nothing else"


def test_a_gather_is_as_slow_as_who_sends_or_receives_most():
    network = Network(1e-3, 1e6)
    assert all_gather_cost([1e5, 3e5, 2e5], network) == Cost(600_000, 2, pytest.approx(0.601))
    assert all_gather_cost([3e5, 0, 3e5], network).seconds == pytest.approx(0.601)
    assert all_gather_cost([1e5], network) == all_gather_cost([], network) == NOTHING


def test_what_is_gathered_through_memory_is_written_once():
    network = Network(1e-3, 1e6, gather_bytes_per_s=2e6)
    assert all_gather_cost([1e5, 3e5, 2e5], network) == Cost(600_000, 2, pytest.approx(1e-3 + 0.25))
    assert all_gather_cost([0, 0, 9e5], network).seconds == pytest.approx(1e-3 + 0.45)


def test_what_is_gathered_in_levels_crosses_to_each_other_host_once():
    network = Network(1e-3, 1e6, gather_bytes_per_s=3e6, local_ranks=2)
    assert all_gather_cost([1e5] * 6, network).seconds == pytest.approx(1e-3 + 5e5 / 3e6), "a rank gets five parts"
    on_the_link = 2 * 6e5  # of the first host, to both others
    assert all_gather_cost([4e5, 2e5, 1e5, 0, 0, 0], network).seconds == pytest.approx(1e-3 + on_the_link * 5 / 4 / 3e6)
    assert all_gather_cost([4e5, 2e5], network).seconds == pytest.approx(1e-3 + 4e5 / 3e6), "no other host"


def test_a_faster_network_has_the_same_latencies_and_work():
    network = Network(1e-3, 1e6, sum_bytes_per_s=7.0, gather_bytes_per_s=2e6)
    assert network.faster(3) == replace(network, bandwidth_bytes_per_s=3e6, gather_bytes_per_s=6e6)


def test_local_work_costs_only_where_its_speed_was_measured():
    measured = Network(0.0, 1.0, sum_bytes_per_s=4e6, copy_bytes_per_s=1e6)
    assert work_cost(measured, summed_bytes=2e6, copied_bytes=3e6) == Cost(0, 0, pytest.approx(3.5))
    assert work_cost(Network(0.0, 1.0), summed_bytes=2e6, copied_bytes=3e6) == NOTHING


def test_costs_add_up():
    assert Cost(1, 2, 3.0) + Cost(10, 20, 30.0) == Cost(11, 22, 33.0)
    assert Cost(1, 2, 3.0) + NOTHING == Cost(1, 2, 3.0)


def test_a_gradient_looks_the_same_on_more_ranks_and_densifies_on():
    looks = Characteristics(num_rows=10_000, width=8, value_bytes=4, rows_per_rank=(1000, 1200))
    more = looks.at(8)
    assert more.rows_per_rank == (1000, 1200) * 4
    assert more.density == pytest.approx(looks.density)
    assert looks.densification_ratio < more.densification_ratio < 8
    assert looks.at(2) is looks
    assert looks.at(1).rows_per_rank == (1000,)
    assert list(more.densification_curve) == sorted(more.densification_curve)


@pytest.mark.parametrize("rows_per_rank", [(0, 0, 0), (50,) * 3, (0, 50, 1)])
def test_ratios_stay_within_their_bounds(rows_per_rank):
    looks = Characteristics(num_rows=50, width=8, value_bytes=4, rows_per_rank=rows_per_rank)
    assert 0.0 <= looks.overlap_ratio <= 1.0
    assert 1.0 <= looks.densification_ratio <= 3.0
    assert 1.0 <= looks.skewness_ratio <= 3.0
    assert looks.union_rows == max(rows_per_rank)
