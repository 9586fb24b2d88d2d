"""Plain values of the planner: what a training step does (`Profile`), and what it would run on (`Cluster`)."""

from __future__ import annotations

import base64
import json
import math
import os
import zlib
from array import array
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tulle.cost import Network
from tulle.errors import PlanError
from tulle.whole_file import write_whole

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Machine:
    """What one process computes with.

    Args:
        flop_per_s: Floating-point operations of a large matrix product, per second, while all processes compute.
        memory_bytes_per_s: Bytes copied per second, read and written counted once, while all processes do so.
        memory_bytes: Memory that one process may use; None is no limit.
        slowdown: Factor by which computation takes longer while the process communicates; 1 is full overlap.
        link_slowdown: Factor by which an exchange takes longer while the processes compute.
        call_s: Seconds that the run-time of a pipeline takes for each placed module and micro-batch, there and back, on
            every rank: all run the program. What lookups in tables take besides their rows is counted in it too.
        operation_s: The same for an operation between modules, on what these have made.
        micro_batch_s: The same for a micro-batch, whatever runs in it. These defaults are those of GPT-2 on a CPU.
    """

    flop_per_s: float
    memory_bytes_per_s: float
    memory_bytes: int | None = None
    slowdown: float = 1.0
    link_slowdown: float = 1.0
    call_s: float = 0.2e-3
    operation_s: float = 0.15e-3
    micro_batch_s: float = 1e-3


@dataclass(frozen=True, slots=True)
class Cluster:
    """Hosts that are alike, with processes that are alike; ranks are numbered host by host.

    Args:
        hosts: Number of hosts.
        processes_per_host: Ranks of each.
        machine: What one process computes with.
        across: The network between hosts for one rank of each, while nobody else of its host uses it.
        inside: The network among ranks of one host; None is that of `across`.
        probed_ranks: Among how many ranks `across` was measured: exchanges of more take longer, of fewer less. None
            for a network whose latencies hold for any number.

    Example:
        >>> cluster = Cluster(2, 4, Machine(1e12, 1e11), across=Network(5e-5, 1.25e9), inside=Network(1e-5, 1e10))
        >>> cluster.ranks, cluster.network(4).bandwidth_bytes_per_s, cluster.network(2, stride=4).bandwidth_bytes_per_s
        (8, 10000000000.0, 312500000.0)
    """

    hosts: int
    processes_per_host: int
    machine: Machine
    across: Network
    inside: Network | None = None
    probed_ranks: int | None = None

    @property
    def ranks(self) -> int:
        """Of all hosts."""
        return self.hosts * self.processes_per_host

    def network(self, size: int, *, stride: int = 1) -> Network:
        """What an axis of ranks `first + i * stride` gives while all such groups, side by side, use it alike."""
        inside = self.inside or self.across
        span = size * stride
        if span <= self.processes_per_host:
            return inside
        sharing = min(stride, self.processes_per_host)  # groups that send through one host's link at a time
        local_ranks = max(1, self.processes_per_host // stride)  # of one group on one host
        hosts = -(-size // local_ranks)
        across = _slowed(_among(self.across, hosts, self.probed_ranks), sharing)
        if local_ranks == 1:
            return across
        # Of what a rank sends to all others some stays on the host; of a ring one edge leaves it.
        leaving = (size - local_ranks) / (size - 1)
        everyone = _slowed(across, local_ranks)
        return replace(
            across,
            bandwidth_bytes_per_s=everyone.bandwidth_bytes_per_s / leaving,
            all_reduce_bytes_per_s=across.all_reduce_bytes_per_s or across.bandwidth_bytes_per_s,
            local_ranks=local_ranks,
            inside=inside,
            across=everyone,
        )


@dataclass(frozen=True, slots=True)
class Split:
    """What splitting a module over n ranks of an axis `model` does to it.

    Args:
        share: Of its time, parameters and activations that is divided by n; the rest every rank keeps and does.
        all_reduced_bytes: Summed over the axis in forward, and as much again in backward.
    """

    share: float
    all_reduced_bytes: int


@dataclass(frozen=True, slots=True)
class ModuleProfile:
    """What one piece of the model does in a step on one process, for one micro-batch; pieces do not overlap.

    Args:
        name: Of the module in the model.
        forward_s: Seconds.
        backward_s: Seconds.
        flop: Floating-point operations of forward.
        parameters_bytes: Of its parameters with dense gradients; tables that the profile lists are not in it.
        activations_bytes: What forward leaves for backward.
        reads: Bytes that it reads of what other pieces made, by their name; backward sends as much the other way.
        split: What tensor parallelism would do; None where nothing splits it.
        around: Modules that always call it, the outermost first: what a stage has all of is placed as one.
        frozen_bytes: Of its parameters that are not trained.
    """

    name: str
    forward_s: float
    backward_s: float
    flop: float = 0.0
    parameters_bytes: int = 0
    activations_bytes: int = 0
    reads: Mapping[str, int] = field(default_factory=dict)
    split: Split | None = None
    around: tuple[str, ...] = ()
    frozen_bytes: int = 0


@dataclass(frozen=True, slots=True)
class TableProfile:
    """What lookups do to one table.

    Args:
        name: The parameter's name in the model.
        rows: Rows of the table.
        width: Columns.
        value_bytes: Bytes of one value.
        is_sparse: Whether its gradient is sparse as the user wrote the model.
        placements: How it can be split: some of `"rows"`, `"columns"`.
        module: The piece that looks it up first.
        stream: Distinct rows, ascending, that each rank looked up: one tuple of `int64` tensors, by rank, a step.
        tokens: Lookups of one rank in one step, repeats counted; mean.
    """

    name: str
    rows: int
    width: int
    value_bytes: int
    is_sparse: bool
    placements: tuple[str, ...]
    module: str
    stream: tuple[tuple[Tensor, ...], ...] = field(default=(), compare=False, repr=False)
    tokens: float = 0.0


@dataclass(frozen=True, slots=True)
class OptimizerProfile:
    """What the optimizer keeps and takes.

    Args:
        state_share: Bytes of state for one byte of parameter: 2 for Adam.
        step_s_per_byte: Seconds for one byte of dense parameter.
        updates_all_rows: Whether it moves rows whose gradient is zero, as dense Adam does.
        row_s_per_byte: Of a row-sparse gradient for one more byte of its rows; None means as many.
        table_s: What each row-sparse gradient takes besides, however few its rows are.
        fixed_share: Of the seconds for dense parameters, that part which smaller ones do not make shorter.
    """

    state_share: float
    step_s_per_byte: float
    updates_all_rows: bool = True
    row_s_per_byte: float | None = None
    table_s: float = 0.0
    fixed_share: float = 0.0


@dataclass(frozen=True, slots=True)
class Profile:
    """What a model's training step does, measured; a plain value that moves between machines as JSON.

    Args:
        model: The model's class, for people.
        batch: Samples of the micro-batch that was measured.
        modules: The pieces in the order in which they run.
        tables: The trained tables.
        optimizer: What the optimizer keeps and takes.
        cluster: Where it was measured.
        step_s: Seconds of a whole step on one process without communication; pieces may leave some of it out.
        peak_bytes: The most memory that this step needed.
        networks: What each axis of the mesh gave on which it was measured.
        fixed_share: Of forward and backward, that part which fewer samples do not make shorter.
        between: Operations of a micro-batch on what pieces have made, by the module of whose own forward they are.
    """

    model: str
    batch: int
    modules: tuple[ModuleProfile, ...]
    tables: tuple[TableProfile, ...]
    optimizer: OptimizerProfile
    cluster: Cluster
    step_s: float
    peak_bytes: int = 0
    networks: Mapping[str, Network] = field(default_factory=dict)
    fixed_share: float = 0.0
    between: Mapping[str, int] = field(default_factory=dict)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON; the file is complete or absent."""
        write_whole(Path(path), json.dumps(self.to_json()) + "\n")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Profile:
        """Read what `save` wrote.

        Raises:
            PlanError: If the file is missing or is not a profile, saying what is wrong.
        """
        try:
            return Profile.from_json(json.loads(Path(path).read_text(encoding="utf-8")))
        except (OSError, KeyError, TypeError, ValueError, AttributeError, OverflowError, zlib.error) as error:
            if is_plan(path):
                raise PlanError(
                    f"{os.fspath(path)!r} is a plan, expected a profile: make one with tulle profile SCRIPT, or give "
                    "the one that the plan was made of"
                ) from error
            raise PlanError(
                f"cannot read a profile from {os.fspath(path)!r} ({type(error).__name__}: {error}): "
                "write it with Profile.save or tulle profile"
            ) from error

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {"format": FORMAT} | _plain(self)

    @staticmethod
    def from_json(parsed: Mapping[str, Any]) -> Profile:
        """From plain values."""
        if parsed["format"] != FORMAT:
            raise ValueError(f"format {parsed['format']!r}, expected {FORMAT}")
        pieces = {piece["name"] for piece in parsed["modules"]}
        return Profile(
            model=str(parsed["model"]),
            batch=_at_least_one(parsed, "batch"),
            modules=tuple(_module(one) for one in parsed["modules"]),
            tables=tuple(_table(one, pieces) for one in parsed["tables"]),
            optimizer=OptimizerProfile(**parsed["optimizer"]),
            cluster=cluster_from_json(parsed["cluster"]),
            step_s=_seconds(parsed, "step_s"),
            peak_bytes=int(parsed["peak_bytes"]),
            networks={name: network_from_json(one) for name, one in parsed.get("networks", {}).items()},
            fixed_share=float(parsed.get("fixed_share", 0.0)),
            between={str(name): int(count) for name, count in parsed.get("between", {}).items()},
        )


def is_profile(parsed: object) -> bool:
    """Whether JSON looks like a profile's."""
    return isinstance(parsed, Mapping) and {"modules", "optimizer", "cluster"} <= parsed.keys()


def is_plan(path: str | os.PathLike[str]) -> bool:
    """Whether a file looks like a plan's."""
    try:
        parsed = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(parsed, Mapping) and {"mesh", "tables", "bucket_bytes"} <= parsed.keys()


def cluster_from_json(parsed: Mapping[str, Any]) -> Cluster:
    """From what a profile's JSON holds of its cluster."""
    machine = Machine(**parsed["machine"])
    inside = network_from_json(parsed["inside"]) if parsed["inside"] else None
    across = network_from_json(parsed["across"])
    hosts, processes = _at_least_one(parsed, "hosts"), _at_least_one(parsed, "processes_per_host")
    return Cluster(hosts, processes, machine, across, inside, parsed.get("probed_ranks"))


def network_to_json(network: Network) -> dict[str, Any]:
    """As plain values; what costs nothing is left out, since JSON has no infinity."""
    nested = {"inside": network.inside, "across": network.across}
    values = asdict(network) | {name: network_to_json(part) if part else None for name, part in nested.items()}
    return {name: value for name, value in values.items() if value != float("inf")}


def network_from_json(parsed: Mapping[str, Any]) -> Network:
    """From what `network_to_json` gave; what an older version did not measure costs nothing."""
    nested = {name: network_from_json(parsed[name]) for name in ("inside", "across") if parsed.get(name)}
    numbers = {name: float(value) for name, value in parsed.items() if isinstance(value, int | float | str)}
    local_ranks = int(parsed.get("local_ranks", 1))
    values: dict[str, Any] = numbers | nested | {"local_ranks": local_ranks}
    return Network(**values)


def _slowed(network: Network, by: int) -> Network:
    """What so many that use a network alike get of it each."""
    reduced = network.all_reduce_bytes_per_s
    bandwidth = network.bandwidth_bytes_per_s / by
    return replace(network, bandwidth_bytes_per_s=bandwidth, all_reduce_bytes_per_s=reduced and reduced / by)


def _among(network: Network, ranks: int, probed: int | None) -> Network:
    """What a network that was measured among some ranks gives to another number of them.

    An exchange of all with all is one of pairs and something for every further rank; a ring has as many rounds as there
    are further ranks.
    """
    if probed is None or ranks == probed or min(ranks, probed) < 2:
        return network
    pair_s = network.latency_s / (probed - 1) if network.pair_latency_s is None else network.pair_latency_s
    pair_s = min(pair_s, network.latency_s)
    further_s = (network.latency_s - pair_s) / max(1, probed - 2)
    reduce_s = network.all_reduce_latency_s
    return replace(
        network,
        latency_s=pair_s + further_s * (ranks - 2),
        all_reduce_latency_s=None if reduce_s is None else reduce_s * (ranks - 1) / (probed - 1),
    )


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _packed(value)
    if isinstance(value, Network):
        return network_to_json(value)
    if hasattr(value, "__dataclass_fields__"):
        return {one.name: _plain(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    return {name: _plain(one) for name, one in value.items()} if isinstance(value, Mapping) else value


def _module(parsed: Mapping[str, Any]) -> ModuleProfile:
    split = Split(**parsed["split"]) if parsed["split"] else None
    seconds = {name: _seconds(parsed, name) for name in ("forward_s", "backward_s")}
    values: dict[str, Any] = {**parsed, **seconds, "split": split, "around": tuple(parsed.get("around", ()))}
    return ModuleProfile(**values)


def _table(parsed: Mapping[str, Any], pieces: Collection[str]) -> TableProfile:
    if parsed["module"] not in pieces:
        raise ValueError(f"table {parsed['name']!r} is of module {parsed['module']!r}, which is none of the modules")
    stream = tuple(tuple(_unpacked(rows) for rows in step) for step in parsed["stream"])
    values: dict[str, Any] = {**parsed, "placements": tuple(parsed["placements"]), "stream": stream}
    return TableProfile(**values)


def _at_least_one(parsed: Mapping[str, Any], name: str) -> int:
    number = int(parsed[name])
    if number < 1:
        raise ValueError(f"{name} {number}, expected 1 or more")
    return number


def _seconds(parsed: Mapping[str, Any], name: str) -> float:
    seconds = float(parsed[name])
    if not 0 <= seconds < math.inf:
        raise ValueError(f"{name} {seconds}, expected a time")
    return seconds


def _packed(rows: Tensor) -> str:
    """Ascending row numbers as text: the gaps between them, compressed."""
    gaps = torch.diff(rows, prepend=rows.new_zeros(1)).to(torch.int64)
    return base64.b64encode(zlib.compress(gaps.numpy().tobytes())).decode("ascii")


def _unpacked(text: str) -> Tensor:
    gaps = zlib.decompress(base64.b64decode(text))
    return torch.tensor(array("q", gaps), dtype=torch.int64).cumsum(0)
