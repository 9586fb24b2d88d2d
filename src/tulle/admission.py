"""What can be distributed: checks of mesh, model and optimizer, each with a text that says the mend."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from tulle.engine import engine_of
from tulle.errors import ModelError
from tulle.mesh import Mesh
from tulle.pipeline.unfit import refuse_lazy
from tulle.tables import table_modules
from tulle.traits import attribute_of, has_hooks, memory_key, saved_otherwise

O = TypeVar("O", bound=Optimizer | Sequence[Optimizer])  # noqa: E741
_OF_ONES_OWN = ", a tensor of your own as an nn.Parameter, in a torch.nn.ParameterList among these"


def as_optimizers(optimizer: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    """One optimizer or several, as a list."""
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else optimizer
    if not isinstance(optimizers, Sequence) or not optimizers:
        raise ModelError(
            f"tulle was given {'an empty' if optimizer == [] else 'a'} {type(optimizer).__name__} as optimizer, "
            f"expected a torch.optim.Optimizer or a list of them{_instead_of(optimizer)}"
        )
    for one in optimizers:
        if not isinstance(one, Optimizer):
            raise ModelError(f"tulle was given a {type(one).__name__} among the optimizers, expected torch.optim's")
        if not has_hooks(one):
            raise ModelError(
                f"{type(one).__name__} is an Optimizer whose __init__ did not call super().__init__, so that its steps "
                "cannot be followed: call it, or give tulle the optimizer that it wraps and wrap that afterwards"
            )
    return list(optimizers)


def _instead_of(given: object) -> str:
    """The mend, as the end of a sentence, for somebody who gave something else as optimizer."""
    if isinstance(given, Mesh):
        return ": give the optimizer second and the mesh after it, or by name (mesh=mesh)"
    if not given:
        return ": for parameters that the loop writes itself, give a torch.optim.SGD over them that never steps"
    return ""


def check_model(model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], mesh: Mesh) -> None:
    """Check that a model can be distributed with its optimizers.

    Raises:
        ModelError: Saying what was found, what was expected and the mend.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"tulle was given a {type(model).__name__} as model, expected a torch.nn.Module")
    if engine_of(model) is not None:
        raise ModelError("the model is distributed already: call tulle.distribute once")
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ModelError("the model is wrapped in DistributedDataParallel, expected a plain one: give model.module")
    if isinstance(model, torch.jit.ScriptModule):
        raise ModelError(
            "the model is a ScriptModule, expected a plain torch.nn.Module: script what it is made of, or give a "
            "module around it (torch.nn.Sequential(model))"
        )
    if attribute_of(model, "no_sync") is not None:
        raise ModelError(
            f"{type(model).__name__} has a no_sync of its own, which tulle.distribute would hide: rename it, or give "
            "the plain model within"
        )
    _check_not_laid_out(model)
    _check_parameters(model, mesh)
    _check_optimizers(model, as_optimizers(optimizer))


def _check_not_laid_out(model: nn.Module) -> None:
    """Refuse named dimensions on a mesh: rank 0's parts would be given to all, and means taken of what is summed."""
    if (found := saved_otherwise(model)) is not None:
        name, module, _ = found
        shown = f"the module {name!r}" if name else "the model"
        raise ModelError(
            f"{shown} ({type(module).__name__}) was laid out over a mesh by tn.use, which keeps its parts and "
            "their gradients in step by itself: leave tulle.distribute out, or call init of it outside of tn.use"
        )


def _check_parameters(model: nn.Module, mesh: Mesh) -> None:
    refuse_lazy(model)
    for name, parameter in model.named_parameters():
        if engine_of(parameter) is not None:
            raise ModelError(
                f"parameter {name!r} is part of a model that is distributed already: distribute one model that has all "
                "parts, torch.nn.ModuleList([first, second]) say, and call its parts"
            )
        if parameter.requires_grad and parameter.layout != torch.strided and mesh.size > 1:
            raise ModelError(
                f"parameter {name!r} has the layout {parameter.layout}, expected a dense one: train its values as a "
                "dense parameter, and make the sparse tensor of them in forward"
            )
        if parameter.device != mesh.device and not parameter.is_meta:  # one on meta is materialized
            raise ModelError(
                f"parameter {name!r} is on {parameter.device}, the mesh on {mesh.device}: call model.to(mesh.device)"
            )
    for name, buffer in model.named_buffers():
        if buffer.device != mesh.device and not buffer.is_meta:
            raise ModelError(
                f"buffer {name!r} is on {buffer.device}, the mesh on {mesh.device}: call model.to(mesh.device)"
            )


def _check_optimizers(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    known = {id(parameter) for parameter in model.parameters()}
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                if id(parameter) not in known:
                    of_ones_own = "" if isinstance(parameter, nn.Parameter) else _OF_ONES_OWN
                    raise ModelError(
                        f"parameter {position} of group {number} of {type(optimizer).__name__}, of shape "
                        f"{list(parameter.shape)}, is not a parameter of this {type(model).__name__}: "
                        "make it from model.parameters() after the model is complete; for one optimizer over several "
                        f"models, distribute torch.nn.ModuleList of them{of_ones_own}"
                    )


def check_not_aliased(model: nn.Module) -> None:
    """Refuse buffers in the memory of a parameter, of which ranks are to have parts: they would keep the old values.

    Raises:
        ModelError: Naming both and the mend.
    """
    memory = {memory_key(parameter): name for name, parameter in model.named_parameters()}
    for name, buffer in model.named_buffers():
        parameter = memory.get(memory_key(buffer)) if buffer.numel() else None
        if parameter is not None:
            raise ModelError(
                f"the buffer {name!r} lies in the memory of the parameter {parameter!r}, and would not follow it where "
                "a rank has a part of that: read the parameter in forward instead, or give the buffer a copy of it"
            )


def check_replicated_tables(model: nn.Module, split: Iterable[str]) -> None:
    """Refuse what silently differs from one process when each rank sees a part of the batch only.

    Args:
        model: The model.
        split: Names of the parameters that are no replicas.

    Raises:
        ModelError: Naming the module and the mend.
    """
    parted = {id(model.get_parameter(name)) for name in split}
    for name, module, table in table_modules(model):
        if not table.requires_grad or id(table) in parted:
            continue
        shown, key = repr(name) if name else f"the {type(module).__name__}", f"{name}.weight".lstrip(".")
        if module.scale_grad_by_freq:
            raise ModelError(
                f"{shown} has scale_grad_by_freq=True, which counts in one rank's batch only: "
                f"split the table, tulle.distribute(..., plan={{'{key}': 'rows'}}), or set it to False"
            )
        if module.max_norm is not None and not module.sparse:
            raise ModelError(
                f"{shown} has max_norm={module.max_norm} and dense gradients, so that ranks do not learn which rows "
                f"the others looked up and renormalized: set sparse=True, or split the table, "
                f"tulle.distribute(..., plan={{'{key}': 'rows'}})"
            )
