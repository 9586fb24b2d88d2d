"""Finds out who started this process: torchrun (or `tulle run`), Slurm, or nobody."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from tulle.errors import MeshError

RUN_DIR = "TULLE_RUN_DIR"
"""Set by `tulle run`: the folder of the run, into which every rank writes."""
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""Of Open MPI; of MPICH and what descends from it."""


@dataclass(frozen=True, slots=True)
class Launch:
    """This process's place among all that were started together.

    Args:
        launcher: `"torchrun"`, `"slurm"` or `"alone"`.
        rank: This process among all, from 0.
        size: Number of processes.
        local_rank: This process among those on its host, from 0.
        local_size: Number of processes on its host.
        address: Host of the rendezvous, empty if alone.
        port: Port of the rendezvous, 0 if alone.
        node: Number of its host, where ranks of one host need not follow each other; None where they do.
        attempt: How often the launcher had started all processes before.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str
    port: int
    node: int | None = None
    attempt: int = 0

    def host_of(self, rank: int) -> int:
        """A number for the host of this process, which has a rank in the process group: of its first process, say."""
        return rank - self.local_rank if self.node is None else self.node


def detect(environment: Mapping[str, str] = os.environ) -> Launch:
    """Read the launcher's environment variables.

    Raises:
        MeshError: If only some of torchrun's variables are set, or one is not a number.

    Example:
        >>> detect({}).launcher
        'alone'
        >>> job = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "n[04-05]"}
        >>> launch = detect(job)
        >>> launch.launcher, launch.rank, launch.size, launch.address, launch.port
        ('slurm', 5, 8, 'n04', 20077)
    """
    found = [name for name in _TORCHRUN if name in environment]
    if "RANK" in found or "WORLD_SIZE" in found:
        missing = sorted(set(_TORCHRUN) - set(found))
        if missing:
            raise MeshError(
                f"the environment has {', '.join(found)} but not {', '.join(missing)}: "
                "start the script with `tulle run`, torchrun or srun, or unset them to run alone"
            )
        rank, size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
        if not 0 <= rank < size:
            raise MeshError(f"the environment has RANK={rank} and WORLD_SIZE={size}, expected ranks from 0 to size - 1")
        return Launch(
            "torchrun",
            rank,
            size,
            _number(environment, "LOCAL_RANK", default=rank),
            _number(environment, "LOCAL_WORLD_SIZE", default=1),
            environment["MASTER_ADDR"],
            _number(environment, "MASTER_PORT"),
            attempt=_number(environment, "TORCHELASTIC_RESTART_COUNT", default=0),
        )
    if "SLURM_PROCID" in environment and _number(environment, "SLURM_NTASKS", default=1) > 1:
        return _slurm(environment)
    return Launch("alone", 0, 1, 0, 1, "", 0)


def unmet(launch: Launch, said: str) -> str:
    """The text of the error where the processes of a Slurm job did not find each other, with what was said of it."""
    return (
        f"the {launch.size} processes that Slurm tells of did not meet at {launch.address}:{launch.port}: {said} Start "
        "the script with srun, which makes all of them; to run it alone within a job, unset SLURM_PROCID. MASTER_ADDR "
        "and MASTER_PORT say where to meet"
    )


def check_alone(environment: Mapping[str, str] = os.environ) -> None:
    """Refuse to train alone what mpirun started with others: each process would, and nobody would notice.

    Raises:
        MeshError: Naming how many there are.

    Example:
        >>> check_alone({})
    """
    for name in _MPI_SIZES:
        if _number(environment, name, default=1) > 1:
            raise MeshError(
                f"mpirun started {environment[name]} processes ({name}), which tulle does not join by itself: "
                "start them with `tulle run`, torchrun or srun, set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in "
                f"each, or unset {name} to run each of them alone"
            )


def _slurm(environment: Mapping[str, str]) -> Launch:
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    address = environment.get("MASTER_ADDR") or first_host(nodes)
    # Every task of a job step must come to the same port without talking: a function of the job's number.
    default_port = 20_000 + _number(environment, "SLURM_JOB_ID", default=0) % 10_000
    return Launch(
        "slurm",
        _number(environment, "SLURM_PROCID"),
        _number(environment, "SLURM_NTASKS"),
        _number(environment, "SLURM_LOCALID", default=0),
        _tasks_per_host(environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE", "1")),
        address,
        _number(environment, "MASTER_PORT", default=default_port),
        _number(environment, "SLURM_NODEID") if "SLURM_NODEID" in environment else None,
    )


def _tasks_per_host(counts: str) -> int:
    """The first of Slurm's counts, such as 4 in `4(x2),3`."""
    match = re.match(r"\d+", counts)
    return int(match.group()) if match else 1


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list.

    Example:
        >>> first_host("gpu[007-012,15],login1"), first_host("node3")
        ('gpu007', 'node3')
    """
    # All up to the first comma outside brackets, then of each pair of brackets the first number.
    match = re.match(r"[^\[,]+(?:\[[^\]]*\]|[^\[,])*", nodes)
    if match is None:
        raise MeshError(
            f"SLURM_JOB_NODELIST is {nodes!r}, expected a list of hosts such as node[01-04]: set MASTER_ADDR"
        )
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", match.group())


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise MeshError(f"the environment variable {name} is {text!r}, expected a whole number") from None
