"""`Profile`: what a training step does, as plain values, and from and to JSON."""

from __future__ import annotations

import base64
import json
import os
import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tulle.cost import Network
from tulle.entries import Entries, cause
from tulle.errors import PlanError
from tulle.whole_file import write_whole
from tulle.workload.cluster import Cluster, cluster_from_json, network_from_json, network_to_json

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Split:
    """What splitting a module over n ranks of an axis `model` does to it.

    Args:
        share: Of its time, parameters and activations that is divided by n; the rest every rank keeps and does.
        all_reduced_bytes: Summed over the axis in forward.
        gathered_bytes: Made whole on every rank in forward, of which each has computed a part.
        all_reduced_again_bytes: Summed over the axis in backward; None for as many as in forward.
    """

    share: float
    all_reduced_bytes: int
    gathered_bytes: int = 0
    all_reduced_again_bytes: int | None = None


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
        weights_s: Of backward, that part which computes gradients of weights that nobody waits for before the step's
            end, and which `"zb-h1"` puts off.
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
    weights_s: float = 0.0


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
        row_fixed_share: Of the seconds for rows of row-sparse gradients, that part which fewer columns do not make
            shorter.
    """

    state_share: float
    step_s_per_byte: float
    updates_all_rows: bool = True
    row_s_per_byte: float | None = None
    table_s: float = 0.0
    fixed_share: float = 0.0
    row_fixed_share: float = 0.0


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
        is_divisible: Whether the model runs on half of the sample; if not, as one of graphs, a step is one micro-batch.
        between: Operations of a micro-batch on what pieces have made, by the module of whose own forward they are.
        lookahead: Whether the loop was seen to go through `tulle.lookahead`: rows of split tables go a step early.
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
    is_divisible: bool = True
    between: Mapping[str, int] = field(default_factory=dict)
    lookahead: bool = False

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
            parsed = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise PlanError(
                f"cannot read a profile from {os.fspath(path)!r}: {cause(error)}: give the profile.json that tulle "
                "profile SCRIPT leaves in its run folder"
            ) from error
        try:
            return Profile.from_json(parsed)
        except PlanError as error:
            if is_plan(parsed):
                raise PlanError(
                    f"{os.fspath(path)!r} is a plan, expected a profile: make one with tulle profile SCRIPT, or give "
                    "the one that the plan was made of"
                ) from error
            raise PlanError(
                f"cannot read a profile from {os.fspath(path)!r} ({error}): write it with Profile.save or tulle profile"
            ) from error

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {"format": FORMAT} | _plain(self)

    @staticmethod
    def from_json(parsed: object) -> Profile:
        """From plain values, checked.

        Raises:
            PlanError: Naming the entry that is wrong, and where it stands.
        """
        entries = Entries.of(parsed, "", Profile, besides=("format",))
        if entries.get("format", int, f"{FORMAT}") != FORMAT:
            raise entries.wrong("format", f"{FORMAT}")
        for name, kind in (("modules", ModuleProfile), ("tables", TableProfile)):
            entries.get(name, (list, tuple), f"a list of objects of a {kind.__name__}")
        modules = tuple(map(_module, entries.objects("modules", ModuleProfile)))
        if not modules:
            raise entries.wrong("modules", "one module or more")
        pieces = [piece.name for piece in modules]
        readers: dict[str, Callable[[str], Any]] = {
            "model": entries.text,
            "batch": partial(entries.whole, least=1),
            "modules": lambda _: modules,
            "tables": lambda name: tuple(_table(one, pieces) for one in entries.objects(name, TableProfile)),
            "optimizer": lambda name: _optimizer(entries.within(name, OptimizerProfile)),
            "cluster": lambda name: cluster_from_json(entries.get(name, object, "a cluster"), entries.at(name)),
            "step_s": entries.number,
            "peak_bytes": entries.whole,
            "networks": lambda name: _networks(entries.by_name(name, "networks")),
            "fixed_share": partial(entries.number, most=1),
            "between": entries.wholes,
            **dict.fromkeys(("is_divisible", "lookahead"), entries.flag),
        }
        return Profile(**entries.of_fields(Profile, readers))


def is_profile(parsed: object) -> bool:
    """Whether JSON looks like a profile's."""
    return isinstance(parsed, Mapping) and {"modules", "optimizer", "cluster"} <= parsed.keys()


def is_plan(parsed: object) -> bool:
    """Whether JSON looks like a plan's."""
    return isinstance(parsed, Mapping) and {"mesh", "tables", "bucket_bytes"} <= parsed.keys()


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


def _module(entries: Entries) -> ModuleProfile:
    readers: dict[str, Callable[[str], Any]] = dict.fromkeys(
        ("forward_s", "backward_s", "flop", "weights_s"), entries.number
    )
    readers |= dict.fromkeys(("parameters_bytes", "activations_bytes", "frozen_bytes"), entries.whole)
    readers |= {"name": entries.text, "reads": entries.wholes, "around": lambda name: entries.list_of(name, str)}
    readers["split"] = lambda name: _split(entries.within(name, Split))
    return ModuleProfile(**entries.of_fields(ModuleProfile, readers))


def _split(entries: Entries) -> Split:
    readers: dict[str, Callable[[str], Any]] = {"share": partial(entries.number, most=1)}
    readers |= dict.fromkeys(("all_reduced_bytes", "gathered_bytes", "all_reduced_again_bytes"), entries.whole)
    return Split(**entries.of_fields(Split, readers))


def _table(entries: Entries, pieces: Sequence[str]) -> TableProfile:
    if entries.text("module") not in pieces:
        raise entries.wrong("module", f"one of the modules: {', '.join(pieces)}")
    if not {*entries.list_of("placements", str)} <= {"rows", "columns"}:
        raise entries.wrong("placements", "some of rows, columns")
    readers: dict[str, Callable[[str], Any]] = dict.fromkeys(("name", "module"), entries.text)
    readers |= dict.fromkeys(("rows", "width"), entries.whole)
    readers |= {"value_bytes": partial(entries.whole, least=1), "is_sparse": entries.flag, "tokens": entries.number}
    readers |= {"placements": lambda name: entries.list_of(name, str), "stream": lambda _: _stream(entries)}
    return TableProfile(**entries.of_fields(TableProfile, readers))


def _stream(entries: Entries) -> tuple[tuple[Tensor, ...], ...]:
    """Rows by step and rank, which the table has, ascending."""
    found: list[tuple[Tensor, ...]] = []
    num_rows = entries.whole("rows")
    for step, packed in enumerate(entries.get("stream", (list, tuple), "a list of steps")):
        try:
            ranks = tuple(map(_unpacked, packed))
        except (TypeError, ValueError, zlib.error) as error:
            raise PlanError(f"{entries.at('stream')}[{step}] cannot be read ({error})") from error
        for rank, rows in enumerate(ranks):
            if len(rows) and not (rows[0] >= 0 and rows[-1] < num_rows and bool((rows.diff() > 0).all())):
                where = f"{entries.at('stream')}[{step}][{rank}]"
                raise PlanError(f"{where} has rows that are not distinct, ascending and below {num_rows:,}")
        found.append(ranks)
    return tuple(found)


def _optimizer(entries: Entries) -> OptimizerProfile:
    costs = ("state_share", "step_s_per_byte", "row_s_per_byte", "table_s")
    readers: dict[str, Callable[[str], Any]] = dict.fromkeys(costs, entries.number)
    readers |= dict.fromkeys(("fixed_share", "row_fixed_share"), partial(entries.number, most=1))
    readers |= {"updates_all_rows": entries.flag}
    return OptimizerProfile(**entries.of_fields(OptimizerProfile, readers))


def _networks(entries: Entries) -> dict[str, Network]:
    return {name: network_from_json(one, entries.at(name)) for name, one in entries.values.items()}


def _packed(rows: Tensor) -> str:
    """Ascending row numbers as text: the gaps between them, compressed."""
    gaps = torch.diff(rows, prepend=rows.new_zeros(1)).to(torch.int64)
    return base64.b64encode(zlib.compress(gaps.numpy().tobytes())).decode("ascii")


def _unpacked(text: str) -> Tensor:
    gaps = zlib.decompress(base64.b64decode(text))
    return torch.tensor(array("q", gaps), dtype=torch.int64).cumsum(0)
