"""Planning for a thousand devices takes seconds, not hours."""

import time
from dataclasses import replace
from functools import partial

import pytest
import torch

from profiles import network, stream_of
from tulle.plan import best_plan, explained, lower
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


def recommender(tables=26):
    """Many tables, from a few rows to very many, each looked up by a piece of its own."""
    generator = torch.Generator().manual_seed(0)
    sizes = [int(10 ** (1 + 4.7 * number / tables)) for number in range(tables)]
    pieces = [ModuleProfile(f"tables.{number}", 1e-4, 2e-4, activations_bytes=2**20) for number in range(tables)]
    reads = {piece.name: 2**17 for piece in pieces}
    pieces.append(ModuleProfile("tower", 5e-3, 10e-3, parameters_bytes=2**22, activations_bytes=2**22, reads=reads))
    streams = [stream_of(generator, rows, 2048, ranks=2) for rows in sizes]
    found = tuple(
        TableProfile(f"{piece.name}.weight", rows, 16, 4, True, ("rows", "columns"), piece.name, stream)
        for piece, rows, stream in zip(pieces, sizes, streams, strict=False)
    )
    cluster = Cluster(8, 1, Machine(1e11, 1e10, 2**33), network(1.25e9))
    return Profile("DeepFM", 2048, tuple(pieces), found, OptimizerProfile(2.0, 1e-9), cluster, 0.03)


@pytest.mark.slow
def test_many_tables_are_planned_and_explained_within_ten_seconds():
    profile = recommender()
    began_s = time.process_time()
    plan = best_plan(profile, profile.cluster)
    told = explained(plan, profile.cluster, partial(best_plan, profile), memory_bytes=2**33)
    assert time.process_time() - began_s < 10
    assert told.prediction.is_exact
