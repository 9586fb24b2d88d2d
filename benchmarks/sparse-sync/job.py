"""The common job of every way that is compared: one workload, one model, one clock. Needs torch and numpy only.

A worker is one program per library, started once per rank by the runner:

    python WORKER.py --way NAME --requests requests.json --output FOLDER

with RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT (and GLOO_SOCKET_IFNAME) in its environment. It is this, and no more:

    session = job.Session.from_arguments()
    dist.init_process_group("gloo")
    for request in session.requests:
        session.begin()
        model = job.build_model(request.workload, sparse=True)
        optimizer = job.make_optimizer(model)
        local = session.time(request, job.training_step(model, optimizer), dist.barrier)
        wrapped = DistributedDataParallel(model)
        whole = session.time(request, job.training_step(wrapped, optimizer), dist.barrier)
        session.write(request, local, whole, versions={"torch": torch.__version__})

What is timed, on each rank: every rank waits at a barrier, then forward + backward + synchronization + optimizer +
zero_grad. `local` is the same step of the same process on its plain model, without communication, while the other
ranks compute as well; the seconds of synchronization are the difference of the two.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy
import torch
from torch import Tensor, nn

LEARNING_RATE = 0.01
_PATTERN_ROWS = 1024
_COUNTERS = Path("/sys/class/net/eth0/statistics")

Step = Callable[[Sequence[Tensor]], object]
"""One whole training step on the ids of one batch, one `[tokens]` int64 tensor a table."""


@dataclass(frozen=True)
class TableShape:
    """One embedding table."""

    name: str
    num_rows: int
    width: int


@dataclass(frozen=True, eq=False)
class Workload:
    """Which rows each rank looks up in each step.

    Args:
        name: Of the workload, and of its two files.
        tables: The tables, in the order of the ids.
        drawn: By table `[ranks, steps, tokens]`, int32: each rank its own part of the data.
        about: Where the ids come from, for the reader of the results.
    """

    name: str
    tables: tuple[TableShape, ...]
    drawn: tuple[numpy.ndarray, ...]
    about: str = ""

    @property
    def ranks(self) -> int:
        """How many ranks there are ids for."""
        return self.drawn[0].shape[0]

    @property
    def steps(self) -> int:
        """Steps until the ids repeat."""
        return self.drawn[0].shape[1]

    def ids(self, rank: int, step: int) -> list[Tensor]:
        """Row numbers that `rank` looks up in `step`, one `[tokens]` int64 tensor a table."""
        return [torch.from_numpy(drawn[rank, step % self.steps].astype(numpy.int64)) for drawn in self.drawn]

    def rows_touched(self, rank: int) -> list[int]:
        """Distinct rows that `rank` looks up in each step, all tables together."""
        return [sum(len(numpy.unique(drawn[rank, s])) for drawn in self.drawn) for s in range(self.steps)]

    @property
    def dense_bytes(self) -> int:
        """All tables in float32."""
        return sum(table.num_rows * table.width * 4 for table in self.tables)

    def save(self, path: Path) -> None:
        """Write `path`.npz and `path`.json."""
        arrays = {f"table{number}": drawn for number, drawn in enumerate(self.drawn)}
        numpy.savez_compressed(path.with_suffix(".npz"), **arrays)  # pyright: ignore[reportArgumentType]
        described = {"name": self.name, "about": self.about, "tables": [asdict(table) for table in self.tables]}
        path.with_suffix(".json").write_text(json.dumps(described, indent=1) + "\n")

    @staticmethod
    def load(path: Path) -> Workload:
        """Read what `save` wrote, given either of the two names or what they have in common."""
        described = json.loads(path.with_suffix(".json").read_text())
        tables = tuple(TableShape(**table) for table in described["tables"])
        with numpy.load(path.with_suffix(".npz")) as arrays:
            drawn = tuple(arrays[f"table{number}"] for number in range(len(tables)))
        return Workload(described["name"], tables, drawn, described["about"])


class Lookups(nn.Module):
    """A table a feature, the mean of its rows over the tokens, side by side into a small dense head."""

    def __init__(self, tables: Sequence[TableShape], *, sparse: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.tables = nn.ModuleList(_embedding(table, generator, sparse=sparse) for table in tables)
        self.head = make_head(tables, generator)

    def forward(self, ids: Sequence[Tensor]) -> Tensor:
        """Scalar loss of the ids, one `[tokens]` tensor a table."""
        means = [table(rows).mean(0) for table, rows in zip(self.tables, ids, strict=True)]
        return self.head(torch.cat(means)).pow(2).mean()


def make_head(tables: Sequence[TableShape], generator: torch.Generator) -> nn.Linear:
    """The dense part: from all widths together to 64."""
    head = nn.Linear(sum(table.width for table in tables), 64)
    with torch.no_grad():
        head.weight.copy_(torch.randn(head.weight.shape, generator=generator) * 0.02)
        head.bias.zero_()
    return head


def build_model(workload: Workload, *, sparse: bool) -> Lookups:
    """The model, with the same weights on every rank; `sparse` is that of `nn.Embedding`."""
    return Lookups(workload.tables, sparse=sparse)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Plain SGD, which takes dense and sparse gradients alike and costs least."""
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)


def training_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """The step that a user writes."""

    def step(ids: Sequence[Tensor]) -> None:
        model(ids).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _embedding(table: TableShape, generator: torch.Generator, *, sparse: bool) -> nn.Embedding:
    # One short pattern over and over: the values do not matter, drawing 68 million normals would take seconds.
    pattern = torch.randn(min(_PATTERN_ROWS, table.num_rows), table.width, generator=generator) * 0.02
    repeats = -(-table.num_rows // len(pattern))
    weight = pattern.repeat(repeats, 1)[: table.num_rows]
    return nn.Embedding.from_pretrained(weight, freeze=False, sparse=sparse)


@dataclass(frozen=True)
class Request:
    """One workload to measure."""

    workload: Workload
    steps: int
    warmup: int


@dataclass(frozen=True)
class Timing:
    """What `Session.time` saw on this rank: seconds of each step, and per step what the network card sent and got."""

    seconds: list[float]
    sent_bytes: float | None
    received_bytes: float | None


@dataclass(frozen=True)
class Session:
    """What the runner asked this process for."""

    way: str
    rank: int
    size: int
    requests: tuple[Request, ...]
    output: Path
    started_bytes: list[int] = field(default_factory=list)

    @staticmethod
    def from_arguments() -> Session:
        """Read the command line and the environment."""
        parser = argparse.ArgumentParser(description="One rank of one way; see job.py.")
        parser.add_argument("--way", required=True)
        parser.add_argument("--requests", type=Path, required=True, help="JSON: [{workload, steps, warmup}]")
        parser.add_argument("--output", type=Path, required=True, help="folder for one JSON a workload and rank")
        options = parser.parse_args()
        torch.set_num_threads(1)
        asked = json.loads(options.requests.read_text())
        requests = tuple(Request(Workload.load(Path(a["workload"])), a["steps"], a["warmup"]) for a in asked)
        rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        return Session(options.way, rank, size, requests, options.output)

    def begin(self) -> None:
        """Forget the peak of the workload before; call it before the model is built."""
        gc.collect()
        _give_back_memory()
        forget_peak()
        self.started_bytes[:] = [resident_bytes()]

    def time(self, request: Request, step: Step, barrier: Callable[[], object]) -> Timing:
        """Time whole steps, each from a barrier on; every rank must call it."""
        for number in range(request.warmup):
            barrier()
            step(request.workload.ids(self.rank, number))
        seconds: list[float] = []
        barrier()
        sent, received = counter("tx_bytes"), counter("rx_bytes")
        for number in range(request.warmup, request.warmup + request.steps):
            ids = request.workload.ids(self.rank, number)
            barrier()
            begin_s = time.perf_counter()
            step(ids)
            seconds.append(time.perf_counter() - begin_s)
        # What a slower rank still sends is on its way to this one: it is counted before anybody goes on.
        barrier()
        return Timing(
            seconds, _per_step(sent, counter("tx_bytes"), request), _per_step(received, counter("rx_bytes"), request)
        )

    def write(
        self,
        request: Request,
        local: Timing,
        whole: Timing,
        *,
        versions: Mapping[str, str],
        more: Mapping[str, object] | None = None,
    ) -> None:
        """Write this rank's result of one workload; `more` is what only this library can tell."""
        name = request.workload.name
        result = {
            "way": self.way,
            "workload": name,
            "rank": self.rank,
            "ranks": self.size,
            "step_s": whole.seconds,
            "local_step_s": local.seconds,
            "sent_bytes_per_step": whole.sent_bytes,
            "received_bytes_per_step": whole.received_bytes,
            "rows_touched": request.workload.rows_touched(self.rank),
            "resident_bytes_before": self.started_bytes[0] if self.started_bytes else None,
            "peak_resident_bytes": peak_resident_bytes(),
            "versions": dict(versions),
            "more": dict(more or {}),
        }
        write_json(self.output / f"{name}.rank{self.rank}.json", result)


def write_json(path: Path, content: object) -> None:
    """Write JSON; the file is complete or absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(json.dumps(content, indent=1) + "\n")
    aside.replace(path)


def counter(name: str) -> int | None:
    """A counter of this host's network card, `tx_bytes` say; None where there is no `eth0`."""
    with suppress(OSError, ValueError):
        return int((_COUNTERS / name).read_text())
    return None


def resident_bytes() -> int:
    """Memory that this process holds now."""
    return _status_bytes("VmRSS") or peak_resident_bytes()


def peak_resident_bytes() -> int:
    """The most memory that this process held since `Session.begin`."""
    return _status_bytes("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _status_bytes(field_name: str) -> int | None:
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field_name + ":"):
                return int(line.split()[1]) * 1024
    return None


def forget_peak() -> None:
    """Let the peak begin anew, where the system can."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _give_back_memory() -> None:
    # glibc keeps what was freed; without this the next workload would begin with the last one's memory.
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _per_step(before: int | None, after: int | None, request: Request) -> float | None:
    return None if before is None or after is None else (after - before) / request.steps
