"""What `tulle doctor` runs on every rank: do all pairs reach each other, and how fast is each axis?"""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

import torch

from tulle.cli.rank import write_json
from tulle.comm import probe, receive, send
from tulle.environment import RUN_DIR
from tulle.mesh import Axis, init
from tulle.process_groups import backend_of

_TIMEOUT_S = 60.0
_PATTERN = 1_000_003


def main() -> None:
    """Build the mesh, measure, and leave `doctor-rank-R.json` in the run folder."""
    mesh = init(data=-1, timeout=_TIMEOUT_S)
    found = {
        "device": str(mesh.device),
        "backend": backend_of(mesh["data"].group, mesh.device.type),
        "axes": mesh.shape,
        "reached": [other for other in range(mesh.size) if other == mesh.rank or _reaches(mesh["data"], other)],
        "network": {axis.name: asdict(probe(axis)) for axis in mesh.axes if axis.size > 1},
    }
    write_json(Path(os.environ[RUN_DIR], f"doctor-rank-{mesh.rank}.json"), found)


def _reaches(axis: Axis, other: int) -> bool:
    """Exchange a number with one other rank; both ranks of a pair come here in the same order of pairs."""
    mine = torch.tensor([axis.rank * _PATTERN], device=axis.device)
    theirs = torch.zeros_like(mine)
    if axis.rank < other:
        send(mine, axis, to=other, label="doctor").wait()
        receive(theirs, axis, source=other, label="doctor").wait()
    else:
        receive(theirs, axis, source=other, label="doctor").wait()
        send(mine, axis, to=other, label="doctor").wait()
    return int(theirs.item()) == other * _PATTERN


if __name__ == "__main__":
    main()
