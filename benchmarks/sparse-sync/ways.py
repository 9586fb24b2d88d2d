"""The ways that are compared: each a worker, the Python that runs it, and what a reader must know of it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from job import Workload

from tulle.sync import AUTO, SCHEMES
from tulle.tables import PLACEMENTS

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE / "peers"))
import catalogue  # noqa: E402  # pyright: ignore[reportMissingImports]

OURS = "tulle-"
LOOKAHEAD = "-lookahead"
AUTO_WAY = OURS + AUTO
_DENSE_PEERS = ("ddp-dense", "horovod-sparse-as-dense", "deepspeed-dense", "torchrec-data-parallel")
_BUDGET_S = 6.0
_MOST_STEPS, _LEAST_STEPS = 16, 3
_PROCESSOR_BYTES_PER_S = 2e9
"""What four cores move through emulated links, all hosts together."""


@dataclass(frozen=True)
class Way:
    """One way to keep the tables of all ranks in step.

    Args:
        name: Unique; the worker is told it.
        python: The interpreter of its environment.
        worker: The program, run once a rank.
        is_dense: Whether whole tables travel, so that a step takes long.
        is_sharded: Whether each rank holds only a part of the table: it sends less, and is listed apart.
        about: What moves, for the reader.
        environment: Variables of the worker, beside torchrun's.
    """

    name: str
    python: Path
    worker: Path
    is_dense: bool = False
    is_sharded: bool = False
    about: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_peer(self) -> bool:
        """Whether it is a library that people use today, and not one of ours."""
        return not self.name.startswith(OURS)


def tulle_ways() -> list[Way]:
    """The automatic choice and every scheme of the registry."""
    about = {AUTO: "the scheme of least predicted cost"}
    modules = {
        name: scheme if isinstance(scheme, ModuleType) else sys.modules[type(scheme).__module__]
        for name, scheme in SCHEMES.items()
    }
    about |= {name: (module.__doc__ or "").splitlines()[0].partition(": ")[2] for name, module in modules.items()}
    for name, placement in PLACEMENTS.items():
        about[name] = (placement.__doc__ or "").splitlines()[0].partition(": ")[2]
        about[name + LOOKAHEAD] = "the same, the rows of the next batch told a step ahead"
    return [
        Way(
            OURS + name,
            Path(sys.executable),
            HERE / "tulle_worker.py",
            is_dense=name == "densify",
            is_sharded=name.removesuffix(LOOKAHEAD) in PLACEMENTS,
            about=said,
        )
        for name, said in about.items()
    ]


def peer_ways(names: Sequence[str] | None, torch_index: str | None) -> tuple[list[Way], list[str]]:
    """The ways of the peers, all or those among `names`, and the names of those whose environment cannot be made."""
    asked = [name for name in catalogue.WAYS if not names or name in names]
    missing = {catalogue.WAYS[name].peer for name in asked if name not in catalogue.installed()}
    if missing:
        index = ["--torch-index", torch_index] if torch_index else []
        subprocess.run([sys.executable, str(HERE / "peers"), *sorted(missing), *index], check=False)
    there = catalogue.installed()
    return [_peer_way(name) for name in asked if name in there], [name for name in asked if name not in there]


def _peer_way(name: str) -> Way:
    way = catalogue.WAYS[name]
    peer = catalogue.PEERS[way.peer]
    return Way(
        name,
        peer.python(),
        peer.worker,
        is_dense=name in _DENSE_PEERS,
        is_sharded=way.sharded,
        about=way.about,
        environment=catalogue.environment(),
    )


def steps(way: Way, workload: Workload, hosts: int, bytes_per_s: float | None) -> tuple[int, int]:
    """Timed steps and steps before them: where whole tables travel, as many as a few seconds allow, at least 3."""
    if not way.is_dense:
        return _MOST_STEPS, 3
    sent_bytes = 2 * (hosts - 1) / hosts * workload.dense_bytes
    step_s = max(sent_bytes / (bytes_per_s or float("inf")), hosts * sent_bytes / _PROCESSOR_BYTES_PER_S)
    return max(_LEAST_STEPS, min(_MOST_STEPS, round(_BUDGET_S / max(step_s, 1e-9)))), 2
