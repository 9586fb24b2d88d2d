"""`Plan`: what was decided for a model on a mesh: a value that can be read, saved and replayed."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import UnionType
from typing import Any

import torch

from tulle.cost import Network
from tulle.entries import Entries, cause
from tulle.errors import PlanError
from tulle.memory import Memory
from tulle.mesh import Mesh
from tulle.names import as_names
from tulle.plan.memory import memory_from_json
from tulle.plan.prediction import MOST_NAMED, Prediction, some
from tulle.plan.table_plan import TablePlan, explained
from tulle.sync import AUTO, as_wire_dtype, check_scheme
from tulle.tables import PLACEMENTS
from tulle.whole_file import write_whole
from tulle.workload import is_profile, network_from_json, network_to_json

FORMAT = 1
PIPE, DATA, MODEL = "pipe", "data", "model"
"""The axes along which a model is cut into stages, along which replicas lie, and along which layers are split."""
BUCKET_BYTES = 25 * 1024 * 1024
"""Dense gradients travel in buckets of this size unless a plan says otherwise (DDP's default too)."""
AT_STEP, AT_READ = "step", "read"
SCHEDULES = (AT_STEP, AT_READ, AUTO)
"""When a replica is updated: in `optimizer.step()`, when somebody reads it afterwards, or which of these pays."""
PIPELINE_SCHEDULES = ("1f1b", "eager-1f1b", "zb-h1", "gpipe")
"""In which order a rank of axis `pipe` works on micro-batches; with several stages a rank they are interleaved."""

TOLD = {
    False: "in forward, which waits for that: the loop is taken not to go through tulle.lookahead",
    True: "a step ahead, in a loop through tulle.lookahead",
}
"""When rows of split tables are told, by whether there is lookahead."""
_KINDS: dict[str, tuple[type | tuple[type, ...] | UnionType, str]] = {
    "mesh": (Mapping, "sizes of axes by name"),
    "tables": ((tuple, list), "a tuple of TablePlan"),
    "stages": (Mapping, "stages of modules by name"),
    "memory": (Memory, "a tulle.Memory"),
    "network": (Network | None, "a network or None"),
    "offers": ((tuple, list), "a tuple of texts"),
}
"""What some fields of a plan must be."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What was decided for a model on a mesh. Made by `tulle.plan`, read by `tulle.distribute`.

    Args:
        mesh: Size of each axis by name; of a `Mesh` its sizes are taken.
        tables: One entry for each table with sparse gradients, and for others that are split.
        bucket_bytes: Size of a bucket: dense gradients that one all-reduce averages.
        network: The measured network of axis `data`, None if nothing had to be chosen by cost.
        wire_dtype: Name of the dtype in which values of sparse gradients are sent; None for their own.
        offers: Sentences that say what would pay if the model were written otherwise; tulle never does it by itself.
        schedule: When gradients are averaged and parameters updated. `"step"`: in backward and `optimizer.step()`, as
            everywhere. `"read"`: dense gradients travel on after the step, and a parameter is updated when it is read
            next, in the following forward say, so that communication and forward overlap; in a loop through
            `tulle.lookahead` so do gradients of rows of split tables that the next batch does not look up. The numbers
            are the same. `"auto"`: the one that `tulle.distribute` predicts to be faster.
        stages: The pipeline stage of each module, by the module's name. Stage *s* lives on rank *s* modulo the size of
            axis `pipe`. Empty for stages that a profile leads to.
        stages_per_rank: How many stages a rank of axis `pipe` has, if `stages` is empty.
        pipeline_schedule: `"1f1b"`, `"eager-1f1b"`, `"zb-h1"` or `"gpipe"`, which `tulle.step` explains.
        micro_batches: Into how many parts a batch is cut for a pipeline, unless `tulle.step` says it.
        tensor_parallel: Names of modules whose layers are split over axis `model`, with all layers within them. Empty,
            on a mesh with such an axis, for all modules of classes that tulle knows how to split.
        memory: What is done so that a step takes less memory.
        prediction: What a step was predicted to take, and what else was considered; None if nothing was.

    Example:
        >>> plan = Plan(mesh={"data": 4}, tables=(TablePlan("source.weight", 8000, 256, "allgather", "given"),))
        >>> print(plan.explain())
        mesh data=4, dense gradients all-reduced in buckets of 25 MiB
        source.weight (8,000 x 256): allgather: given
    """

    mesh: Mapping[str, int] = field(hash=False)
    tables: tuple[TablePlan, ...] = ()
    bucket_bytes: int = BUCKET_BYTES
    network: Network | None = None
    wire_dtype: str | None = None
    offers: tuple[str, ...] = ()
    schedule: str = AT_STEP
    stages: Mapping[str, int] = field(default_factory=dict, hash=False)
    stages_per_rank: int = 1
    pipeline_schedule: str = PIPELINE_SCHEDULES[0]
    micro_batches: int = 1
    tensor_parallel: tuple[str, ...] = ()
    memory: Memory = field(default_factory=Memory)
    prediction: Prediction | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensor_parallel", as_names(self.tensor_parallel))
        if isinstance(self.mesh, Mesh):
            object.__setattr__(self, "mesh", self.mesh.shape)
        if isinstance(self.wire_dtype, torch.dtype):  # JSON knows names only
            object.__setattr__(self, "wire_dtype", str(self.wire_dtype).removeprefix("torch."))
        for name in ("tables", "offers"):
            if isinstance(given := getattr(self, name), list):  # a tuple has a hash
                object.__setattr__(self, name, tuple(given))

    @property
    def schemes(self) -> dict[str, str]:
        """The scheme of each table by name, or, for one that is split, its placement."""
        return {table.name: table.scheme for table in self.tables}

    @property
    def placements(self) -> dict[str, str]:
        """The placement, `"rows"` or `"columns"`, of each table that is split, by name."""
        return {table.name: table.scheme for table in self.tables if table.scheme in PLACEMENTS}

    def with_rows_split(self, tables: Mapping[str, tuple[int, int]], reason: str) -> Plan:
        """The plan that splits some tables, given as `(rows, width)` by name, by rows, and says why."""
        others = tuple(table for table in self.tables if table.name not in tables)
        split = tuple(TablePlan(name, *shape, "rows", reason) for name, shape in tables.items())
        return replace(self, tables=others + split)

    def explain(self) -> str:
        """What was chosen, for each axis and table, why, and what else was predicted to cost; checked as by `save`."""
        self.check_values()
        axes = ", ".join(f"{name}={size}" for name, size in self.mesh.items())
        is_reduced = self.mesh.get(DATA, 1) > 1 and not self.memory.full_shard
        buckets = f", dense gradients all-reduced in buckets of {self.bucket_bytes / 2**20:g} MiB" if is_reduced else ""
        lines = [f"mesh {axes}{buckets}"]
        if self.schedule == AT_READ:
            lines.append("replicas are updated when they are read, not in the optimizer's step")
        if self.wire_dtype:
            lines.append(f"values of sparse gradients travel as {self.wire_dtype}")
        lines += self._explain_axes() + self.memory.explain() + explained(self.tables)
        if self.prediction and self.placements and self.mesh.get(DATA, 1) > 1:
            lines.append(f"rows of split tables are told {TOLD[self.prediction.lookahead]}")
        lines += [f"offered: {offer}" for offer in self.offers]
        lines += self.prediction.explain() if self.prediction else []
        return "\n".join(lines)

    def diff(self, other: Plan) -> list[str]:
        """What another plan does differently, a line each; numbers that were only measured do not count.

        Example:
            >>> Plan({"data": 2}).diff(Plan({"data": 4}, micro_batches=8))
            ["mesh: {'data': 2} against {'data': 4}", 'micro_batches: 1 against 8']
        """
        if not isinstance(other, Plan):
            raise PlanError(f"Plan.diff was given a {type(other).__name__}, expected a Plan: Plan.load(path), say")
        lines = [
            f"{one.name}: {_beside(mine, theirs)} against {_beside(theirs, mine)}"
            for one in fields(self)
            if one.name not in ("tables", "network", "offers", "prediction")
            and (mine := getattr(self, one.name)) != (theirs := getattr(other, one.name))
        ]
        mine, theirs = self.schemes, other.schemes
        for name in dict.fromkeys([*mine, *theirs]):
            if mine.get(name) != theirs.get(name):
                lines.append(f"{name}: {mine.get(name, 'not there')} against {theirs.get(name, 'not there')}")
        return lines

    def save(
        self, path: str | os.PathLike[str], *, profile: str | os.PathLike[str] | None = None, model: str = ""
    ) -> None:
        """Write it as JSON; the file is complete or absent.

        Args:
            path: The file.
            profile: That of what it was made from, so that `tulle simulate` finds it.
            model: What that calls its model, of which `tulle simulate` then takes no other.

        Raises:
            PlanError: Naming what no plan can have; nothing is written then.
        """
        self.check_values()
        named = {"model": model} if model else {}
        named |= {} if profile is None else {"profile": os.path.relpath(profile, Path(path).parent)}
        write_whole(Path(path), json.dumps(self.to_json() | named, indent=2) + "\n")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Read what `save` wrote.

        Raises:
            PlanError: If the file is missing or is not a plan, saying what is wrong.
        """
        if not isinstance(path, str | os.PathLike):
            raise PlanError(f"Plan.load was given a {type(path).__name__}, expected the path of a file")
        try:
            parsed = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise PlanError(f"cannot read a plan from {os.fspath(path)!r}: {cause(error)}") from error
        return Plan.read(parsed, repr(os.fspath(path)))

    @staticmethod
    def read(parsed: Mapping[str, Any], name: str = "what was given") -> Plan:
        """From what `to_json` gave.

        Args:
            parsed: Plain values.
            name: What errors call it.

        Raises:
            PlanError: If it is not a plan, saying what is wrong.
        """
        try:
            return Plan.from_json(parsed)
        except PlanError as error:
            told = f"{name} is not a plan that this version reads ({error}): write it with Plan.save"
            if is_profile(parsed):
                told = f"{name} is a profile, expected a plan: make one of it with tulle plan profile.json -o plan.json"
            raise PlanError(told) from error

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "format": FORMAT,
            "mesh": dict(self.mesh),
            "bucket_bytes": self.bucket_bytes,
            "network": network_to_json(self.network) if self.network else None,
            "wire_dtype": self.wire_dtype,
            "offers": list(self.offers),
            "schedule": self.schedule,
            "stages": dict(self.stages),
            "stages_per_rank": self.stages_per_rank,
            "pipeline_schedule": self.pipeline_schedule,
            "micro_batches": self.micro_batches,
            "tensor_parallel": list(self.tensor_parallel),
            "memory": self.memory.to_json(),
            "prediction": self.prediction.to_json() if self.prediction else None,
            "tables": [table.to_json() for table in self.tables],
        }

    @staticmethod
    def from_json(parsed: Mapping[str, Any]) -> Plan:
        """From plain values, checked.

        Raises:
            PlanError: Naming the entry that is wrong, and where it stands.
        """
        entries = Entries.of(parsed, "", Plan, besides=("format", "profile", "model"))
        if entries.get("format", int, f"{FORMAT}") != FORMAT:
            raise entries.wrong("format", f"{FORMAT}")
        tables = [TablePlan.from_json(one.values, one.path) for one in entries.objects("tables", TablePlan)]
        plan = Plan(
            mesh=entries.wholes("mesh", least=1),
            tables=tuple(tables),
            bucket_bytes=entries.whole("bucket_bytes", least=1),
            network=network_from_json(parsed["network"], "network") if parsed.get("network") else None,
            wire_dtype=entries.made("wire_dtype", _wire_name) if "wire_dtype" in parsed else None,
            offers=entries.list_of("offers", str),
            schedule=entries.text("schedule", default=AT_STEP),
            stages=entries.wholes("stages") if "stages" in parsed else {},
            stages_per_rank=entries.whole("stages_per_rank", least=1, default=1),
            pipeline_schedule=entries.text("pipeline_schedule", default=PIPELINE_SCHEDULES[0]),
            micro_batches=entries.whole("micro_batches", least=1, default=1),
            tensor_parallel=entries.names("tensor_parallel"),
            memory=entries.made("memory", memory_from_json) if "memory" in parsed else Memory(),
            prediction=Prediction.from_json(parsed["prediction"]) if parsed.get("prediction") else None,
        )
        plan.check_values()
        return plan

    def check_values(self) -> None:
        """Check what can be checked without mesh and model.

        Raises:
            PlanError: Naming what no plan can have.
        """
        for name, (kind, expected) in _KINDS.items():
            if not isinstance(getattr(self, name), kind):
                raise PlanError(f"the plan has {name}={getattr(self, name)!r}, expected {expected}")
        for table in self.tables:
            if not isinstance(table, TablePlan):
                raise PlanError(f"the plan has {table!r} among its tables, expected a TablePlan")
            check_scheme(table.scheme, extra=(AUTO, *PLACEMENTS))
        for name, size in self.mesh.items():
            _positive(size, f"axis {name}")
        for name in ("bucket_bytes", "micro_batches", "stages_per_rank"):
            _positive(getattr(self, name), name)
        for name, stage in self.stages.items():
            _stage(stage, name)
        _one_of(SCHEDULES, self.schedule, "schedule")
        _one_of(PIPELINE_SCHEDULES, self.pipeline_schedule, "pipeline_schedule")
        as_wire_dtype(self.wire_dtype)
        self.memory.checked()

    def check(
        self, mesh: Mapping[str, int], tables: Mapping[str, tuple[int, int]], modules: Collection[str] | None = None
    ) -> None:
        """Check that the plan is for this mesh, these tables and these modules.

        Args:
            mesh: Size of each axis by name; those of one rank need not be there.
            tables: `(rows, width)` of each table of the model by name.
            modules: Names of the model's modules; None if they are not known yet.

        Raises:
            PlanError: Naming what differs.
        """
        self.check_values()
        own, given = ({name: size for name, size in sizes.items() if size > 1} for sizes in (self.mesh, mesh))
        if own != given:
            raise PlanError(f"the plan is for the mesh {dict(self.mesh)}, this one is {dict(mesh)}: make a plan for it")
        self._check_tables(tables)
        self._check_axes()
        if modules is not None:
            self.check_modules(modules)

    def _check_tables(self, tables: Mapping[str, tuple[int, int]]) -> None:
        named = [table.name for table in self.tables]
        if twice := [name for number, name in enumerate(named) if name in named[:number]]:
            raise PlanError(f"the plan has the table {twice[0]!r} twice")
        for table in self.tables:
            shape = tables.get(table.name)
            if shape is None:
                known = ", ".join(tables) or "none"
                raise PlanError(
                    f"the plan has a table {table.name!r}, the model's tables with sparse gradients are: {known}"
                )
            if shape != (table.rows, table.width):
                raise PlanError(
                    f"the plan has {table.name!r} with {table.rows} x {table.width}, "
                    f"the model has it with {shape[0]} x {shape[1]}"
                )

    def _check_axes(self) -> None:
        """That what is said of an axis has one."""
        if self.stages and PIPE not in self.mesh:
            raise PlanError(f"the plan has stages, but its mesh has no axis {PIPE!r}: give tulle.init {PIPE}=")
        if self.tensor_parallel and MODEL not in self.mesh:
            raise PlanError(
                f"the plan splits {self.tensor_parallel[0]!r}, but its mesh has no axis {MODEL!r}: "
                f"give tulle.init {MODEL}="
            )

    def check_modules(self, modules: Collection[str]) -> None:
        """Raise a PlanError if it names a module that is none of these, the model's."""
        named = {"stages": self.stages, "tensor_parallel": self.tensor_parallel, "memory": self.memory.modules}
        for field_name, names in named.items():
            if unknown := [name for name in names if name not in modules]:
                near = ", ".join([module for module in modules if module][:5])
                raise PlanError(
                    f"the plan's {field_name} names {unknown[0]!r}, which is not a module of the model: "
                    f"it has {near}, ..."
                )

    def _explain_axes(self) -> list[str]:
        """How the model is cut along axes other than `data`, a line each."""
        lines: list[str] = []
        if self.mesh.get(PIPE, 1) > 1:
            at: dict[int, list[str]] = {}
            for name, stage in self.stages.items():
                at.setdefault(stage, []).append(name or "the model")
            cut = "; ".join(f"{stage}: {_ends(names)}" for stage, names in sorted(at.items()))
            chosen = f"by profile, {self.stages_per_rank} a rank"
            batches = f", {self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
            lines.append(f"stages ({self.pipeline_schedule}{batches}): {cut or chosen}")
        if self.mesh.get(MODEL, 1) > 1:
            lines.append(f"split over axis {MODEL}: {some(self.tensor_parallel) or 'all that is registered'}")
        return lines


def _beside(one: object, other: object) -> object:
    """Of a mapping the entries that are not alike in another; all else as it is."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return {key: value for key, value in one.items() if key not in other or other[key] != value}
    return one


def _ends(names: Sequence[str]) -> str:
    """Modules of a stage, in the order in which they run."""
    return ", ".join(names) if len(names) <= MOST_NAMED else f"{names[0]} .. {names[-1]} ({len(names)} modules)"


def _one_of(known: tuple[str, ...], given: str, name: str) -> None:
    if given not in known:
        raise PlanError(f"the plan has the {name} {given!r}, expected one of {', '.join(known)}")


def _wire_name(given: str | None) -> str | None:
    as_wire_dtype(given)
    return given


def _positive(number: int, name: str) -> None:
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise PlanError(f"the plan has {name}={number!r}, expected a positive number")


def _stage(number: int, name: str) -> None:
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise PlanError(f"the plan has {name!r} at stage {number!r}, expected a number from 0")
