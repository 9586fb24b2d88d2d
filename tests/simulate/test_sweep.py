"""Clusters that nobody has to have are made of what was measured, and one after the other is simulated."""

import json
from dataclasses import replace

import pytest

from tulle.cost import Network, all_gather_cost
from tulle.errors import PlanError
from tulle.simulate import (
    Change,
    Noise,
    Point,
    Step,
    Stragglers,
    Task,
    Weather,
    another,
    changes,
    run,
    sweep,
    telling_ranks,
    trace,
)
from tulle.workload import Cluster, Machine

MACHINE = Machine(1e12, 1e11)
MEASURED = Cluster(
    2,
    2,
    MACHINE,
    across=Network(5e-4, 1e8, all_reduce_latency_s=1e-3, all_reduce_bytes_per_s=9e7, sum_bytes_per_s=5e9),
    inside=Network(1e-4, 1e10),
    probed_ranks=2,
)


def all_reduced(cluster, batch):
    """A step that computes a millisecond a sample, and all-reduces a megabyte."""
    network = cluster.network(cluster.ranks)
    seconds = 1e6 / network.all_reduce_bytes_per_s if cluster.ranks > 1 else 0.0
    computed = Task("backward", "device", 1e-3 * batch / cluster.ranks)
    return Step(
        {"data": cluster.ranks}, (computed, Task("all-reduce", "link", seconds, (0,), axis="data", kind="dense"))
    )


def test_without_changes_it_is_the_cluster_that_was_measured():
    assert another(MEASURED, Change()) == MEASURED


def test_what_is_told_of_the_network_takes_the_place_of_what_was_measured():
    found = another(MEASURED, Change(hosts=300, processes_per_host=4, bandwidth_bytes_per_s=12.5e9, latency_s=2e-6))
    assert found.ranks == 1200
    assert found.across.bandwidth_bytes_per_s == 12.5e9
    assert found.across.all_reduce_bytes_per_s is None
    assert found.across.pair_latency_s == 2e-6
    assert found.across.latency_s == pytest.approx(11 * 2e-6)  # 2^11 > 1,200 ranks
    assert found.across.all_reduce_latency_s == pytest.approx(22 * 2e-6)
    assert found.across.sum_bytes_per_s == 5e9, "what a rank does by itself stays as measured"
    assert found.inside == MEASURED.inside
    assert found.probed_ranks is None


def test_measured_latencies_grow_with_the_hosts():
    small, large = (another(MEASURED, Change(hosts=hosts)).network(2 * hosts) for hosts in (2, 16))
    assert large.all_reduce_latency_s == pytest.approx(15 * small.all_reduce_latency_s)


def test_where_nothing_is_known_inside_hosts_it_is_as_across():
    flat = Cluster(2, 1, MACHINE, across=Network(5e-4, 1e8))
    found = another(flat, Change(processes_per_host=4, bandwidth_bytes_per_s=1e9))
    assert found.inside == found.across
    faster = another(flat, Change(processes_per_host=4, inside_bandwidth_bytes_per_s=1e10))
    assert faster.inside.bandwidth_bytes_per_s == 1e10


def test_ranks_of_a_host_share_its_link():
    """An exchange of all with all by 4 ranks a host has about a quarter of the link for each; a ring has all of it."""
    fast_inside = Change(hosts=100, processes_per_host=4, bandwidth_bytes_per_s=1e9)
    network = another(MEASURED, fast_inside).network(400)
    assert network.bandwidth_bytes_per_s == pytest.approx(1e9 / 4, rel=0.02)
    assert network.all_reduce_bytes_per_s == 1e9
    beside = another(MEASURED, fast_inside).network(100, stride=4)  # four groups, each with one rank a host
    assert beside.all_reduce_bytes_per_s or beside.bandwidth_bytes_per_s == pytest.approx(1e9 / 4)


def test_where_ranks_of_a_host_reduce_first_it_is_sent_once_what_they_gather_and_less_of_what_they_reduce():
    """Two hosts of four ranks: half of the parts cross each link once, where each rank would send its own to four."""
    flat = Cluster(2, 4, MACHINE, across=Network(5e-4, 1e9), inside=Network(1e-5, 1e10))
    apart, together = flat.network(8), replace(flat, reduces_inside=True).network(8)
    assert apart.gather_bytes_per_s is None
    assert together.gather_bytes_per_s == pytest.approx(4 * apart.bandwidth_bytes_per_s)
    assert all_gather_cost([1e8] * 8, together).seconds == pytest.approx(4e8 / 1e9, rel=0.01)
    assert together.all_reduce_bytes_per_s == pytest.approx(1e9 * 7 / 4)
    assert together.bandwidth_bytes_per_s == apart.bandwidth_bytes_per_s


def test_a_cluster_of_nothing_is_refused():
    with pytest.raises(PlanError, match="hosts = 0: a positive number is needed"):
        Change(hosts=0)


def test_a_sweep_goes_through_all_combinations_the_last_fastest():
    found = changes(Change(latency_s=1e-6), {"hosts": [1, 2], "bandwidth_bytes_per_s": [1e9, 1e10]})
    assert [(one.hosts, one.bandwidth_bytes_per_s) for one in found] == [(1, 1e9), (1, 1e10), (2, 1e9), (2, 1e10)]
    with pytest.raises(PlanError, match="cannot sweep over 'colour': hosts, processes_per_host"):
        changes(Change(), {"colour": [1]})


def test_weak_scaling_loses_what_the_all_reduce_takes():
    over = changes(Change(processes_per_host=1), {"hosts": [1, 8]})
    one, eight = sweep(MEASURED, over, all_reduced, lambda cluster: 10 * cluster.ranks)
    assert one.forecast.step_s == pytest.approx(0.010)
    assert eight.forecast.step_s == pytest.approx(0.010 + 1e6 / 9e7)
    assert eight.batch == 80
    assert eight.efficiency(one) == pytest.approx(0.010 / (0.010 + 1e6 / 9e7))
    assert one.efficiency(one) == 1.0


def test_strong_scaling_keeps_the_batch():
    over = changes(Change(processes_per_host=1), {"hosts": [1, 8]})
    one, eight = sweep(MEASURED, over, all_reduced, lambda _: 80)
    assert one.forecast.step_s == pytest.approx(0.080)
    assert eight.forecast.step_s == pytest.approx(0.010 + 1e6 / 9e7)
    assert eight.efficiency(one) == pytest.approx(0.080 / (8 * (0.010 + 1e6 / 9e7)))


def test_weather_costs_time():
    step = all_reduced(MEASURED, 40)
    fair, foul = Weather(), Weather(Noise(0.1), Stragglers(0.25, 2.0))
    assert len(fair.run(step).steps_s) == 1
    assert len(foul.run(step).steps_s) == 20
    assert foul.run(step).step_s > 1.5 * 0.010 > fair.run(step).step_s - 1e6 / 9e7


def test_a_timeline_has_a_process_a_rank_with_a_thread_for_each_resource():
    step = Step(
        {"pipe": 2, "data": 2},
        (
            Task("forward", "device", 1.0, stage=0),
            Task("send", "link", 0.5, (0,), stage=0, kind="pipe", sent_bytes=7, micro_batch=0),
            Task("forward", "device", 1.0, (1,), stage=1),
            Task("nothing", "link", 0.0),
        ),
    )
    found = trace(run(step), telling_ranks(run(step)))
    json.dumps(found)
    events = [event for event in found["traceEvents"] if event["ph"] == "X"]
    assert [(event["pid"], event["tid"], event["name"], event["ts"]) for event in events] == [
        (0, 0, "forward", 0.0),
        (0, 1, "send", 1e6),
        (2, 0, "forward", 1.5e6),
    ]
    assert events[1]["args"] == {"kind": "pipe", "sent_bytes": 7, "micro_batch": 0}
    names = {event["pid"]: event["args"]["name"] for event in found["traceEvents"] if event["name"] == "process_name"}
    assert names == {0: "rank 0, simulated", 2: "rank 2, simulated"}


def test_the_slowest_rank_is_among_those_whose_timeline_is_told():
    step = Step({"data": 50}, (Task("forward", "device", 1.0),))
    forecast = run(step, stragglers=Stragglers(0.02, 3.0))
    slow = next(rank for rank in range(50) if forecast.timeline(rank)[0].end_s == 3.0)
    assert telling_ranks(forecast) == sorted({0, slow})


def test_a_point_tells_samples_a_second():
    point = Point(MEASURED, 40, run(Step({"data": 4}, (Task("forward", "device", 0.5),))))
    assert point.samples_per_s == 80.0


def test_groups_of_ranks_that_lie_on_two_hosts_send_between_them():
    three = Cluster(2, 3, MACHINE, across=Network(5e-4, 1e8), inside=Network(1e-4, 1e10))
    assert three.network(2).bandwidth_bytes_per_s == 1e8, "ranks 2 and 3 are neighbours, on two hosts"
    assert three.network(3).bandwidth_bytes_per_s == 1e10
    assert replace(three, hosts=1).network(2).bandwidth_bytes_per_s == 1e10
