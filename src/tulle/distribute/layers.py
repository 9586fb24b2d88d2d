"""Splits layers over axis `model`, and what an optimizer knows of them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from tulle.comm import gather_values
from tulle.distribute.axes import Axes
from tulle.errors import PlanError
from tulle.mesh import Axis
from tulle.placing import tables_of
from tulle.plan import Plan
from tulle.tensor_parallel import Placement, apply, known, placements
from tulle.traits import ELEMENTWISE, doubt, is_elementwise, states_of

logger = logging.getLogger("tulle")


def split_layers(model: nn.Module, optimizers: Sequence[Optimizer], plan: Plan, axes: Axes) -> None:
    """Split layers over axis `model`, if there is one.

    Every rank of the mesh must call it, with the same values on all ranks of axis `model`.

    Args:
        model: On its stages already.
        optimizers: Over its parameters; of state that they have, each rank keeps its part.
        plan: What is to be split.
        axes: Of the mesh.

    Raises:
        PlanError: If an optimizer must see whole parameters, or all of them.
    """
    if axes.model is not None:
        _share_randomness(axes.model)
        _apply(model, plan, axes.model)
    split = {id(model.get_parameter(name)): placement for name, placement in placements(model).items()}
    for optimizer in optimizers if axes.splitting else ():
        _check_sees_enough(optimizer, placements(model), model, axes)
        _keep_parts(optimizer, split)


def _check_sees_enough(optimizer: Optimizer, split: Mapping[str, Placement], model: nn.Module, axes: Axes) -> None:
    """Refuse an optimizer that needs what this rank does not have; doubt one that is not known."""
    kind = type(optimizer)
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    name = next((name for name in split if id(model.get_parameter(name)) in stepped), None)
    if isinstance(optimizer, LBFGS):
        raise PlanError(
            f"{kind.__name__} looks at all parameters at once, of which a rank has some: the mesh splits the model "
            f"over axis {axes.splitting[0].name!r}. Use an optimizer that steps each by itself, or axis 'data' alone"
        )
    if is_elementwise(optimizer):
        return
    if name is None:
        if axes.pipe is not None and not kind.__module__.startswith("torch.optim") and axes.whole.rank == 0:
            logger.warning(
                "%s is not known to step each parameter by itself; if it looks at several at once (at the norm of all, "
                "as Prodigy and LAMB do), it sees those of one stage only: then take another, or a mesh without 'pipe'",
                kind.__name__,
            )
        return
    if kind.__module__.startswith("torch.optim"):
        raise PlanError(
            f"{kind.__name__} does not treat every element by itself, and {name!r} is split over axis 'model': use one "
            f"of {', '.join(one.__name__ for one in ELEMENTWISE)}, or another axis"
        )
    if axes.whole.rank == 0:
        logger.info("%s: of %r and others, which are split over axis 'model'", doubt(kind), name)


def _apply(model: nn.Module, plan: Plan, axis: Axis) -> None:
    leave = whole_modules(model, plan)
    if plan.tensor_parallel:
        apply(model, axis, select=plan.tensor_parallel, leave=leave)
    elif any(name not in leave for name in known(model, ranks=axis.size)):
        apply(model, axis, leave=leave)
    elif any(name not in leave for name in known(model, smallest_bytes=0, ranks=axis.size)):
        apply(model, axis, leave=leave, smallest_bytes=0)  # small as they are: nothing else is there
    else:
        logger.warning(
            "axis %s=%d splits nothing of %s, so that its ranks do the same work: register a factory for its classes "
            "by tulle.tensor_parallel.register, or use the ranks for another axis",
            axis.name,
            axis.size,
            type(model).__name__,
        )


def whole_modules(model: nn.Module, plan: Plan) -> set[str]:
    """Names of the modules of tables that the plan keeps in step by rows, as they are or split over axis `data`."""
    tables = {name for name in tables_of(model) if name in plan.schemes}
    parameters = {id(model.get_parameter(name)) for name in tables}
    return {
        name
        for name, module in model.named_modules()
        if any(id(parameter) in parameters for parameter in module._parameters.values())
    }


def _share_randomness(axis: Axis) -> None:
    """Have ranks of axis `model`, which hold the same activations, drop the same of them: those of its first rank."""
    state = gather_values(torch.get_rng_state(), axis, label="random state")[0]
    torch.set_rng_state(state)
    if axis.device.type == "cuda":
        torch.cuda.set_rng_state(gather_values(torch.cuda.get_rng_state(), axis, label="random state")[0])


def _keep_parts(optimizer: Optimizer, split: dict[int, Placement]) -> None:
    """Of an optimizer's state, keep what belongs to what this rank has."""
    for parameter, state in states_of(optimizer).items():
        if parameter.is_meta:
            del optimizer.state[parameter]
        elif (placement := split.get(id(parameter))) is not None:
            for name, value in state.items():
                if isinstance(value, Tensor) and value.shape == placement.shape:
                    state[name] = placement.part(value)
