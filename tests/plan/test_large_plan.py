"""Planning for a thousand devices takes seconds, not hours."""

import time
from dataclasses import replace

import pytest
import torch

from profiles import network, stream_of
from tulle.plan import best_plan, lower
from tulle.simulate import run
from tulle.workload import Cluster, Machine, ModuleProfile, OptimizerProfile, Profile, Split, TableProfile

WIDTH, TOKENS, ROWS = 512, 4096, 1_000_000


def transformer(layers=24):
    """An encoder-decoder's worth of layers, all split by Megatron's rule, and two large vocabularies."""
    read_bytes = TOKENS * WIDTH * 4
    pieces = [ModuleProfile("embed", 1e-3, 2e-3, activations_bytes=read_bytes)]
    for layer in range(layers):
        pieces.append(
            ModuleProfile(
                f"layers.{layer}",
                10e-3,
                20e-3,
                parameters_bytes=12 * WIDTH**2 * 4,
                activations_bytes=16 * read_bytes,
                reads={pieces[-1].name: read_bytes},
                split=Split(0.95, 2 * read_bytes),
            )
        )
    stream = stream_of(torch.Generator().manual_seed(0), ROWS, TOKENS, ranks=8)
    tables = tuple(
        TableProfile(f"{name}.weight", ROWS, WIDTH, 4, True, ("rows", "columns"), "embed", stream, TOKENS)
        for name in ("source", "target")
    )
    machine = Machine(1e13, 1e12, memory_bytes=32 * 2**30)
    across = replace(network(12.5e9), latency_s=2e-5, all_reduce_latency_s=1e-4, pair_latency_s=1e-5)
    inside = replace(across, bandwidth_bytes_per_s=1e11, all_reduce_bytes_per_s=1e11)
    cluster = Cluster(128, 8, machine, across, inside)
    step_s = sum(piece.forward_s + piece.backward_s for piece in pieces) + 5e-3
    return Profile("Transformer", 32, tuple(pieces), tables, OptimizerProfile(2.0, 1e-12), cluster, step_s)


@pytest.mark.slow
def test_a_thousand_devices_are_planned_within_a_minute():
    profile = transformer()
    began_s = time.process_time()
    plan = best_plan(profile, profile.cluster)
    assert time.process_time() - began_s < 60
    assert plan.prediction.bound_s > 0.5 * plan.prediction.step_s
    assert max(plan.prediction.memory_bytes) <= 32 * 2**30
    forecast = run(lower(plan, profile, profile.cluster))
    assert forecast.step_s == pytest.approx(plan.prediction.step_s)


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [1, 8])
def test_a_few_hosts_are_planned_within_ten_seconds(hosts):
    profile = transformer(6)
    cluster = replace(profile.cluster, hosts=hosts, processes_per_host=1, inside=None)
    began_s = time.process_time()
    best_plan(profile, cluster)
    assert time.process_time() - began_s < 10
