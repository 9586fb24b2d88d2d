"""Times what a rank does with rows by itself, beside the floor that memory sets: `python benchmarks/kernels`.

The floor of a kernel is the time in which a plain copy moves as many bytes as it must read and write. Writes
`results-DEVICE.json` beside this file and prints the table of the README.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from tulle.partition import Hashed
from tulle.rows import Merge
from tulle.sync.push_pull import Holdings

HERE = Path(__file__).parent
Kernel = tuple[str, float, Callable[[], object]]
"""Name, bytes that must be read and written, and the work."""
REPEATS = 30


@dataclass(frozen=True)
class Size:
    """A table of `num_rows` x `width` float32, of which each of `ranks` looks up `tokens` Zipf(1.1) rows."""

    num_rows: int
    width: int
    tokens: int
    ranks: int = 8

    def __str__(self) -> str:
        return f"{self.num_rows:,} x {self.width}, {self.tokens:,} tokens, {self.ranks} ranks"


SIZES = [Size(50_000, 512, 4_096), Size(1_000_000, 128, 262_144)]


def main() -> None:
    """Measure, save, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--results", type=Path, default=HERE)
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.set_num_threads(1)
    copy_bytes_per_s = _copy_rate(device)
    tables = {str(size): [_measured(one, copy_bytes_per_s, device) for one in _kernels(size, device)] for size in SIZES}
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "one CPU thread"
    result = {"device": where, "torch": torch.__version__, "copy_bytes_per_s": copy_bytes_per_s, "kernels": tables}
    (options.results / f"results-{device.type}.json").write_text(json.dumps(result, indent=1) + "\n")


def _measured(kernel: Kernel, copy_bytes_per_s: float, device: torch.device) -> dict[str, object]:
    """Seconds as the host sees them, the host waiting at the end, and those in which the GPU is at work."""
    name, moved_bytes, work = kernel
    floor_s, seconds = moved_bytes / copy_bytes_per_s, _seconds(work, device)
    busy_s = _busy_seconds(work) if device.type == "cuda" else seconds
    print(f"| {name} | {seconds * 1e6:,.0f} | {busy_s * 1e6:,.0f} | {floor_s * 1e6:,.1f} | {busy_s / floor_s:.1f} |")
    return {"kernel": name, "us": seconds * 1e6, "busy_us": busy_s * 1e6, "floor_us": floor_s * 1e6}


def _kernels(size: Size, device: torch.device) -> list[Kernel]:
    """Name, bytes that must be read and written, and the work."""
    print(f"\n{size}\n\n| kernel | microseconds | busy | floor | busy / floor |\n|---|---|---|---|---|")
    generator = torch.Generator().manual_seed(0)
    cumulative = (1 / torch.arange(1, size.num_rows + 1).double() ** 1.1).cumsum(0)
    draws = torch.rand(size.ranks, size.tokens, dtype=torch.float64, generator=generator) * cumulative[-1]
    ids = list(torch.searchsorted(cumulative, draws).clamp(max=size.num_rows - 1).to(device))
    values = torch.randn(size.tokens, size.width, generator=generator).to(device)
    merge = Merge.of(ids[0])
    held = [part.unique() for part in ids]
    together = Merge.of(torch.cat(held))
    received = torch.randn(len(together.order), size.width, device=device)
    partition = Hashed(size.num_rows, size.ranks)
    row_bytes, number_bytes = size.width * 4, 8
    return [
        ("sort row numbers (coalesce)", 2 * size.tokens * number_bytes, lambda: Merge.of(ids[0])),
        ("sum rows (coalesce)", (size.tokens + len(merge.rows)) * row_bytes, lambda: merge.sum(values, are_long=True)),
        ("deal rows to owners (partition)", 3 * len(held[0]) * number_bytes, lambda: partition.place(held[0])),
        ("settle what all ranks hold", 6 * len(together.order) * number_bytes, lambda: Holdings.of(held)),
        (
            f"sum rows of {size.ranks} ranks (aggregate)",
            (len(together.order) + len(together.rows)) * row_bytes,
            lambda: together.sum(received),
        ),
    ]


def _busy_seconds(work: Callable[[], object]) -> float:
    """Of all kernels and copies of one call."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        for _ in range(REPEATS):
            work()
        torch.cuda.synchronize()
    on_gpu = [event for event in profile.key_averages() if event.device_type.name == "CUDA"]
    return sum(event.self_device_time_total for event in on_gpu) / REPEATS / 1e6


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
