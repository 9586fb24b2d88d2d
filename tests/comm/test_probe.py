"""The probe measures a network once, and all ranks go by the same numbers."""

import math
import os
import sys
from dataclasses import astuple

import pytest

import tulle
from pretended_hosts import pretend_hosts
from rank_process import patches
from ranks import on_ranks
from resident import peak_over_now
from tulle import comm
from tulle.shared_memory import SWITCH


@on_ranks(2, 3, 4, probes=True)
def test_all_ranks_get_the_same_plausible_numbers():
    axis = tulle.init(data=-1)["data"]
    network = comm.probe(axis)
    heard = comm.gather_values(astuple(network), axis, label="here")
    assert heard == [heard[0]] * axis.size
    assert 0 < network.latency_s < 5
    assert 0 < network.all_reduce_latency_s < 5
    for rate in (
        network.bandwidth_bytes_per_s,
        network.all_reduce_bytes_per_s,
        network.sum_bytes_per_s,
        network.copy_bytes_per_s,
    ):
        assert 1e4 < rate < math.inf


@on_ranks(2, probes=True)
def test_a_disturbed_measurement_does_not_promise_an_endless_bandwidth():
    module = sys.modules["tulle.comm.probe"]  # the package has the function by this name
    with pytest.MonkeyPatch.context() as patch:
        # On a busy machine the small exchange can take longer than the large one, and so can the all-reduce.
        patch.setattr(
            module, "_times", lambda work, repeats, axis: [0.004 if repeats == module._SMALL_REPEATS else 0.003]
        )
        network = comm.probe(tulle.init(data=-1)["data"])
    assert network.latency_s == network.all_reduce_latency_s == 0.004
    assert network.bandwidth_bytes_per_s < 10 * module._LARGE_BYTES / 0.003
    assert network.all_reduce_bytes_per_s < 10 * module._LARGE_BYTES / 0.003


@on_ranks(2, probes=True)
def test_every_number_is_of_its_own_measurement():
    module = sys.modules["tulle.comm.probe"]
    in_turn = iter([[65.536e-3], [4e-3], [5e-3], [1e-3], [11e-3], [2e-3], [3e-3], [23e-3], [6e-3]])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_times", lambda work, repeats, axis: next(in_turn))
        network = comm.probe(tulle.init(data=-1)["data"])
    work_bytes = module._WORK_ROWS * module._WORK_WIDTH * 4
    assert network.latency_s == 1e-3
    assert network.bandwidth_bytes_per_s == pytest.approx(module._LARGE_BYTES / 10e-3)
    assert network.pair_latency_s == 2e-3
    assert network.all_reduce_latency_s == 3e-3
    assert network.all_reduce_bytes_per_s == pytest.approx(module._LARGE_BYTES / 20e-3)
    if os.environ.get(SWITCH) != "0":
        assert network.gather_bytes_per_s == pytest.approx(module._LARGE_BYTES / 5e-3)
    assert network.number_s == pytest.approx(1e-6)
    assert network.sum_bytes_per_s == pytest.approx(work_bytes / 4e-3)
    assert network.copy_bytes_per_s == pytest.approx(work_bytes / 5e-3)


@on_ranks(4, probes=True)
@pytest.mark.skipif(os.environ.get(SWITCH) == "0", reason="ranks are told not to share memory")
def test_what_goes_to_a_host_once_has_a_rate_of_its_own_and_all_ranks_work_at_once():
    pretend_hosts(2)
    module = sys.modules["tulle.comm.probe"]
    patches.setattr(module, "_LARGE_REPEATS", 1)
    together = []
    times = module._times
    patches.setattr(
        module, "_times", lambda work, repeats, axis: [together.append(axis.size), times(work, repeats, axis)][1]
    )
    network = comm.probe(tulle.init(data=-1)["data"])
    assert network.gather_bytes_per_s is not None
    assert network.inside.gather_bytes_per_s is not None
    assert network.across.gather_bytes_per_s is None
    for nested in (network.inside, network.across):
        assert (nested.sum_bytes_per_s, nested.copy_bytes_per_s) == (network.sum_bytes_per_s, network.copy_bytes_per_s)
    assert {*together} == {4}


@on_ranks(2, probes=True)
def test_an_axis_is_measured_once():
    axis = tulle.init(data=-1)["data"]
    network = comm.probe(axis)
    messages = comm.traffic.total.messages
    assert comm.probe(axis) is network
    assert comm.traffic.total.messages == messages


@on_ranks(1, probes=True)
def test_alone_nothing_is_sent_and_everything_is_free():
    messages = comm.traffic.total.messages
    network = comm.probe(tulle.init(data=-1)["data"])
    assert (network.latency_s, network.bandwidth_bytes_per_s) == (0.0, float("inf"))
    assert comm.traffic.total.messages == messages


@on_ranks(2, probes=True)
def test_measuring_takes_little_memory_and_keeps_none():
    axis = tulle.init(data=-1)["data"]
    grown = peak_over_now(lambda: comm.probe(axis))
    assert grown < 56 * 2**20  # with what ranks share, which counts in each
    assert not [kept for kept in axis.kept.values() if isinstance(kept, list) and kept]
