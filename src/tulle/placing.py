"""Puts tables on ranks: which tables can be split, and the act."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
    SparseAdam,
)

from tulle.deferred import give, materialize
from tulle.engine import SplitTable, TableModule
from tulle.errors import PlanError
from tulle.mesh import Axis
from tulle.softmax import SoftmaxLayer
from tulle.tables import Split, mark, split_as

ELEMENTWISE = (*(SGD, ASGD, Adam, AdamW, Adamax, NAdam, RAdam, Adagrad, Adadelta, RMSprop, Rprop, SparseAdam),)
"""Optimizers that treat every element by itself, so that a part of a table is updated as in the whole."""
logger = logging.getLogger("tulle")


def tables_of(model: nn.Module) -> dict[str, list[TableModule]]:
    """The modules that look up in each table, by the name of its parameter; of an output layer there may be none."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, list[TableModule]] = {name: [] for name in outputs_of(model)}
    for module in model.modules():
        if isinstance(module, TableModule):
            found.setdefault(names[id(module.weight)], []).append(module)
    return found


def outputs_of(model: nn.Module) -> list[str]:
    """Names of the tables over which a softmax is trained where their rows lie."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    layers = [module for module in model.modules() if isinstance(module, SoftmaxLayer) and module.trains_all_rows]
    return list(dict.fromkeys(names[id(layer.table_and_bias()[0])] for layer in layers))


def why_whole(name: str, model: nn.Module, optimizers: Sequence[Optimizer], placement: str, ranks: int) -> str | None:
    """Why a table cannot be split by a placement, in words that end a sentence about it, or None if it can."""
    modules = tables_of(model).get(name, [])
    parameter = model.get_parameter(name)
    for owner_name, owner in model.named_modules():
        if isinstance(owner, SoftmaxLayer) and owner.table_and_bias()[0] is parameter and placement == "columns":
            return "a softmax over it needs whole rows: split it by rows"
        if owner in modules or isinstance(owner, SoftmaxLayer):
            continue
        if any(other is parameter for other in owner._parameters.values()):
            return (
                f"{owner_name or 'the model'} ({type(owner).__name__}) reads the whole of it: for an output layer, "
                "take tulle.ShardedSoftmax"
            )
    if parameter._backward_hooks:
        return "a hook is registered on it, which would see no gradient: those of split tables go to their owners"
    for module in modules:
        plain = nn.Embedding if isinstance(module, nn.Embedding) else nn.EmbeddingBag
        if type(module).forward is not plain.forward:
            return f"{type(module).__name__} has a forward of its own, which reads the whole of it"
        if module.max_norm is not None and placement == "columns":
            return "max_norm needs the norms of whole rows: split it by rows"
    if placement == "columns" and parameter.shape[1] < ranks:
        return f"it has {parameter.shape[1]} columns for {ranks} ranks: split it by rows"
    return _refused_by_optimizer(parameter, optimizers)


def check_placements(
    placements: Mapping[str, str], model: nn.Module, optimizers: Sequence[Optimizer], ranks: int
) -> None:
    """Check that the tables that a plan splits can be split.

    Raises:
        PlanError: Naming the table, and what stands against it.
    """
    for name, placement in placements.items():
        reason = why_whole(name, model, optimizers, placement, ranks)
        if reason is not None:
            raise PlanError(f"the plan splits {name!r} by {placement}, but {reason}")
        if model.get_parameter(name).grad is not None:
            raise PlanError(f"the plan splits {name!r}, which has a gradient: call optimizer.zero_grad() before")


def materialize_parts(model: nn.Module, placements: Mapping[str, str], axis: Axis, everyone: Axis) -> dict[str, Tensor]:
    """Give a deferred model its values, as one process would draw them; this rank's part only of what is split.

    Args:
        model: Built without memory.
        placements: `"rows"` or `"columns"` by name of the table.
        axis: Whose ranks hold the parts.
        everyone: All ranks of the mesh, which draw the same random numbers, and must all call it.

    Returns:
        This rank's part of each table that is split, by name; their parameters are still on device meta.
    """
    parts: dict[str, Tensor] = {}
    takers: dict[str, Callable[[int, Tensor], None]] = {}
    for name, placement in placements.items():
        parameter = model.get_parameter(name)
        rows, width = parameter.shape
        split = split_as(placement, name, (rows, width), axis)
        parts[name] = torch.zeros(split.local_shape, dtype=parameter.dtype, device=axis.device)
        takers[name] = partial(split.put, parts[name])
    materialize(model, device=axis.device, keep=takers, axis=everyone)
    return parts


def place(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    placements: Mapping[str, str],
    axis: Axis,
    parts: Mapping[str, Tensor],
) -> list[SplitTable]:
    """Keep this rank's part of each table that is split, of its optimizer state too; the parameters stay the objects.

    Args:
        model: With the same values on all ranks.
        optimizers: Over its parameters.
        placements: `"rows"` or `"columns"` by name of the table.
        axis: Whose ranks hold the parts.
        parts: What `materialize_parts` gave, for a model that was deferred.
    """
    _doubt(optimizers if placements and axis.rank == 0 else ())
    tables, outputs = tables_of(model), outputs_of(model)
    placed: list[SplitTable] = []
    for number, (name, placement) in enumerate(sorted(placements.items())):
        parameter, modules = model.get_parameter(name), tables[name]
        rows, width = parameter.shape
        split = split_as(placement, name, (rows, width), axis)
        for optimizer in optimizers:
            state = optimizer.state.get(parameter, {})
            for key, value in state.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    state[key] = split.take(value)
        if name in parts:
            give(parameter, parts[name])
        else:
            parameter.data = split.take(parameter)
        mark(parameter, split)
        for owner in model.modules():
            for key in [key for key, other in owner._parameters.items() if other is parameter]:
                owner.register_load_state_dict_pre_hook(partial(_take_part, split, key))
        placed.append(
            SplitTable(
                number,
                parameter,
                split,
                is_sparse=name not in outputs and all(module.sparse for module in modules),
                is_foreseeable=not any(module.max_norm or module.scale_grad_by_freq for module in modules),
            )
        )
    return placed


def _take_part(split: Split, key: str, _: nn.Module, state: dict[str, Any], prefix: str, *others: object) -> None:
    """Load this rank's part where a state has the whole table, as that of a plain model does."""
    value = state.get(prefix + key)
    if isinstance(value, Tensor) and tuple(value.shape) == split.shape:
        state[prefix + key] = split.take(value)


def _doubt(optimizers: Sequence[Optimizer]) -> None:
    for kind in {type(optimizer) for optimizer in optimizers} - {*ELEMENTWISE}:
        logger.warning(
            "%s is not known to treat every element by itself; if it looks at whole tensors (at their norm, say), it "
            "sees this rank's part only of tables that are split",
            kind.__name__,
        )


def _refused_by_optimizer(parameter: Tensor, optimizers: Sequence[Optimizer]) -> str | None:
    for optimizer in optimizers:
        is_its = any(parameter is other for group in optimizer.param_groups for other in group["params"])
        if is_its and type(optimizer) not in ELEMENTWISE and type(optimizer).__module__.startswith("torch.optim"):
            return (
                f"{type(optimizer).__name__} does not treat every element by itself: keep the table whole, or use one "
                f"of {', '.join(kind.__name__ for kind in ELEMENTWISE)}"
            )
    return None
