"""Writes run folders as `tulle run` leaves them, with curves that look like a real training."""

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path

SAMPLES = "\n".join(
    "\t".join(row)
    for row in (
        (
            "Click Insert to add the image.",
            "Klicken Sie auf Einfügen, um das Bild hinzuzufügen.",
            "Klicken Sie auf Einfügen, um das Bild einzufügen.",
        ),
        (
            "Opens a dialog where you can select the cells that you want to protect.",
            "Öffnet einen Dialog, in dem Sie die zu schützenden Zellen auswählen.",
            "Öffnet einen Dialog, in dem Sie die Zellen auswählen, die Sie schützen möchten.",
        ),
        ("Print", "Drucken", "Drucken"),
    )
)
TABLES = {"source.weight": ("allgather", 812_000, 6), "target.weight": ("densify", 2_048_000, 2)}


@dataclass
class Fake:
    """What to make: every part can be left out, as a run that ended early or logged little would."""

    ranks: int = 4
    steps: int = 300
    loss: bool = True
    tokens: bool = True
    samples: int = 0
    traffic: bool = True
    texts: bool = True
    plan: bool = True
    seed: int = 1
    noise: float = 0.0


def make_run(folder: Path, fake: Fake | None = None) -> Path:
    fake = fake or Fake()
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "run.json", launch(fake))
    write_json(
        folder / "mesh.json",
        {
            "axes": {"data": fake.ranks},
            "backend": "gloo",
            "device": "cpu",
            "network": {"data": {"latency_s": 0.00031, "bandwidth_bytes_per_s": 1.18e9}} if fake.ranks > 1 else {},
        },
    )
    if fake.plan:
        write_json(folder / "plan.json", plan(fake.ranks))
    for rank in range(fake.ranks):
        chance = random.Random(f"{fake.seed} {rank}")
        lines = [step_record(fake, rank, step, chance) for step in range(1, fake.steps + 1)]
        if fake.texts and rank == 0:
            lines += [text_record(step) for step in range(100, fake.steps + 1, 100)]
        write_lines(folder / f"rank-{rank}.jsonl", lines)
    return folder


def launch(fake: Fake) -> dict:
    return {
        "format": 1,
        "tulle": "0.1.0",
        "torch": "2.13.0",
        "python": "3.11.7",
        "started": "2026-11-21T02:00:00+00:00",
        "command": ["examples/01_translate.py", "--steps", str(fake.steps)],
        "processes": fake.ranks,
        "hosts": ["localhost"],
        "cores": 4,
    }


def candidate(scheme: str, sent: int, messages: int, seconds: float) -> dict:
    return {"scheme": scheme, "bytes": sent, "messages": messages, "seconds": seconds}


def plan(ranks: int) -> dict:
    return {
        "format": 1,
        "mesh": {"data": ranks},
        "bucket_bytes": 26_214_400,
        "network": {"latency_s": 3e-4, "bandwidth_bytes_per_s": 1.2e9},
        "tables": [
            {
                "name": "source.weight",
                "rows": 8000,
                "width": 256,
                "scheme": "allgather",
                "reason": "5.2% of the rows are touched in a step: gathering them sends 9.9 times fewer bytes.",
                "density": 0.052,
                "candidates": [
                    candidate("allgather", 834_000, 6, 0.0025),
                    candidate("densify", 12_288_000, 6, 0.0121),
                ],
            },
            {
                "name": "target.weight",
                "rows": 8000,
                "width": 256,
                "scheme": "densify",
                "reason": "Tied to the output layer, whose gradient is dense: one dense all-reduce carries both.",
                "density": 1.0,
                "candidates": [
                    candidate("densify", 2_048_000, 2, 0.0121),
                    candidate("allgather", 24_640_000, 6, 0.021),
                ],
            },
        ],
    }


def step_record(fake: Fake, rank: int, step: int, chance: random.Random) -> dict:
    shared = random.Random(f"{fake.seed} {step}")
    forward_s, backward_s, optimizer_s = (
        mean_s * (1 + 0.05 * abs(chance.gauss(0, 1))) for mean_s in (0.062, 0.118, 0.021)
    )
    wait_s = (0.012 + 0.003 * rank) * (1 + 0.5 * chance.random()) if fake.ranks > 1 else 0.0
    slow = 12 if step == 1 else 1
    record = {
        "kind": "step",
        "step": step,
        "at": 1763690000.0 + 0.23 * step,
        "step_s": (forward_s + backward_s + wait_s + optimizer_s + 0.009) * slow,
        "forward_s": forward_s * slow,
        "backward_s": (backward_s + wait_s) * slow,
        "optimizer_s": optimizer_s,
        "wait_s": wait_s * slow,
        "bytes_sent": 0,
        "messages": 0,
        "total_steps": fake.steps,
        "values": {"learning_rate": 1e-3 * min(step / 60, (60 / step) ** 0.5)},
        "traffic": {},
        "memory_peak_bytes": 812_345_678 + 3_000_000 * rank,
    }
    if fake.loss:
        record["loss"] = 1.9 + 7.2 * math.exp(-step / 70) + 0.12 * shared.gauss(0, 1) + fake.noise * chance.gauss(0, 1)
    if fake.tokens:
        record["tokens"] = shared.randint(1900, 2100)
    if fake.samples:
        record["samples"] = fake.samples
    if fake.traffic and fake.ranks > 1:
        record["traffic"] = traffic(shared)
        record["bytes_sent"] = sum(sent["bytes_sent"] for sent in record["traffic"].values())
        record["messages"] = sum(sent["messages"] for sent in record["traffic"].values())
    if step % 50 == 0 and rank == 0 and fake.loss:
        record["values"]["valid_loss"] = 2.1 + 6.9 * math.exp(-step / 72)
        record["values"]["bleu"] = 31 * (1 - math.exp(-step / 150))
    return record


def traffic(chance: random.Random) -> dict:
    sent = {
        name: {"scheme": scheme, "bytes_sent": round(size * chance.uniform(0.85, 1.15)), "messages": messages}
        for name, (scheme, size, messages) in TABLES.items()
    }
    sent["dense gradients"] = {"scheme": "all_reduce", "bytes_sent": 7_340_032, "messages": 12}
    sent["buffers"] = {"scheme": "broadcast", "bytes_sent": 8_192, "messages": 1}
    return sent


def text_record(step: int) -> dict:
    return {"kind": "text", "step": step, "name": "samples", "text": SAMPLES}


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def write_lines(path: Path, records: list[dict]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def fail(folder: Path, rank: int = 2, *, at: float = 1763690070.0, error: str = "") -> None:
    error = error or "IndexError: row 8123 is out of range of table source.weight with 8,000 rows"
    write_json(
        folder / f"failure-rank-{rank}.json",
        {
            "rank": rank,
            "step": 87,
            "at": at,
            "error": error,
            "traceback": "Traceback (most recent call last):\n"
            '  File "examples/01_translate.py", line 131, in <module>\n    train(options)\n'
            '  File "examples/01_translate.py", line 96, in train\n    loss = model(batch.source, batch.target)\n'
            + error,
        },
    )
