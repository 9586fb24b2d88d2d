"""Trains every type of text model in `transformers` as a pipeline, and holds losses and gradients against one process.

    python benchmarks/pipeline/text_types.py --ranks 2 --out benchmarks/pipeline/results/text-types-2.json

Each type is as it is written there, made tiny by one recipe for all (`tiny_types.py`). Steps differ in their sizes, so
that micro-batches meet shapes that some ranks have seen and others have not.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from tiny_types import TYPES, WORDS, Untried, tiny_model
from torch import Tensor, nn
from zoo import worst_gradient

import tulle
from tulle import pipeline
from tulle.comm import gather_values

MICRO_BATCHES = 4
SIZES = [(8, 9), (8, 9), (8, 12), (12, 12), (8, 7), (16, 10)]
"""Samples and length of each step; micro-batches pass each other from the second step on."""
TOGETHER = 8
"""So many types share processes: to start these takes longer than a type."""
MOST_S = 60
"""Of a type."""


def main() -> None:
    """Start the ranks, a few types at a time, or be one of them."""
    parser = argparse.ArgumentParser(description="Trains every type of text model in transformers as a pipeline.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--types", nargs="*", default=[*TYPES], metavar="NAME", help="default: all")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if "RANK" in os.environ:
        be_a_rank(options)
        return
    rows: list[dict[str, Any]] = []
    groups = [options.types[first : first + TOGETHER] for first in range(0, len(options.types), TOGETHER)]
    for names in track(groups, description=f"{len(options.types)} types"):
        rows += rows_of(names, options)
    rows.sort(key=lambda row: row["type"])
    if options.out:
        options.out.parent.mkdir(exist_ok=True)
        options.out.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
    print(*(f"{count:4} {said}" for said, count in Counter(map(said_of, rows)).most_common()), sep="\n")


def said_of(row: dict[str, Any]) -> str:
    """What became of a type, in a few words."""
    if "worst_gradient" not in row:
        return row["outcome"].partition(":")[0]
    return f"losses {how_far(row['worst_loss'])}, gradients {how_far(row['worst_gradient'])}"


def how_far(difference: float) -> str:
    """The power of ten that it stays below."""
    return f"below 1e{math.floor(math.log10(difference)) + 1}" if difference else "bitwise equal"


def rows_of(names: Sequence[str], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What became of some types, trained by processes of their own; where one ends these, the next has others."""
    left = [*names]
    while left:
        rows = launched(left, options) or [{"type": left[0], "outcome": "failed: its processes took too long, or fell"}]
        left = left[len(rows) :]
        yield from rows


def launched(names: Sequence[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """What ranks have written of some types until they ended."""
    with tempfile.NamedTemporaryFile() as told:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(options.ranks), __file__]
        command += ["--schedule", options.schedule, "--out", told.name, "--types", *names]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        ranks = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            ranks.wait(60 + MOST_S * len(names))
        except subprocess.TimeoutExpired:
            ranks.terminate()
            ranks.wait()
        return [json.loads(line) for line in told.read().decode().splitlines()]


def be_a_rank(options: argparse.Namespace) -> None:
    """Train some types, and write a line of JSON for each."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    mesh = tulle.init(pipe=-1, timeout=MOST_S / 2)
    for name in options.types:
        try:
            row = {"type": name, "outcome": "trained", **beside_one_process(name, mesh, options.schedule)}
        except Untried as error:
            row = {"type": name, "outcome": f"not tried: {error}"}
        except tulle.TulleError as error:
            row = {"type": name, "outcome": f"refused: {error}"}
        if mesh.rank == 0:
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
        if row["outcome"].startswith("refused"):
            return  # what it has left under way is not to meet the next


def beside_one_process(name: str, mesh: tulle.Mesh, schedule: Any) -> dict[str, float]:
    """The largest differences of all steps: of losses, relative, and of gradients, to the largest entry of any."""
    model = tiny_model(name)
    reference = copy.deepcopy(model)
    step = pipeline.step(micro_batches=MICRO_BATCHES, schedule=schedule)(train)
    try:
        losses = [step(reference, words(*size)).stack() for size in SIZES]
    except Exception as error:
        raise Untried(f"one process does not train it: {type(error).__name__}: {error}") from error
    pipeline.place(model, mesh["pipe"], sample={"input_ids": words(2, 9), "labels": words(2, 9)})
    worst_loss = 0.0
    for size, expected in zip(SIZES, losses, strict=True):
        difference = (step(model, words(*size)).stack() - expected).abs() / expected.abs()
        worst_loss = max(worst_loss, difference.max().item())
    worst = max(gather_values(worst_gradient(model, reference), mesh["pipe"], label="the comparison"))
    return {"worst_loss": worst_loss, "worst_gradient": worst}


def words(samples: int, length: int) -> Tensor:
    """`[samples, length]` of a step, the same on all ranks."""
    return torch.randint(3, WORDS, (samples, length), generator=torch.Generator().manual_seed(100 * samples + length))


def train(model: nn.Module, batch: Tensor) -> Tensor:
    """A step as it stands in a loop for one process."""
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    return loss


if __name__ == "__main__":
    main()
