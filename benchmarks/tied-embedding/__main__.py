"""The case of *Densifying Assumed-sparse Tensors* (arXiv 1905.04035): `python benchmarks/tied-embedding`.

A Transformer's table is looked up by encoder and decoder and multiplied with by the output layer. TensorFlow took all
three gradients for sparse and laid them end to end, and Horovod gathered those of all ranks: what one rank holds
grows with the ranks. Where a dense gradient is among them, the sum is dense: it is reduced, and does not grow.

Writes `results.json` beside this file and prints the table of the README. Bytes are counted on tensors that are really
exchanged at 4 and 8 ranks, on a table a tenth as wide; they are linear in the width.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import sys
import tempfile
from pathlib import Path

import torch
from tied import ROWS, SCALE, WIDTH, Held, densify_bytes, gather_bytes, run

HERE = Path(__file__).parent
COUNTED_RANKS = (4, 8)
RANKS = (4, 8, 16, 64)


def main() -> None:
    """Count, compute, save, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.parse_args()
    counted = {ranks: count(ranks) for ranks in COUNTED_RANKS}
    rows: list[dict[str, object]] = []
    print("| ranks | gathered, MB | counted | reduced, MB | counted | ratio | `auto`'s gradient |")
    print("|---|---|---|---|---|---|---|")
    for ranks in RANKS:
        row: dict[str, object] = {
            "ranks": ranks,
            "gather_bytes": gather_bytes(ranks, WIDTH),
            "densify_bytes": densify_bytes(WIDTH),
        }
        cells = ["", "", ""]
        if ranks in counted:
            held = counted[ranks]
            row |= {"counted": held}
            cells = [
                f"{SCALE * held['gathered_bytes'] / 1e6:,.1f}",
                f"{SCALE * held['reduced_bytes'] / 1e6:,.1f}",
                f"{held['layout']}, {SCALE * held['auto_bytes'] / 1e6:,.1f} MB",
            ]
        rows.append(row)
        gathered, reduced = gather_bytes(ranks, WIDTH), densify_bytes(WIDTH)
        print(
            f"| {ranks} | {gathered / 1e6:,.1f} | {cells[0]} | {reduced / 1e6:,.1f} | {cells[1]} "
            f"| {gathered / reduced:,.1f} | {cells[2]} |"
        )
    machine = {"python": platform.python_version(), "torch": torch.__version__, "rows": ROWS, "width": WIDTH}
    results = {"machine": machine, "command": " ".join(["python", *sys.argv]), "scale": SCALE, "ranks": rows}
    (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n")


def count(ranks: int) -> Held:
    """What rank 0 of so many holds."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=run, args=(rank, ranks, folder), daemon=True) for rank in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
            if process.exitcode:
                raise SystemExit(f"a rank ended with exit code {process.exitcode}")
        return json.loads((Path(folder) / "held.json").read_text())


if __name__ == "__main__":
    main()
