"""`estimate`: the memory that a step needs on each rank under a plan; `step_seconds`: its time on a pipeline."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn
from torch.optim import AdamW, Optimizer, SparseAdam

from tulle.comm import ranks_by_host
from tulle.errors import DataError, MeshError, ModelError, PlanError
from tulle.memory.estimate import Estimate, Loss, count_on_a_copy, default_loss, on_a_rank
from tulle.memory.options import HOST, Memory
from tulle.memory.recompute import repeated
from tulle.memory.stages import Stages, count_stages
from tulle.mesh import Mesh
from tulle.pipeline.homes import homes_of
from tulle.pipeline.objects import copied
from tulle.pipeline.partition import Partition
from tulle.pipeline.schedule import activations_at_once, checked
from tulle.plan import Plan
from tulle.plan.plan import DATA, MODEL, PIPE
from tulle.tables import table_modules
from tulle.traits import states_of

OptimizerOf = Callable[[Iterable[nn.Parameter]], Optimizer]
Optimizers = Optimizer | Sequence[Optimizer] | OptimizerOf


@dataclass(frozen=True, slots=True)
class StepEstimate:
    """The memory that a step needs; ranks that differ only along axes `data` and `model` need the same.

    Args:
        mesh: Size of each axis by name.
        ranks: An estimate for each rank along axis `pipe`; one if there is no such axis.

    Example:
        >>> print(StepEstimate({"pipe": 1}, (Estimate(2**20, 2**20, 2**21, 0, 2**22, 5 * 2**20),)))
        MiB                rank 0
        parameters            1.0
        gradients             1.0
        optimizer             2.0
        activations           0.0
        peak                  4.0
        measured              5.0
    """

    mesh: Mapping[str, int]
    ranks: tuple[Estimate, ...]

    def __str__(self) -> str:
        """A column for each rank along axis `pipe`, in MiB; if that is not every rank, its head is "pipe 0", say."""
        names = ["parameters", "gradients", "optimizer", "activations", "peak", "measured"]
        head = "rank" if math.prod(self.mesh.values()) == len(self.ranks) else PIPE
        lines = [f"{'MiB':<12}" + "".join(f"{f'{head} {rank}':>13}" for rank in range(len(self.ranks)))]
        for name in names:
            values = [getattr(rank, f"{name}_bytes") for rank in self.ranks]
            if any(value is not None for value in values):
                cells = [f"{'' if value is None else f'{value / 2**20:,.1f}':>13}" for value in values]
                lines.append(f"{name:<12}" + "".join(cells))
        return "\n".join(lines)

    def with_measured(self, peak_bytes: Sequence[int]) -> StepEstimate:
        """The same with a line more: the peak that was measured on each rank along axis `pipe`, in bytes.

        Raises:
            DataError: If it is not one number for each of them.
        """
        if len(peak_bytes) != len(self.ranks):
            raise DataError(
                f"with_measured was given {len(peak_bytes)} numbers, expected {len(self.ranks)}: the peak of one rank "
                f"for each along axis {PIPE!r}, for ranks along the others need the same"
            )
        ranks = [replace(rank, measured_bytes=measured) for rank, measured in zip(self.ranks, peak_bytes, strict=True)]
        return StepEstimate(self.mesh, tuple(ranks))


def estimate(
    model: nn.Module,
    sample: object,
    mesh: Mesh | Mapping[str, int],
    plan: Plan | str | os.PathLike[str] | Mapping[str, Any] | None = None,
    *,
    optimizer: Optimizers | None = None,
    loss: Loss | None = None,
) -> StepEstimate:
    """How much memory a training step needs on each rank. Nothing is sent, and the model stays as it is.

    Tensors are counted, not what kernels take inside: a CPU's convolutions have, while they run, about the size of what
    goes in and comes out of them besides.

    Args:
        model: Not distributed yet; on any device, `meta` included.
        sample: One rank's batch, as the model is called with it: a mapping is passed as keywords, a tuple as
            positional arguments, anything else as the one argument.
        mesh: What `tulle.init` returns, or the sizes of axes by name, for processes that need not exist.
        plan: A plan, its JSON, or the path of one. Its stages, micro-batches, split modules and memory options count.
            None for replicas of the whole model.
        optimizer: One or several over the model's parameters, or a function that makes one, given the parameters. None
            for AdamW, and SparseAdam for tables with sparse gradients.
        loss: A function from what the model returns to the loss. None takes its attribute `loss`, or else the sum of
            what it returns.

    Raises:
        PlanError: If the plan is not one of these (a word such as "auto" is not: only processes can choose), has an
            impossible value, is for another mesh, or names modules that the model has not; or if the mesh has an axis
            `pipe` and the plan no stages.
        MeshError: If the mesh is not one of these, or has another axis than `data`, `pipe` and `model`.
        ModelError: If model or optimizer are not ones of torch, or the loss does not depend on the parameters.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(4)))
        >>> plan = Plan({"pipe": 2}, stages={"0": 0, "1": 0, "2": 1, "3": 1}, micro_batches=4)
        >>> found = estimate(model, torch.ones(64, 256), {"pipe": 2}, plan)
        >>> [rank.parameters_bytes // 2**10 for rank in found.ranks]
        [512, 512]
        >>> found.ranks[0].activations_bytes > found.ranks[1].activations_bytes  # it holds two micro-batches
        True
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"estimate was given a {type(model).__name__} as model, expected a torch.nn.Module")
    sizes = _sizes_of(mesh)
    chosen = _plan_of(plan, sizes)
    chosen.check_modules(dict(model.named_modules(remove_duplicate=False)))
    if not (loss is None or callable(loss)):
        raise ModelError(f"estimate was given loss={loss!r}, expected a function from the model's result to it")
    ranks = sizes.get(PIPE, 1)
    if ranks > 1 and not chosen.stages:
        raise PlanError(
            f"estimate was given a mesh with axis {PIPE}={ranks} and a plan without stages: name them in it"
        )
    stages = _stages(model, chosen, sizes)
    stepped = _optimizer_of(optimizer, model)
    options = chosen.memory
    whole = count_on_a_copy(
        model, stepped, _micro_batch(sample, chosen.micro_batches), options, loss or default_loss, count_stages(stages)
    )
    sharers, found = _sharers(mesh, sizes, options), []
    for rank in range(ranks):
        here = range(rank, stages.count, ranks)
        held = _held(chosen, rank, ranks, stages.count)
        parts = [on_a_rank(whole[stage], sharers, options, _gathered(model, stages, stage)) for stage in here]
        together = _together(parts, [whole[stage].activations_bytes for stage in here], held)
        found.append(replace(together, peak_bytes=together.peak_bytes + _buckets(chosen, sizes, together)))
    return StepEstimate(sizes, tuple(found))


def _sharers(mesh: Mesh | Mapping[str, int], sizes: Mapping[str, int], options: Memory) -> int:
    """Ranks of axis `data` among which the plan shares something out."""
    if options.full_shard != HOST or sizes.get(DATA, 1) == 1:
        return sizes.get(DATA, 1)
    if not isinstance(mesh, Mesh):
        raise PlanError(
            f"the plan has full_shard={HOST!r}, and estimate was given sizes of axes, which do not tell how many ranks "
            "a host has: give the mesh of tulle.init, or full_shard=True and an axis 'data' of one host's ranks"
        )
    return max(len(ranks) for ranks in ranks_by_host(mesh[DATA]))


class _Several:
    """Optimizers that step as one."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Of all of them."""
        return [group for one in self._optimizers for group in one.param_groups]

    @property
    def state(self) -> dict[Tensor, Any]:
        """Of all of them."""
        return {parameter: entries for one in self._optimizers for parameter, entries in states_of(one).items()}

    def step(self) -> None:
        """Of all of them."""
        for one in self._optimizers:
            one.step()

    def zero_grad(self) -> None:
        """Of all of them."""
        for one in self._optimizers:
            one.zero_grad()


def _plan_of(given: Plan | str | os.PathLike[str] | Mapping[str, Any] | None, sizes: Mapping[str, int]) -> Plan:
    if given is None:
        return Plan(mesh=sizes)
    is_path = isinstance(given, os.PathLike) or (isinstance(given, str) and Path(given).suffix == ".json")
    if not (is_path or isinstance(given, Plan | Mapping)):
        raise PlanError(
            f"estimate was given plan={given!r}, expected a Plan, its JSON, the path of one (*.json) or None: "
            "tulle.plan(model, optimizer, mesh) makes one"
        )
    plan = given if isinstance(given, Plan) else Plan.read(given) if isinstance(given, Mapping) else Plan.load(given)
    plan.check_values()
    if plan.mesh and _joined(plan.mesh) != _joined(sizes):
        raise PlanError(f"estimate was given a plan for the mesh {dict(plan.mesh)} and the mesh {dict(sizes)}")
    return plan


def _sizes_of(mesh: object) -> dict[str, int]:
    sizes = mesh.shape if isinstance(mesh, Mesh) else mesh
    if not isinstance(sizes, Mapping):
        raise MeshError(
            f"estimate was given a {type(mesh).__name__} as mesh, expected what tulle.init returns, or sizes of axes "
            "by name"
        )
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise MeshError(f"estimate was given a mesh with {name}={size!r}, expected a positive number of ranks")
        if name not in (DATA, PIPE, MODEL) and size > 1:
            raise MeshError(
                f"estimate was given a mesh with {name}={size}, expected the axes {DATA!r}, {PIPE!r} and {MODEL!r}"
            )
    return dict(sizes)


def _joined(mesh: Mapping[str, int]) -> dict[str, int]:
    return {axis: size for axis, size in mesh.items() if size > 1}


def _optimizer_of(given: Optimizers | None, model: nn.Module) -> Optimizer:
    """What steps a model's parameters, in the way of one optimizer."""
    if given is None:
        tables = {id(table) for _, module, table in table_modules(model) if module.sparse}
        dense = [parameter for parameter in model.parameters() if id(parameter) not in tables]
        sparse = [parameter for parameter in model.parameters() if id(parameter) in tables]
        given = [AdamW(dense)] if dense else []
        given += [SparseAdam(sparse)] if sparse else []
    if isinstance(given, Optimizer):
        return given
    if not (callable(given) or (isinstance(given, Sequence) and all(isinstance(one, Optimizer) for one in given))):
        raise ModelError(
            f"estimate was given a {type(given).__name__} as optimizer, expected one or several of torch.optim, or "
            "what makes one of parameters"
        )
    return cast("Optimizer", _Several(given)) if isinstance(given, Sequence) else given(model.parameters())


def step_seconds(partition: Partition, ranks: int, micro_batches: int) -> float:
    """How long forward and backward of a step take on a pipeline: the slowest rank's work and the way to it.

    Args:
        partition: As `deal` found it, of stages that take the time that it says for a micro-batch.
        ranks: Among which the stages are dealt round.
        micro_batches: Of a step.

    With one stage a rank, T = sum of all stages + (micro-batches - 1) times the slowest; with several the first and the
    last micro-batch pass one of a rank's stages before the next rank can begin (*Megatron-LM*, SC'21, section 2.2).

    Example:
        >>> from tulle.pipeline.partition import Piece, partition
        >>> found = partition([Piece("a", 1.0), Piece("b", 2.0), Piece("c", 1.0), Piece("d", 2.0)], 2)
        >>> found.times_s, step_seconds(found, 2, 8)
        ((3.0, 3.0), 27.0)
    """
    of_rank = [sum(partition.times_s[rank::ranks]) for rank in range(ranks)]
    groups = max(1, math.ceil(partition.count / ranks))
    slowest = max(range(ranks), key=lambda rank: of_rank[rank])
    ramp = (sum(of_rank) - of_rank[slowest]) / groups
    return micro_batches * of_rank[slowest] + ramp


def _stages(model: nn.Module, plan: Plan, sizes: Mapping[str, int]) -> Stages:
    count = 1 + max(plan.stages.values(), default=0)
    homes = homes_of(model, plan.stages) if plan.stages else {}
    split = [name for name in plan.tensor_parallel if name in dict(model.named_modules())]
    return Stages(plan.stages, homes, count, tuple(split), sizes.get(MODEL, 1), plan.micro_batches)


def _micro_batch(sample: object, micro_batches: int) -> object:
    """The largest of the parts that a batch is cut into; what a tokenizer gives as a dictionary."""

    def part(leaf: Any) -> Any:
        is_cut = isinstance(leaf, Tensor) and leaf.dim() > 0
        return leaf[: math.ceil(len(leaf) / micro_batches)] if is_cut else leaf

    return copied(dict(sample) if isinstance(sample, Mapping) else sample, part)


def _held(plan: Plan, rank: int, ranks: int, stages: int) -> float:
    """Micro-batches whose activations a rank holds, of all of its stages together."""
    if ranks == 1:
        return 1.0
    schedule = checked(plan.pipeline_schedule)
    return activations_at_once(schedule, rank, ranks, stages, plan.micro_batches)


def _gathered(model: nn.Module, stages: Stages, stage: int) -> int:
    """Half of what full sharding has whole at a time: wholes, their gradients, and what of these leaves and comes."""

    def size(name: str) -> int:
        within = [(n, p) for n, p in model.named_parameters() if not name or n.startswith(f"{name}.")]
        is_split = {n: any(n.startswith(f"{split}.") for split in stages.split) for n, _ in within}
        return sum(p.nbytes // (stages.ranks if is_split[n] else 1) for n, p in within)

    placed = [name for name, at in stages.modules.items() if at == stage] or [""]
    inner = {name: size(name) for name in repeated(model) if any(_is_within(name, other) for other in placed)}
    rest = [size(name) - sum(inner[other] for other in inner if _is_within(other, name)) for name in placed]
    if stages.modules:
        return 3 * max([*inner.values(), *rest]) // 2
    return sum(rest) + 3 * max(inner.values(), default=0) // 2  # the rest is whole as long as the model runs


def _is_within(name: str, other: str) -> bool:
    return not other or f"{name}.".startswith(f"{other}.")


def _buckets(plan: Plan, sizes: Mapping[str, int], needed: Estimate) -> int:
    """Bytes in which gradients travel over axis `data`, beside those that add up over micro-batches."""
    adds_up = plan.micro_batches > 1 or sizes.get(PIPE, 1) > 1
    return needed.gradients_bytes if adds_up and sizes.get(DATA, 1) > 1 and not plan.memory.full_shard else 0


def _together(parts: Sequence[Estimate], activations: Sequence[int], held: float) -> Estimate:
    """Stages of one rank; all but one of the micro-batches that it holds wait while one runs."""
    waiting = round((held - 1) * sum(activations)) + sum(activations) - max(activations)
    standing = [part.parameters_bytes + part.optimizer_bytes + part.gradients_bytes for part in parts]
    moving = [part.peak_bytes - stands for part, stands in zip(parts, standing, strict=True)]
    return Estimate(
        sum(part.parameters_bytes for part in parts),
        sum(part.gradients_bytes for part in parts),
        sum(part.optimizer_bytes for part in parts),
        round(held * sum(activations)),
        sum(standing) + max(moving) + waiting,
    )
