"""Every scheme of tulle, and `auto`, on every point of the grid, in interleaved rounds, in one set of processes.

Measured is the exchange alone, from the moment when all ranks have their rows: that is what `cost` predicts. `auto` is
timed by itself, looking out for drift and taking its scheme as `tulle.sync.all_reduce` and `tulle.distribute` do.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from grid import GRID, Point, draw
from job import write_json
from race import race

import tulle
from tulle.comm import all_gather, barrier, probe, traffic
from tulle.cost import Characteristics
from tulle.mesh import Axis
from tulle.sync import AUTO, SCHEMES, Chooser, Table, gather_presence, sum_gradients


def main() -> None:
    """Measure, and write `grid.json` from rank 0 after every point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=10.0, help="a doubling of rounds may take (%(default)s)")
    parser.add_argument("--points", type=int, default=len(GRID), help="only the first so many")
    options = parser.parse_args()
    torch.set_num_threads(1)
    axis = tulle.init(data=-1)["data"]
    measured: list[dict[str, object]] = []
    for number, point in enumerate(GRID[: options.points]):
        measured.append(measure(point, axis, options.seconds, seed=number))
        if axis.rank == 0:
            print(f"{number + 1}/{len(GRID[: options.points])} {point}", flush=True)
            network = asdict(probe(axis))
            write_json(options.output / "grid.json", {"ranks": axis.size, "network": network, "points": measured})


def measure(point: Point, axis: Axis, budget_s: float, *, seed: int) -> dict[str, object]:
    """One point: by scheme what was predicted and what was measured. Every rank must call it."""
    exchange = Exchange.of(point, axis, seed)
    looks = exchange.looks
    for name in (AUTO, *SCHEMES):
        exchange.time_s(name)
    seconds = race(AUTO, [*SCHEMES], exchange.time_s, budget_s)
    by_scheme: dict[str, object] = {}
    for name, scheme in SCHEMES.items():
        cost = scheme.cost(looks, probe(axis), axis.size)
        by_scheme[name] = {
            "measured_s": median(seconds[name]),
            "all_measured_s": seconds[name],
            "measured_bytes": exchange.sent_bytes[name],
            "predicted_s": cost.seconds,
            "predicted_bytes": cost.bytes,
        }
    shown = {"overlap": looks.overlap_ratio, "densification": looks.densification_ratio, "skew": looks.skewness_ratio}
    auto = {"auto": exchange.chooser.scheme, "auto_s": seconds[AUTO]}
    return {"point": asdict(point), "measured": shown, "schemes": by_scheme} | auto


@dataclass
class Exchange:
    """The gradients of one point, to be summed again and again."""

    gradient: tulle.RowSparse
    table: Table
    looks: Characteristics
    chooser: Chooser
    axis: Axis
    sent_bytes: dict[str, int] = field(default_factory=dict)
    """By way, of the rank that sends most."""

    @staticmethod
    def of(point: Point, axis: Axis, seed: int) -> Exchange:
        """Every rank must call it."""
        indices = torch.from_numpy(draw(point, axis.size, seed)[axis.rank])
        values = torch.randn(len(indices), point.width)
        gradient = tulle.RowSparse.trusted(indices, values, point.num_rows, is_coalesced=True)
        table = Table("grid", point.num_rows, point.width, values.dtype, values.device)
        held = [point.rows_per_rank] * axis.size
        [presence] = gather_presence([indices], [table], [[rows] for rows in held], axis)
        looks = table.characteristics(held, presence)
        return Exchange(gradient, table, looks, Chooser(probe(axis), axis.size), axis)

    def time_s(self, way: str) -> float:
        """Seconds of the slowest rank. Every rank must call it."""
        barrier(self.axis)
        before = traffic.total.bytes_sent
        begin_s = perf_counter()
        scheme = self._chosen() if way == AUTO else way
        counts = [[rows] for rows in self.looks.rows_per_rank]
        sum_gradients([self.gradient], [self.table], counts, [scheme], self.axis).wait()
        seen = torch.tensor([perf_counter() - begin_s, traffic.total.bytes_sent - before], dtype=torch.float64)
        heard = all_gather(seen, self.axis, label="benchmark").wait()
        self.sent_bytes[way] = int(heard[:, 1].max())
        return float(heard[:, 0].max())

    def _chosen(self) -> str:
        if self.chooser.is_due(self.looks.rows_per_rank):
            self.chooser.choose([self.looks])
        assert self.chooser.scheme is not None, "the first choice is always due"
        return self.chooser.scheme


if __name__ == "__main__":
    main()
