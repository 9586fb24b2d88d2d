"""Puts the stages of a plan on ranks, and keeps replicas of a stage in step once a step of micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

from tulle.comm import gather_values
from tulle.distribute.axes import Axes
from tulle.distribute.in_order import MailboxInOrder
from tulle.engine import DataParallel, engine_of
from tulle.errors import PlanError
from tulle.mesh import Axis, axis_of
from tulle.pipeline import deal, pins_of, place, placement_of
from tulle.pipeline.mailbox import Mailbox
from tulle.pipeline.randomness import seed_of
from tulle.pipeline.run import Runtime, Step
from tulle.plan import Plan
from tulle.process_groups import new_group
from tulle.tensor_parallel import known

_IN_ORDER = "tulle in order"
"""Where axis `pipe` keeps the names of the axes whose ranks take micro-batches in one order."""


class ReplicatedStages(Runtime):
    """A pipeline whose stages are replicated along axis `data`: gradients add up, and travel once a step.

    Args:
        axis: Whose ranks hold the stages.
        seed: Of all random numbers that programs draw.
        peers: Ranks at the same place in it that take micro-batches in one order, as their layers exchange something.
    """

    def __init__(self, axis: Axis, seed: int, peers: Axis | None = None) -> None:
        super().__init__(axis, seed)
        self._peers = peers
        self.engines: WeakValueDictionary[int, DataParallel] = WeakValueDictionary()
        """By number of the model that is placed."""

    def run_step(self, step: Step) -> list[Any]:
        """Run a step function for each micro-batch, and then sum gradients over axis `data`.

        A step may call models that it was not given, too: as what it closes over, or in a list.
        """
        given = {engine for model in step.models if (engine := engine_of(model)) is not None}
        with _added_up({*given, *self.engines.values()}, lambda: given.union(self._engines_of(self.ran))):
            return super().run_step(step)

    def _is_any(self, here: bool) -> bool:  # noqa: FBT001 - what is asked
        return here if self._peers is None else any(gather_values(here, self._peers, label=_IN_ORDER))

    @contextmanager
    def _backward_outside_of_steps(self) -> Iterator[None]:
        engines = self._engines_of(self._models_called())
        with _added_up(engines, lambda: engines), super()._backward_outside_of_steps():
            yield

    def _engines_of(self, models: Collection[int]) -> Collection[DataParallel]:
        return [engine for number, engine in self.engines.items() if number in models]

    def _models_called(self) -> set[int]:
        return self._current.models if self._current is not None else set()


@contextmanager
def _added_up(engines: Collection[DataParallel], having: Callable[[], Collection[DataParallel]]) -> Iterator[None]:
    """Let gradients add up on each rank within this context, and sum them over ranks at its end.

    Args:
        engines: Of all models that may have some.
        having: Gives, at the end, those of models that have, alike on all ranks.
    """
    with ExitStack() as stack:
        for engine in engines:
            stack.enter_context(engine.syncing.off_for_all())
        yield
    for engine in sorted(having(), key=lambda engine: engine.number):
        if engine.syncing:
            engine.synchronize()


def dealt_stages(plan: Plan, model: nn.Module, axes: Axes, sample: object) -> Plan:
    """The plan with the stage of each module that is to be placed. Every rank of the mesh must call it.

    Args:
        plan: With stages, or without.
        model: Not placed yet.
        axes: Of the mesh.
        sample: This rank's; None if any rank has none.

    Raises:
        PlanError: If there is nothing to go by, or the plan cuts a module that is split over axis `model` as one.
    """
    pipe = axes.pipe
    if pipe is None:
        return plan
    stages = dict(plan.stages)
    if not stages and sample is not None:
        # Rank 0 of the mesh measures, and all hear of it.
        stages = dict(deal(model, sample, axes.whole, stages=pipe.size * plan.stages_per_rank).assignment)
        stages = uncut(stages, _split_as_one(model, plan, axes))
    stages = stages or pins_of(model)
    if not stages:
        raise PlanError(
            f"the mesh has axis {pipe.name}={pipe.size}, and nothing says which module lives where: give sample= one "
            "batch to measure on, or a plan with stages, or pin modules with tulle.stage"
        )
    for name in _split_as_one(model, plan, axes):
        at = {stage for other, stage in stages.items() if other.startswith(f"{name}.")}
        if len(at) > 1:
            raise PlanError(
                f"the plan cuts {name!r} into stages {sorted(at)}, but it is split over axis 'model' as one: place "
                "it as a whole, or leave it out of Plan.tensor_parallel"
            )
    return replace(plan, stages=stages | _beside(stages, plan.placements, model))


def _split_as_one(model: nn.Module, plan: Plan, axes: Axes) -> list[str]:
    """Names of modules that one rule splits over axis `model`, of those that the plan says to split."""
    if axes.model is None:
        return []
    said = plan.tensor_parallel or ("",)
    return [name for name in known(model) if any(not one or f"{name}.".startswith(f"{one}.") for one in said)]


def _beside(stages: Mapping[str, int], tables: Collection[str], model: nn.Module) -> dict[str, int]:
    """Stages of the modules of split tables of which nobody has said any: the first.

    What is at no stage runs between modules, operation by operation, and a lookup in a split table is none of those.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    split = {id(parameters[name]) for name in tables if name in parameters}
    holders = [name.rpartition(".")[0] for name, parameter in parameters.items() if id(parameter) in split]
    unplaced = [one for one in holders if not any(not name or f"{one}.".startswith(f"{name}.") for name in stages)]
    return dict.fromkeys(unplaced, min(stages.values()))


def put_on_stages(model: nn.Module, plan: Plan, axes: Axes, *, in_order_of: Sequence[Axis]) -> None:
    """Have each rank of axis `pipe` keep its own stages of a model, in place. Every rank of the mesh must call it.

    Args:
        model: Built alike on all ranks.
        plan: With stages.
        axes: Of the mesh.
        in_order_of: The axes over which layers of a stage exchange something while they run.

    Raises:
        PlanError: If the pipeline was begun by a model whose layers exchange nothing.
    """
    pipe = axes.pipe
    assert pipe is not None, "called for a mesh with stages"
    axes.make_lanes()
    seed = gather_values(torch.initial_seed(), axes.whole, label="the seed")[0]
    if Runtime not in pipe.kept:
        peers = _together(in_order_of, axes.whole) if in_order_of else None
        if peers is not None:
            pipe.kept[Mailbox] = MailboxInOrder(pipe, peers)
        pipe.kept[Runtime] = ReplicatedStages(pipe, seed_of(seed, axes.data.rank), peers)
        pipe.kept[_IN_ORDER] = [axis.name for axis in in_order_of]
    elif not {axis.name for axis in in_order_of} <= set(pipe.kept.get(_IN_ORDER, ())):
        raise PlanError(
            "layers of this model exchange something between replicas (split tables, or full_shard), on a pipeline on "
            "which a model whose layers do not was placed before: distribute this one first"
        )
    place(model, pipe, plan.stages)


def follow_stages(model: nn.Module, engine: DataParallel) -> None:
    """Have the gradients of a model that was put on stages travel once a step."""
    placement = placement_of(model)
    assert placement is not None, "called for a model that was put on stages"
    if isinstance(placement.runtime, ReplicatedStages):
        placement.runtime.engines[placement.runtime.placed] = engine


def uncut(stages: dict[str, int], names: Collection[str]) -> dict[str, int]:
    """Stages that cut none of some modules: each is where most of what is within it was."""
    uncut: dict[str, int] = {}
    for other, stage in stages.items():
        around = next((name for name in names if other.startswith(f"{name}.")), None)
        within = [at for one, at in stages.items() if one.startswith(f"{around}.")]
        uncut[around or other] = max(sorted(set(within)), key=within.count) if around else stage
    return uncut


def _together(axes: Sequence[Axis], whole: Axis) -> Axis:
    """The ranks that differ from this one along some axes only, as one axis. Every rank must call it."""
    if len(axes) == 1:
        return axes[0]
    first, second = axes
    lines = gather_values(second.ranks, first, label="ranks of a stage")
    ranks = sorted(rank for line in lines for rank in line)
    group = new_group(ranks, first.timeout_s, purpose="stage")
    return replace(axis_of(group, name="stage"), device=whole.device)
