"""Small profiles of models that nobody has, from a seed, for tests of the planner."""

import torch

from tulle.cost import Network
from tulle.workload import Cluster, Machine, ModuleProfile, OptimizerProfile, Profile, Split, TableProfile


def network(bandwidth_bytes_per_s=1.2e8):
    return Network(2e-4, bandwidth_bytes_per_s, 1e-3, 0.9 * bandwidth_bytes_per_s, 5e9, 5e9, 2e-8, pair_latency_s=1e-4)


def cluster_of(hosts, processes_per_host=1, bandwidth_bytes_per_s=1.2e8):
    machine = Machine(1e11, 1e10)
    inside = network(4 * bandwidth_bytes_per_s) if processes_per_host > 1 else None
    return Cluster(hosts, processes_per_host, machine, network(bandwidth_bytes_per_s), inside)


def pieces_of(generator, layers, tokens, width, activations):
    """An embedding, and layers that read the one before."""

    def draw(low, high):
        return float(torch.empty(1).uniform_(low, high, generator=generator))

    read_bytes = tokens * width * 4
    pieces = [ModuleProfile("embed", 1e-4, 2e-4, activations_bytes=read_bytes)]
    for layer in range(layers):
        forward_s = draw(0.5e-3, 5e-3)
        split = Split(draw(0.5, 1.0), 2 * read_bytes) if draw(0, 1) < 0.6 else None
        pieces.append(
            ModuleProfile(
                f"layers.{layer}",
                forward_s,
                2 * forward_s,
                parameters_bytes=int(draw(0.1, 3) * 2**20),
                activations_bytes=int(activations * draw(2, 10)) * read_bytes,
                reads={pieces[-1].name: read_bytes},
                split=split,
            )
        )
    return tuple(pieces)


def stream_of(generator, rows, tokens, ranks, steps=2):
    weights = 1 / (torch.arange(rows, dtype=torch.double) + 1)

    def batch():
        return torch.unique(torch.multinomial(weights, tokens, replacement=True, generator=generator))

    return tuple(tuple(batch() for _ in range(ranks)) for _ in range(steps))


def profile_of(seed=0, *, layers=3, ranks=2, rows=4000, width=32, tokens=300, is_sparse=True, tables=1, activations=1):
    generator = torch.Generator().manual_seed(seed)
    pieces = pieces_of(generator, layers, tokens, width, activations)
    stream = stream_of(generator, rows, tokens, ranks)
    found = tuple(
        TableProfile(f"embed.weight{n or ''}", rows, width, 4, is_sparse, ("rows", "columns"), "embed", stream, tokens)
        for n in range(tables)
    )
    step_s = sum(piece.forward_s + piece.backward_s + piece.parameters_bytes * 1e-9 for piece in pieces) + 1e-3
    return Profile("Net", 8, pieces, found, OptimizerProfile(2.0, 1e-9), cluster_of(ranks), step_s)
