"""Nine common models on emulated hosts, by `tulle.distribute` beside DDP: `python benchmarks/common-models`.

Needs root. Each model trains by each way, one after the other, in processes of its own; then the next round begins.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path

import torch
from common import MODELS
from rank import MARK, WAYS

HERE = Path(__file__).parent


def main() -> None:
    """Train all by all ways, save after each, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4, help="(%(default)s)")
    parser.add_argument("--rate", default="1gbit", help="of each link (%(default)s)")
    parser.add_argument("--rounds", type=int, default=1, help="(%(default)s)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of training at most, each (%(default)s)")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--out", type=Path, help="where the raw result goes")
    options = parser.parse_args()
    machine = {"torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count()}
    asked = {key: value for key, value in vars(options).items() if key != "out"}
    found: list[dict[str, object]] = []
    for turn in range(options.rounds):
        for name in options.models:
            for way in options.ways:
                told = train(name, way, options)
                found.append({"round": turn, "model": name, "way": way, **told})
                print(f"round {turn}, {name}, {way}: {told}", file=sys.stderr, flush=True)
                if options.out:
                    options.out.write_text(json.dumps({"machine": machine, **asked, "found": found}, indent=1) + "\n")
    print(table(found, options.models, options.ways))


def train(name: str, way: str, options: argparse.Namespace) -> dict[str, float | str]:
    """What rank 0 of a run said."""
    cluster = [sys.executable, str(HERE.parent / "cluster"), "--hosts", str(options.hosts), "--rate", options.rate]
    rank = [sys.executable, str(HERE / "rank.py"), name, way, str(options.seconds)]
    command = [*cluster, "--timeout-s", str(120 + 3 * options.seconds), "--", *rank]
    ended = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
    )
    lines = [line.split(MARK, 1)[1] for line in ended.stdout.splitlines() if MARK in line]
    return json.loads(lines[-1]) if lines else {"error": (ended.stderr or ended.stdout)[-500:]}


def table(found: list[dict[str, object]], models: list[str], ways: list[str]) -> str:
    """Milliseconds of a step, medians of the rounds, and how much faster than DDP."""
    lines = [
        f"| model | {' | '.join(f'{way}, ms' for way in ways)} | times DDP's speed |",
        "|---" * (len(ways) + 2) + "|",
    ]
    for name in models:
        taken = {
            way: [
                ms
                for one in found
                if one["model"] == name and one["way"] == way and isinstance(ms := one.get("ms"), float)
            ]
            for way in ways
        }
        middle = {way: statistics.median(of_way) for way, of_way in taken.items() if of_way}
        cells = [f"{middle[way]:,.0f}" if way in middle else "failed" for way in ways]
        faster = [
            f"{middle['ddp'] / middle[way]:.2f}" for way in ways if way != "ddp" and {"ddp", way} <= middle.keys()
        ]
        lines.append(f"| {name} | {' | '.join(cells)} | {', '.join(faster)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
