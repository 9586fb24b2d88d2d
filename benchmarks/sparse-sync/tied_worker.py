"""A table with a sparse and a dense gradient at once, as tied embeddings have: to gather it, or to make it dense.

*Densifying Assumed-sparse Tensors* (arXiv 1905.04035): TensorFlow laid both gradients end to end as rows, and Horovod
gathered those of all ranks, 11.5 GB at 64 ranks where 138 MB can be reduced. The table is that of Transformer-big.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from job import forget_peak, peak_resident_bytes, resident_bytes, write_json
from torch import Tensor

import tulle
from tulle.comm import all_gather, barrier, probe
from tulle.comm.traffic import now_s
from tulle.mesh import Axis
from tulle.sync import characteristics, choose

RANKS = (4, 8, 16, 64)
PIECE_ROWS = 2_048


def main() -> None:
    """Measure on the ranks that there are, compute for the others, and write `tied.json` from rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=33_708)
    parser.add_argument("--width", type=int, default=1_024)
    parser.add_argument("--tokens", type=int, default=10_000, help="of source and target together")
    options = parser.parse_args()
    torch.set_num_threads(1)
    axis = tulle.init(data=-1)["data"]
    generator = torch.Generator().manual_seed(axis.rank)
    looked_up = torch.randint(options.rows, (options.tokens,), generator=generator)
    indices = torch.cat([torch.arange(options.rows), looked_up])
    # Zeros cost as much as any other values to send, and nothing to draw.
    rows = tulle.RowSparse(indices, torch.zeros(len(indices), options.width), options.rows)
    lines: list[dict[str, object]] = []
    looks, network = characteristics(rows, axis), probe(axis)
    for ranks in sorted({*RANKS, axis.size}):
        line: dict[str, object] = {"ranks": ranks}
        line["gather_bytes"] = ranks * len(indices) * options.width * 4
        line["densify_bytes"] = options.rows * options.width * 4
        choice = choose(looks.at(ranks), network, ranks)
        line["auto"] = choice.scheme
        line["predicted_s"] = {name: cost.seconds for name, cost in choice.candidates}
        lines.append(line | (measured(rows, axis) if ranks == axis.size else {}))
    if axis.rank == 0:
        write_json(options.output / "tied.json", {"ranks": axis.size, "lines": lines})


def measured(rows: tulle.RowSparse, axis: Axis) -> dict[str, float]:
    """What both ways take and hold on the ranks that there are."""
    gathered = hold(lambda: gather(rows.values, axis), axis)
    densified = hold(lambda: tulle.sync.all_reduce(rows.to_dense(), axis), axis)
    return {f"gather_{name}": value for name, value in gathered.items()} | {
        f"densify_{name}": value for name, value in densified.items()
    }


def gather(values: Tensor, axis: Axis) -> Tensor:
    """`[ranks, rows, width]`, piece by piece: gloo holds a second copy of what it gathers, 1.4 GB at 8 ranks."""
    result = values.new_empty(axis.size, *values.shape)
    for begin in range(0, len(values), PIECE_ROWS):
        piece = values[begin : begin + PIECE_ROWS]
        result[:, begin : begin + PIECE_ROWS] = all_gather(piece, axis, label="gather").wait().view(-1, *piece.shape)
    return result


def hold(exchange: Callable[[], Tensor], axis: Axis) -> dict[str, float]:
    """Seconds of an exchange, bytes of its result, and by how much the process' memory grew meanwhile at most."""
    forget_peak()
    before_bytes = resident_bytes()
    barrier(axis)
    begin_s = now_s()
    result = exchange()
    seconds = now_s() - begin_s
    return {"s": seconds, "held_bytes": result.nbytes, "grown_bytes": peak_resident_bytes() - before_bytes}


if __name__ == "__main__":
    main()
