"""The ways that are compared, each a worker of this folder, in the environments that `sparse-sync` makes."""

# pyright: reportMissingImports=false
from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import train_tulle
import ways
from ways import Way

HERE = Path(__file__).resolve().parent
PEERS = (
    *("ddp-dense", "ddp-sparse", "horovod-allgather", "horovod-sparse-as-dense"),
    *("deepspeed-sparse", "deepspeed-dense", "torchrec-row-wise", "torchrec-row-wise-pipelined"),
)
PIPELINED = "-pipelined"
_OWN_TABLES = "torchrec"
"""It trains models that are written with its own tables: here the recommender."""


def our_ways(names: Sequence[str] | None) -> list[Way]:
    """Those of tulle, all or those among `names`."""
    return [
        Way(
            name,
            Path(sys.executable),
            HERE / "train_tulle.py",
            is_dense=name == train_tulle.DENSE,
            is_sharded=any(placement in name for placement in ("rows", "columns")),
            about=about,
            environment=_environment({}),
        )
        for name, about in train_tulle.ABOUT.items()
        if not names or name in names
    ]


def peer_ways(names: Sequence[str] | None, torch_index: str | None) -> tuple[list[Way], list[str]]:
    """Those of the peers, and the names of those whose environment cannot be made."""
    asked = [name for name in PEERS if not names or name in names]
    if not asked:
        return [], []
    found, missing = ways.peer_ways([name.removesuffix(PIPELINED) for name in asked], torch_index)
    there = {way.name: way for way in found}
    kept = [_here(there[known], name) for name in asked if (known := name.removesuffix(PIPELINED)) in there]
    return kept, [name for name in asked if name.removesuffix(PIPELINED) in missing]


def trains(way: Way, workload: str) -> bool:
    """Whether a way can train the model of a workload."""
    return not way.name.startswith(_OWN_TABLES) or workload.startswith("recommender")


def _here(way: Way, name: str) -> Way:
    """A way of `sparse-sync`, with the worker of this folder."""
    library = name.partition("-")[0]
    about = f"{way.about}; ids a step ahead" if name.endswith(PIPELINED) else way.about
    worker = HERE / f"train_{library}.py"
    return replace(way, name=name, about=about, worker=worker, environment=_environment(way.environment))


def _environment(given: Mapping[str, str]) -> dict[str, str]:
    """What a worker imports: this folder comes by itself, then the common job and the peers' own modules."""
    folders = [str(ways.HERE), str(ways.HERE / "peers")]
    return {"PATH": os.environ.get("PATH", ""), **given, "PYTHONPATH": os.pathsep.join(folders)}
