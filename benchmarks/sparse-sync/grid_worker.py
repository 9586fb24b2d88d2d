"""Every scheme of tulle on every point of the grid, in interleaved rounds, in one set of processes.

Measured is the exchange alone, from the moment when all ranks have their rows: that is what `cost` predicts.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from statistics import median

import torch
from grid import GRID, Point, draw
from job import write_json
from torch import Tensor

import tulle
from tulle.comm import all_gather, barrier, probe, traffic
from tulle.comm.traffic import now_s
from tulle.mesh import Axis
from tulle.sync import SCHEMES, Table, characteristics, choose

LEAST_ROUNDS, MOST_ROUNDS = 5, 41


def main() -> None:
    """Measure, and write `grid.json` from rank 0 after every point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=4.0, help="for a point, at 5 to 41 rounds (%(default)s)")
    parser.add_argument("--points", type=int, default=len(GRID), help="only the first so many")
    options = parser.parse_args()
    torch.set_num_threads(1)
    axis = tulle.init(data=-1)["data"]
    measured = []
    for number, point in enumerate(GRID[: options.points]):
        measured.append(measure(point, axis, options.seconds, seed=number))
        if axis.rank == 0:
            print(f"{number + 1}/{len(GRID[: options.points])} {point}", flush=True)
    if axis.rank == 0:
        network = asdict(probe(axis))
        write_json(options.output / "grid.json", {"ranks": axis.size, "network": network, "points": measured})


def measure(point: Point, axis: Axis, budget_s: float, *, seed: int) -> dict[str, object]:
    """One point: by scheme what was predicted and what was measured. Every rank must call it."""
    indices = torch.from_numpy(draw(point, axis.size, seed)[axis.rank])
    values = torch.randn(len(indices), point.width)
    looks = characteristics(tulle.RowSparse(indices, values, point.num_rows), axis)
    table = Table("grid", point.num_rows, point.width, values.dtype, values.device)
    network = probe(axis)
    costs = {name: scheme.cost(looks, network, axis.size) for name, scheme in SCHEMES.items()}
    # By the prediction, as all ranks must do the same: a point of 1 ms needs more rounds than one of 1 s.
    predicted_s = sum(cost.seconds for cost in costs.values())
    repeats = max(LEAST_ROUNDS, min(MOST_ROUNDS, round(budget_s / max(predicted_s, 1e-6))))
    by_scheme: dict[str, dict[str, object]] = {}
    runs: dict[str, list[tuple[float, int]]] = {name: [] for name in SCHEMES}
    for repeat in range(repeats + 1):
        # Every scheme once, each time another one first: what disturbs hits all alike.
        names = [*SCHEMES][repeat % len(SCHEMES) :] + [*SCHEMES][: repeat % len(SCHEMES)]
        for name in names:
            run = exchange(name, indices, values, table, looks.rows_per_rank, axis)
            if repeat:
                runs[name].append(_slowest(run, axis))
    for name, cost in costs.items():
        seconds = [second for second, _ in runs[name]]
        by_scheme[name] = {
            "measured_s": median(seconds),
            "all_measured_s": seconds,
            "measured_bytes": max(sent for _, sent in runs[name]),
            "predicted_s": cost.seconds,
            "predicted_bytes": cost.bytes,
        }
    shown = {"overlap": looks.overlap_ratio, "densification": looks.densification_ratio, "skew": looks.skewness_ratio}
    chosen = choose(looks, network, axis.size).scheme
    return {"point": asdict(point), "measured": shown, "auto": chosen, "schemes": by_scheme}


def exchange(
    name: str, indices: Tensor, values: Tensor, table: Table, counts: tuple[int, ...], axis: Axis
) -> tuple[float, int]:
    """Seconds and counted bytes of one exchange on this rank."""
    barrier(axis)
    before = traffic.total.bytes_sent
    begin_s = now_s()
    SCHEMES[name].route(indices, table, counts, axis).wait().all_reduce(values).wait()
    return now_s() - begin_s, traffic.total.bytes_sent - before


def _slowest(run: tuple[float, int], axis: Axis) -> tuple[float, int]:
    """The seconds of the slowest rank, the bytes of the one that sent most."""
    heard = all_gather(torch.tensor(run, dtype=torch.float64), axis, label="benchmark").wait()
    return float(heard[:, 0].max()), int(heard[:, 1].max())


if __name__ == "__main__":
    main()
