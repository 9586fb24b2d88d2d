"""Puts tables on ranks: which tables can be split, and the act."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tulle.deferred import give, materialize
from tulle.engine import SplitTable
from tulle.errors import PlanError
from tulle.mesh import Axis
from tulle.parts import WHOSE, load_part, local_of, refuse_to_checkpoint, stated_part
from tulle.softmax import SoftmaxLayer
from tulle.tables import (
    PLACEMENTS,
    Lookup,
    Split,
    TableModule,
    guard_table,
    has_own_forward,
    split_as,
    table_modules,
)
from tulle.traits import ELEMENTWISE, doubt, hold, is_elementwise

logger = logging.getLogger("tulle")


def tables_of(model: nn.Module) -> dict[str, list[TableModule]]:
    """The modules that look up in each table, by the name of its parameter; of an output layer there may be none."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, list[TableModule]] = {name: [] for name in outputs_of(model)}
    for _, module, table in table_modules(model):
        found.setdefault(names[id(table)], []).append(module)
    return found


def shape_of(model: nn.Module, name: str) -> tuple[int, int]:
    """Rows and width of a table, by the name of its parameter."""
    rows, width = model.get_parameter(name).shape
    return rows, width


def outputs_of(model: nn.Module) -> list[str]:
    """Names of the tables over which a softmax is trained where their rows lie."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    layers = [module for module in model.modules() if isinstance(module, SoftmaxLayer) and module.trains_all_rows]
    return list(dict.fromkeys(names[id(layer.table_and_bias()[0])] for layer in layers))


@dataclass(frozen=True, slots=True)
class Readers:
    """The tables of a model and who reads each: looked up once for all of them, as there may be hundreds.

    Args:
        model: The model.
        tables: As `tables_of` finds them.
        owners: Modules that have a parameter as one of their own, by its identity, with their names.
        softmaxes: Identities of the tables that are read by a softmax that may be split.
    """

    model: nn.Module
    tables: Mapping[str, Sequence[TableModule]]
    owners: Mapping[int, Sequence[tuple[str, nn.Module]]]
    softmaxes: Collection[int]

    @staticmethod
    def of(model: nn.Module) -> Readers:
        """Look for them."""
        owners: dict[int, list[tuple[str, nn.Module]]] = {}
        softmaxes = {id(one.table_and_bias()[0]) for one in model.modules() if isinstance(one, SoftmaxLayer)}
        for name, owner in model.named_modules():
            for parameter in owner._parameters.values() if not isinstance(owner, SoftmaxLayer) else ():
                owners.setdefault(id(parameter), []).append((name, owner))
        return Readers(model, tables_of(model), owners, softmaxes)

    def why_whole(self, name: str, optimizers: Sequence[Optimizer], placement: str, ranks: int) -> str | None:
        """Why a table cannot be split by a placement, in words that end a sentence about it, or None if it can."""
        modules, parameter = self.tables.get(name, ()), self.model.get_parameter(name)
        if placement == "columns" and id(parameter) in self.softmaxes:
            return "a softmax over it needs whole rows: split it by rows"
        for owner_name, owner in self.owners.get(id(parameter), ()):
            if owner not in modules:
                return (
                    f"{owner_name or 'the model'} ({type(owner).__name__}) reads the whole of it: for an output layer, "
                    "take tulle.ShardedSoftmax"
                )
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            return "a hook is registered on it, which would see no gradient: those of split tables go to their owners"
        for module in modules:
            if module.max_norm is not None and placement == "columns":
                return "max_norm needs the norms of whole rows: split it by rows"
        if placement == "columns" and parameter.shape[1] < ranks:
            return f"it has {parameter.shape[1]} columns for {ranks} ranks: split it by rows"
        return _refused_by_optimizer(parameter, optimizers)


def placements_of(
    model: nn.Module, optimizers: Sequence[Optimizer], ranks: int, *, is_asked: bool = False, is_seen: bool = False
) -> dict[str, tuple[str, ...]]:
    """How each table of a model can be split over so many ranks, by the name of its parameter.

    Args:
        model: The model.
        optimizers: Over its parameters.
        ranks: How many.
        is_asked: Also tables of optimizers of which nothing is known, which may look at whole ones (LAMB, Shampoo).
        is_seen: Also tables of modules with a forward of their own, which may read all rows: a run tells if they do.
    """
    readers, doubted = Readers.of(model), [one for one in optimizers if not is_elementwise(one)]
    unknown = {id(p) for one in doubted for group in one.param_groups for p in group["params"]}

    def is_doubted(name: str) -> bool:
        is_unseen = any(has_own_forward(module) for module in readers.tables[name]) and not is_seen
        return is_unseen or (id(model.get_parameter(name)) in unknown and not is_asked)

    return {
        name: ()
        if is_doubted(name)
        else tuple(how for how in PLACEMENTS if readers.why_whole(name, optimizers, how, ranks) is None)
        for name in readers.tables
    }


def check_placements(
    placements: Mapping[str, str], model: nn.Module, optimizers: Sequence[Optimizer], ranks: int
) -> None:
    """Check that the tables that a plan splits can be split.

    Raises:
        PlanError: Naming the table, and what stands against it.
    """
    readers = Readers.of(model)
    for name, placement in placements.items():
        reason = readers.why_whole(name, optimizers, placement, ranks)
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
        split = split_as(placement, name, shape_of(model, name), axis)
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
    if axis.rank == 0:
        _doubt(model, optimizers, placements)
    tables, outputs = tables_of(model), outputs_of(model)
    placed: list[SplitTable] = []
    for number, (name, placement) in enumerate(sorted(placements.items())):
        parameter, modules = model.get_parameter(name), tables[name]
        split = split_as(placement, name, shape_of(model, name), axis)
        _keep_parts_of_states(optimizers, parameter, split)
        if name in parts:
            give(parameter, parts[name])
        else:
            hold(parameter, split.take(parameter))
        guard_table(parameter, split)
        _hook_states(model, parameter, split)
        placed.append(
            SplitTable(
                number,
                parameter,
                split,
                is_sparse=name not in outputs and all(module.sparse for module in modules),
                is_foreseeable=not any(Lookup.of(module).goes_alone for module in modules),
            )
        )
    return placed


def _keep_parts_of_states(optimizers: Sequence[Optimizer], parameter: Tensor, split: Split) -> None:
    """Have optimizers that have stepped a table before keep this rank's part of its momenta; a count of steps stays."""
    for optimizer in optimizers:
        state = optimizer.state.get(parameter, {})
        for key, value in state.items():
            if isinstance(value, Tensor) and split.shape_of_part(value.shape) is not None:
                state[key] = split.take(value)


def _hook_states(model: nn.Module, parameter: Tensor, split: Split) -> None:
    """Have the modules of a table load this rank's part of a whole one, and say whose part their own state has."""
    for owner in model.modules():
        for key in [key for key, other in owner._parameters.items() if other is parameter]:
            owner.register_load_state_dict_pre_hook(partial(_take_part, split, key))
            owner.register_state_dict_post_hook(partial(_say_whose, split, key))


def _take_part(split: Split, key: str, owner: nn.Module, state: dict[str, Any], prefix: str, *others: Any) -> None:
    """Load this rank's part where a state has the whole table, as that of a plain model does."""
    if (part := owner._parameters.get(key)) is None:
        return
    name, said, errors = prefix + key, others[0], others[-1]
    value, whose, own = state.get(name), said.get(WHOSE), _whose(split)
    if whose not in (None, own) and isinstance(value, Tensor) and value.shape == part.shape:
        errors.append(
            f"{name}: the state has the part of {whose}, and this is {own}: load the whole, as tulle.full_state_dict "
            "gives it, or all parts, by tulle.save and tulle.load"
        )
        state[name] = local_of(part)
    load_part(part, name, state, errors, shape=split.shape, take=split.take)


def _say_whose(
    split: Split, key: str, _owner: nn.Module, state: dict[str, Any], prefix: str, said: dict[str, Any]
) -> None:
    """Have a state, and what is told beside it, say of which rank it is: of another's rows shapes may be equal."""
    refuse_to_checkpoint(f"the state of a model with the table {split.name!r}, of which each rank has a part")
    said[WHOSE] = _whose(split)
    if not isinstance(part := state[prefix + key], nn.Parameter):  # with `keep_vars`
        state[prefix + key] = stated_part(part, f"{_whose(split)}'s part of {prefix + key!r}")


def _whose(split: Split) -> str:
    return f"rank {split.axis.rank} of {split.axis.size}"


def _doubt(model: nn.Module, optimizers: Sequence[Optimizer], placements: Mapping[str, str]) -> None:
    for optimizer in optimizers:
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        name = next((name for name in placements if id(model.get_parameter(name)) in stepped), None)
        if name is not None and not is_elementwise(optimizer):
            logger.info("%s: of %r and other tables that are split", doubt(type(optimizer)), name)


def _refused_by_optimizer(parameter: Tensor, optimizers: Sequence[Optimizer]) -> str | None:
    for optimizer in optimizers:
        is_its = any(parameter is other for group in optimizer.param_groups for other in group["params"])
        if is_its and not is_elementwise(optimizer) and type(optimizer).__module__.startswith("torch.optim"):
            return (
                f"{type(optimizer).__name__} does not treat every element by itself: keep the table whole, or use one "
                f"of {', '.join(kind.__name__ for kind in ELEMENTWISE)}"
            )
    return None
