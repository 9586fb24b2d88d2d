"""What a run recorded, as plain values: the run, its mesh, its plan, and a log of columns for each rank."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tulle.plan import Plan

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Launch:
    """What was started, where and with which versions (`run.json`); empty where it was not recorded."""

    command: tuple[str, ...] = ()
    processes: int = 0
    hosts: tuple[str, ...] = ()
    cores: int | None = None
    started: datetime | None = None
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Link:
    """The measured network along one axis of the mesh."""

    latency_s: float
    bandwidth_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class MeshShape:
    """The mesh on which the run trained (`mesh.json`)."""

    axes: Mapping[str, int]
    backend: str
    device: str
    network: Mapping[str, Link]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One scheme that the planner considered for a table, and what it predicted for one rank and step."""

    scheme: str
    bytes: float
    messages: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Measured:
    """What a table's synchronization took of one rank in a step; NaN where it was not measured."""

    bytes: float
    messages: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Characteristics:
    """What a table's gradients look like on the ranks of one axis, as Zen (OSDI'25, section 2.3) has it, over rows."""

    density: float
    overlap_ratio: float
    densification_ratio: float
    skewness_ratio: float


@dataclass(frozen=True, slots=True)
class Observation:
    """One table looked at in one step (a line of kind `characteristics`).

    `overlap` `[ranks, ranks]` is None where there were too many ranks to record each pair; `densification` is
    over the first 1, 2, ... ranks, `parts` each contiguous part's share of the touched rows.
    """

    step: int
    table: str
    rows: int
    width: int
    ranks: int
    characteristics: Characteristics
    overlap: FloatArray | None
    densification: FloatArray
    parts: FloatArray
    scheme: str
    candidates: tuple[Candidate, ...]
    measured: Measured


@dataclass(frozen=True, slots=True)
class TableChoice:
    """The scheme that one table got, and why (an entry of `plan.json`); None is what was not measured."""

    name: str
    rows: int
    width: int
    density: float | None
    scheme: str
    reason: str
    candidates: tuple[Candidate, ...]
    measured: Measured | None = None
    characteristics: Characteristics | None = None


@dataclass(frozen=True, slots=True)
class PlanChoices:
    """The plan that the run followed (`plan.json`), and the network by which it chose, if it measured one.

    `whole` is the plan itself, None if this version cannot read it.
    """

    tables: tuple[TableChoice, ...]
    bucket_bytes: float | None
    network: Link | None
    whole: Plan | None = None


@dataclass(frozen=True, slots=True)
class Text:
    """A string that the script logged after a step."""

    step: int
    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Failure:
    """The error that ended a rank (`failure-rank-R.json`)."""

    rank: int
    step: int | None
    at: float
    error: str
    traceback: str


@dataclass(frozen=True, slots=True)
class RankLog:
    """The steps of one rank, one array `[steps]` a column; NaN where a step did not record the number.

    `wait_s` is in all, `forward_wait_s` and its like what of it was in that part; records of before do not say it.
    `samples` are those with which the model was called, where a prediction speaks of them.
    A loss that was recorded but was not finite is infinity, so that it is not taken for a missing one.
    `values` holds for each logged name an array `[steps]`, `traffic` the bytes sent for each
    (table, scheme), and `traffic_messages` the messages; 0 where there was no such traffic in a step.
    `rows` holds the rows that this rank touched of each table. A line about sparsity that cannot be understood
    is left out and counted in `odd_lines`.
    """

    rank: int
    steps: IntArray
    at: FloatArray
    step_s: FloatArray
    forward_s: FloatArray
    backward_s: FloatArray
    optimizer_s: FloatArray
    wait_s: FloatArray
    forward_wait_s: FloatArray
    backward_wait_s: FloatArray
    optimizer_wait_s: FloatArray
    bytes_sent: FloatArray
    messages: FloatArray
    loss: FloatArray
    tokens: FloatArray
    samples: FloatArray
    total_steps: FloatArray
    memory_peak_bytes: FloatArray
    values: Mapping[str, FloatArray]
    traffic: Mapping[tuple[str, str], FloatArray]
    traffic_messages: Mapping[tuple[str, str], FloatArray]
    rows: Mapping[str, FloatArray]
    texts: tuple[Text, ...]
    observations: tuple[Observation, ...]
    torn_lines: int
    odd_lines: int


@dataclass(frozen=True, slots=True)
class Run:
    """A run's folder, read. `mesh` and `plan` are None if the run ended before they were written.

    `pieces` are the seconds of forward and backward of each piece of the model, if a profile lies in the folder.
    """

    folder: Path
    launch: Launch
    mesh: MeshShape | None
    plan: PlanChoices | None
    ranks: tuple[RankLog, ...]
    failures: tuple[Failure, ...]
    pieces: Mapping[str, float] = field(default_factory=dict)

    @property
    def processes(self) -> int:
        """Number of processes that were started, or that left a log if the launcher recorded nothing."""
        return self.launch.processes or len(self.ranks)
