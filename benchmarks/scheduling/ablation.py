"""What each part of synchronization gains: `sudo .venv/bin/python benchmarks/scheduling/ablation.py --json out.json`.

A model of one large table and some layers, whose work is mostly a sleep, on emulated hosts; kept in step in nine ways,
of which each adds to, or stands beside, the one above. They take turns in one set of processes, every other turn
backwards. Prints the rows of the README's table; `--json` keeps what was measured, `--report` prints it again. Ended at
any time and started again, it goes on after the last way that was complete (`runs/scheduling`).
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from threading import Event, Thread
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "cluster"))
WORK = HERE.parents[1] / "runs" / "scheduling"

JOB = {
    "rows": (50_000, "of the table"),
    "width": (512, "of a row, and of the layers"),
    "tokens": (4096, "of a rank and step, Zipf-distributed with exponent 1.1"),
    "layers": (8, "of width x width"),
    "layer_ms": (10.0, "work of a layer in forward; backward takes twice"),
    "steps": (4, "that are timed in a turn"),
}
Turns = Sequence[dict[str, dict[str, float]]]
"""What was measured, by turn, way and name."""
_TIMEOUT_S = 1800


def main() -> None:
    """Run, save, print."""
    options = parse()
    if options.report is not None:
        for result in json.loads(options.report.read_text()):
            print(table(result))
        return
    from ablation_rank import WAYS

    result = measure(options, options.ways or [*WAYS])
    print(table(result))
    if options.json is not None:
        kept = json.loads(options.json.read_text()) if options.json.exists() else []
        settings = ("hosts", "rate", "job")
        kept = [one for one in kept if any(one[name] != result[name] for name in settings)]
        options.json.write_text(json.dumps([*kept, result], indent=1) + "\n")


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--turns", type=int, default=3, help="in which every way runs once")
    parser.add_argument("--ways", nargs="+", metavar="NAME", help="only these (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="in which the result takes the place of its like")
    parser.add_argument("--work", type=Path, default=WORK, metavar="FOLDER", help="of turns: remove it to start anew")
    parser.add_argument("--report", type=Path, metavar="FILE", help="print what is in it, measure nothing")
    for name, (value, about) in JOB.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=about)
    return parser.parse_args()


def measure(options: argparse.Namespace, ways: Sequence[str]) -> dict[str, Any]:
    """All turns, as far as they are not in the folder yet."""
    from cluster import Cluster  # pyright: ignore[reportAttributeAccessIssue]

    job = {name: getattr(options, name) for name in JOB}
    described = "-".join(str(value) for value in job.values())
    found = options.work / f"{options.hosts}x{options.rate}-{described}.json"
    found.parent.mkdir(parents=True, exist_ok=True)
    words = [text for name, value in job.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    words += ["--turns", str(options.turns), "--found", str(found), "--ways", *ways]
    with Cluster(hosts=options.hosts, rate=options.rate) as cluster:
        achieved = cluster.measured_rate()
        with shown(found, options.turns, ways):
            cluster.run([sys.executable, str(HERE / "ablation_rank.py"), *words], timeout_s=_TIMEOUT_S)
    machine = {"python": platform.python_version(), "torch": torch.__version__, "achieved": achieved.as_dict()}
    result = {"hosts": options.hosts, "rate": options.rate, "job": job, "machine": machine}
    return result | merged(json.loads(found.read_text())[: options.turns], ways)


@contextmanager
def shown(found: Path, turns: int, ways: Sequence[str]) -> Iterator[None]:
    """A bar that grows with what rank 0 writes."""
    over = Event()
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]

    def watch() -> None:
        with Progress(*columns, TimeRemainingColumn()) as progress:
            task = progress.add_task("ways", total=turns * len(ways))
            while not over.wait(0.5):
                there = json.loads(found.read_text())[:turns] if found.exists() else []
                progress.update(task, completed=sum(way in turn for turn in there for way in ways))

    watcher = Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def merged(turns: Turns, ways: Sequence[str]) -> dict[str, Any]:
    """What was measured by way, each number a list over turns, and how far the losses of all lie apart."""
    losses = [turn[way]["loss"] for turn in turns for way in ways]
    names = [name for name in turns[0][ways[0]] if name != "loss"]
    return {
        "ways": {way: {name: [turn[way][name] for turn in turns] for name in names} for way in ways},
        "largest relative difference of a loss": (max(losses) - min(losses)) / min(losses),
    }


def table(result: dict[str, Any]) -> str:
    """A row for each way: medians over turns, in brackets from the least to the most."""
    work_s = 3 * result["job"]["layers"] * result["job"]["layer_ms"] / 1e3
    ways = result["ways"]
    first = next(iter(ways.values()))["step_s"]
    lines = [
        f"{result['hosts']} hosts, {result['rate']}, {work_s * 1e3:.0f} ms of work; losses differ by at most "
        f"{result['largest relative difference of a loss']:.0e}",
        "",
        "| way | step, ms | under way, ms | waited, ms | hidden | MB sent | times faster than the first |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, way in ways.items():
        under_way_s, waited_s = median(way["under_way_s"]), median(way["waited_s"])
        faster = [theirs / ours for theirs, ours in zip(first, way["step_s"], strict=True)]
        cells = [
            name,
            spread([seconds * 1e3 for seconds in way["step_s"]], "{:.0f}"),
            f"{under_way_s * 1e3:.0f}",
            f"{waited_s * 1e3:.0f}",
            f"{1 - waited_s / under_way_s:.0%}",
            f"{median(way['sent_bytes']) / 1e6:.1f}",
            spread(faster, "{:.2f}"),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def spread(values: list[float], form: str) -> str:
    """The median, and from the least to the most."""
    return f"{form.format(median(values))} ({form.format(min(values))} to {form.format(max(values))})"


if __name__ == "__main__":
    main()
