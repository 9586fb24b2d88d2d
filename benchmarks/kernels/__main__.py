"""Times what a rank does with rows by itself, beside the floor that memory sets: `python benchmarks/kernels`.

The floor of a kernel is the time in which a plain copy moves as many bytes as it must read and write. Writes
`results-DEVICE.json` beside this file and prints the table of the README.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from tulle.partition import Hashed
from tulle.rows import Merge
from tulle.sync.push_pull import Holdings

HERE = Path(__file__).parent
NUM_ROWS, WIDTH, TOKENS, RANKS = 50_000, 512, 4_096, 8
REPEATS = 30


def main() -> None:
    """Measure, save, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(parser.parse_args().device)
    torch.set_num_threads(1)
    copy_bytes_per_s = _copy_rate(device)
    rows = []
    for name, moved_bytes, work in _kernels(device):
        seconds = _seconds(work, device)
        floor_s = moved_bytes / copy_bytes_per_s
        rows.append({"kernel": name, "us": seconds * 1e6, "floor_us": floor_s * 1e6, "times_floor": seconds / floor_s})
        print(f"| {name} | {seconds * 1e6:,.0f} | {floor_s * 1e6:,.0f} | {seconds / floor_s:.1f} |")
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "one CPU thread"
    result = {"device": where, "torch": torch.__version__, "copy_bytes_per_s": copy_bytes_per_s, "kernels": rows}
    (HERE / f"results-{device.type}.json").write_text(json.dumps(result, indent=1) + "\n")


def _kernels(device: torch.device) -> list[tuple[str, float, Callable[[], object]]]:
    """Name, bytes that must be read and written, and the work."""
    generator = torch.Generator().manual_seed(0)
    weights = 1 / torch.arange(1, NUM_ROWS + 1).double() ** 1.1
    ids = [torch.multinomial(weights, TOKENS, replacement=True, generator=generator).to(device) for _ in range(RANKS)]
    values = torch.randn(TOKENS, WIDTH, generator=generator).to(device)
    merge = Merge.of(ids[0])
    held = [part.unique() for part in ids]
    together = Merge.of(torch.cat(held))
    received = torch.randn(len(together.order), WIDTH, device=device)
    partition = Hashed(NUM_ROWS, RANKS)
    row_bytes, number_bytes = WIDTH * 4, 8
    return [
        ("sort row numbers (coalesce)", 2 * TOKENS * number_bytes, lambda: Merge.of(ids[0])),
        ("sum rows (coalesce)", (TOKENS + len(merge.rows)) * row_bytes, lambda: merge.sum(values)),
        ("deal rows to owners (partition)", 3 * len(held[0]) * number_bytes, lambda: partition.place(held[0])),
        ("settle what all ranks hold", 6 * len(together.order) * number_bytes, lambda: Holdings.of(held)),
        (
            f"sum rows of {RANKS} ranks (aggregate)",
            (len(together.order) + len(together.rows)) * row_bytes,
            lambda: together.sum(received),
        ),
    ]


def _copy_rate(device: torch.device) -> float:
    source = torch.ones(64 * 2**20, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _seconds(lambda: target.copy_(source), device)


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    times: list[float] = []
    for _ in range(REPEATS):
        _wait(device)
        begin_s = time.perf_counter()
        work()
        _wait(device)
        times.append(time.perf_counter() - begin_s)
    return median(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
