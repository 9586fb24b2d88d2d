"""What each way of saving memory saves, and what it costs: `python benchmarks/memory`.

Each way trains the same language model on a batch of the same size a rank; the peak is the allocator's, as torch's
profiler counts it. Writes `results.json` beside this file and prints the table of the README.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import sys
import tempfile
from pathlib import Path

import torch
from job import LAYERS, LENGTH, SAMPLES, WAYS, WIDTH, WORDS, Row, run

HERE = Path(__file__).parent


def main() -> None:
    """Run every way, interleaved over some rounds, save, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rows: list[Row] = []
    for _ in range(options.rounds):
        for ranks in options.ranks:
            ways = [way for way in WAYS if ranks > 1 or way in ("nothing", "precision", "recompute")]
            rows += [one(ranks, way) for way in ways]
    model = {"words": WORDS, "width": WIDTH, "layers": LAYERS, "length": LENGTH, "samples": SAMPLES}
    machine = {"python": platform.python_version(), "torch": torch.__version__, "cores": os.cpu_count()}
    results = {"machine": machine, "command": " ".join(["python", *sys.argv]), "model": model, "rows": rows}
    (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    show(rows)


def one(ranks: int, way: str) -> Row:
    """One way on so many ranks: what rank 0 wrote."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=run, args=(rank, ranks, way, folder), daemon=True) for rank in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
            if process.exitcode:
                raise SystemExit(f"{way} on {ranks} ranks: a rank ended with exit code {process.exitcode}")
        return torch.load(Path(folder) / "row.pt", weights_only=True)


def show(rows: list[Row]) -> None:
    """Print the table: medians are of rounds, ratios of what stands beside them in a round."""
    print("| ranks | way | peak, MB | of nothing | estimate, MB | estimate / peak | step / nothing, by round |")
    print("|---|---|---|---|---|---|---|")
    for ranks, way in dict.fromkeys((row["ranks"], row["way"]) for row in rows):
        mine = [row for row in rows if (row["ranks"], row["way"]) == (ranks, way)]
        base = [row for row in rows if (row["ranks"], row["way"]) == (ranks, "nothing")]
        peak, estimated = mine[0]["measured_bytes"], mine[0]["estimate_bytes"]
        ratios = ", ".join(f"{a['step_s'] / b['step_s']:.2f}" for a, b in zip(mine, base, strict=True))
        print(
            f"| {ranks} | {way} | {peak / 1e6:,.0f} | {peak / base[0]['measured_bytes']:.2f} "
            f"| {estimated / 1e6:,.0f} | {estimated / peak:.2f} | {ratios} |"
        )


if __name__ == "__main__":
    main()
