"""`watch_steps`: no optimizer steps with the gradients of one rank only, by which replicas would drift apart unseen.

What is kept in step are the parameters that a model had when it was distributed. A module that is put in the place of
another later, and `load_state_dict(assign=True)`, bring parameters that nothing is known of; an optimizer that is made
for these is the first to be seen with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tulle.engine.by_hand import average_by_hand
from tulle.engine.data_parallel import ENGINE, DataParallel, is_cut_off, living_engines
from tulle.engine.ends import NOT_RUNNING
from tulle.errors import ModelError


@cache
def watch_steps() -> None:
    """Look at the steps of all optimizers of this process from now on, also of those that will be made."""
    register_optimizer_step_pre_hook(_look)


_strangers: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
"""Optimizers that have nothing to do with a distributed model, and of how many parameters that was found."""


def _look(
    optimizer: Optimizer, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Raise if an optimizer is to step with gradients that are not kept in step, or not yet; average those set by hand.

    A hook of torch's: gets the arguments of `step`, the optimizer among them, and gives others if they hold a closure.

    Raises:
        ModelError: Naming a parameter that was added, unfrozen or replaced; or if a backward is under way.
    """
    parameters = _parameters(optimizer)
    # As `engine_of` gives it, in half the time: it is asked of all parameters in every step.
    owners = [None if (tie := vars(parameter).get(ENGINE)) is None else tie() for parameter in parameters]
    alone = [parameter for parameter, owner in zip(parameters, owners, strict=True) if owner is None]
    # One of another stage may have a gradient that stands for all ranks', whichever hook of a step comes first.
    trained = [parameter for parameter in alone if not parameter.is_meta and parameter.grad is not None]
    if len(alone) == len(parameters):
        if trained and _strangers.get(optimizer) != len(parameters):
            _check_not_replaced(trained, optimizer)
            _strangers[optimizer] = len(parameters)
        return None
    engines = {engine for engine in {*owners} if engine is not None and engine.home.size > 1}
    has_closure = any(callable(one) for one in (*arguments[1:], *keywords.values()))
    if engines:
        _check_covered(trained)
        average_by_hand(parameters, engines, optimizer, has_closure=has_closure)
        for engine in engines:
            if engine.syncing:
                engine.alike.look(parameters, engine.steps, optimizer)
    if not engines or not has_closure:
        return None
    followed = tuple(_followed(one, optimizer, engines) if callable(one) else one for one in arguments[1:])
    named = {name: _followed(one, optimizer, engines) if callable(one) else one for name, one in keywords.items()}
    return (optimizer, *followed), named


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _followed(closure: Callable[..., Any], optimizer: Optimizer, engines: set[DataParallel]) -> Callable[..., Any]:
    """A closure after which gradients that it has set by hand are averaged."""

    @wraps(closure)
    def follow(*arguments: Any, **keywords: Any) -> Any:
        loss = closure(*arguments, **keywords)
        average_by_hand(_parameters(optimizer), engines, optimizer)
        return loss

    return follow


def _check_covered(trained: Sequence[Tensor]) -> None:
    if torch._C._current_graph_task_id() != NOT_RUNNING:
        raise ModelError(
            "an optimizer was to step within a backward, when gradients are those of one rank: step after "
            "loss.backward(), not in a hook"
        )
    for parameter in trained:
        raise ModelError(
            f"{_name_of(parameter)} has a gradient that is not kept in step: it was "
            "frozen, or not part of the model, when tulle.distribute was called: unfreeze and complete the "
            "model before; what is frozen after it may be unfrozen later. A model that has grown since, or has another "
            "head, is to be made anew from tulle.full_state_dict(model, everywhere=True), and distributed"
        )


def _name_of(parameter: Tensor) -> str:
    """Its name, if it is in a distributed model by now, and its shape."""
    for engine in living_engines():
        for name, one in engine.model.named_parameters():
            if one is parameter:
                return f"the parameter {name!r}, of shape {list(parameter.shape)},"
    return f"a parameter of shape {list(parameter.shape)}"


def _check_not_replaced(trained: Sequence[Tensor], optimizer: Optimizer) -> None:
    """Raise if parameters without an engine are, by now, those of a distributed model."""
    for parameter in trained:
        if is_cut_off(parameter):
            raise ModelError(
                f"{type(optimizer).__name__} was to step a parameter of shape {list(parameter.shape)} with the "
                "gradient of one rank: it was distributed with a model that nobody holds any more: keep the model, or "
                "the modules that have its parameters, for as long as these are trained"
            )
    known = {id(parameter) for parameter in trained}
    for engine in living_engines():
        for name, parameter in engine.model.named_parameters() if engine.home.size > 1 else ():
            if id(parameter) in known:
                raise ModelError(
                    f"{type(optimizer).__name__} was to step {name!r} with the gradient of one rank: since "
                    "tulle.distribute another parameter was put in its place, with its module or by "
                    "load_state_dict(assign=True): replace modules before, load with assign=False, or write with "
                    "p.copy_(...) within torch.no_grad()"
                )
