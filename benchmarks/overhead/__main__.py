"""Measures what tulle costs beside plain PyTorch and DDP: `python benchmarks/overhead`.

Each row is a set of ranks of its own, started by torchrun; the two ways of a row are timed in turn. Writes
`results.json` beside this file and prints the table of the README.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

HERE = Path(__file__).parent
PAIRS = [
    ("chain", 1, "tulle", "plain"),
    ("translator", 1, "tulle", "plain"),
    ("recommender", 1, "tulle", "plain"),
    ("many", 2, "tulle", "ddp"),
    ("recommender", 2, "tulle", "ddp"),
    ("features", 2, "tulle", "ddp"),
    ("few", 2, "tulle", "ddp"),
    ("chain", 4, "tulle", "ddp"),
    ("translator", 4, "tulle", "ddp"),
    ("recommender", 4, "tulle", "ddp"),
    ("features", 4, "tulle", "ddp"),
    ("few", 4, "tulle", "ddp"),
]
MEMORY = [(workload, 4, way) for workload in ("chain", "translator", "recommender") for way in ("ddp", "tulle")]


def main() -> None:
    """Measure, save, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each row (%(default)s)")
    parser.add_argument("--rounds", type=int, default=20, help="pairs in a run (%(default)s)")
    parser.add_argument("--only", metavar="MODEL:RANKS", help="this row alone, many:2 say; the others stay as they are")
    options = parser.parse_args()
    path = HERE / "results.json"
    before = json.loads(path.read_text()) if options.only else {}
    times, memory = before.get("times", []), before.get("memory", [])
    machine = {
        "processor": processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "command": " ".join(["python", *sys.argv]),
    }
    own = {"machine": machine | {"load": os.getloadavg()[0]}} if options.only else {}
    for workload, ranks, way, baseline in PAIRS:
        if options.only not in (None, f"{workload}:{ranks}"):
            continue
        runs = [
            measure(ranks, workload, "--pair", way, baseline, "--rounds", str(options.rounds))
            for _ in range(options.repeats)
        ]
        row = {"workload": workload, "ranks": ranks, "way": way, "baseline": baseline}
        times = [one for one in times if not row.items() <= one.items()] + [row | own | {"runs": runs}]
        print(time_row(times[-1]), flush=True)
    for workload, ranks, way in MEMORY:
        if options.only not in (None, f"{workload}:{ranks}"):
            continue
        runs = [measure(ranks, workload, "--memory", way) for _ in range(options.repeats)]
        row = {"workload": workload, "way": way, "ranks": ranks}
        memory = [one for one in memory if not row.items() <= one.items()] + [row | own | {"runs": runs}]
        print(memory_row(memory[-1]), flush=True)
    results = {"machine": before.get("machine", machine), "times": times, "memory": memory}
    path.write_text(json.dumps(results, indent=1) + "\n")


def measure(ranks: int, *arguments: str) -> dict[str, object]:
    """Run `measure.py` on so many ranks and return what it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "result.json")
        command: Sequence[str] = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)),
            *(str(HERE / "measure.py"), *arguments, "--output", str(output)),
        ]
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        return json.loads(output.read_text())


def time_row(entry: dict) -> str:
    """One line of the table of times."""
    medians = sorted(run["ratio"]["median"] for run in entry["runs"])
    middle = entry["runs"][0]["median_step_s"]
    return (
        f"| {entry['workload']} | {entry['ranks']} | {middle[entry['way']] * 1e3:.1f} | "
        f"{middle[entry['baseline']] * 1e3:.1f} ({entry['baseline']}) | {medians[len(medians) // 2]:.3f} | "
        f"{medians[0]:.3f} to {medians[-1]:.3f} |"
    )


def memory_row(entry: dict) -> str:
    """One line of the table of memory."""
    peaks = sorted(run["peak_memory_bytes"] / 1e6 for run in entry["runs"])
    sent = entry["runs"][0]["bytes_sent_per_step"]
    return (
        f"| {entry['workload']} | {entry['way']} | {peaks[len(peaks) // 2]:.0f} | {peaks[0]:.0f} to {peaks[-1]:.0f} | "
        f"{f'{sent / 1e6:.2f}' if sent is not None else ''} |"
    )


def processor() -> str:
    """The processor's name, where the system tells."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


if __name__ == "__main__":
    main()
