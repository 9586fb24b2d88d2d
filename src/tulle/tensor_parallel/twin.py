"""`without_memory`: a copy of a model on device meta, on which is tried what would change the model itself."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tulle.errors import ModelError
from tulle.mesh import Axis
from tulle.tensor_parallel.registry import Factory
from tulle.tensor_parallel.splitter import MisfitError, Splitter


def without_memory(model: nn.Module) -> nn.Module:
    """A copy of a model on device meta."""
    tensors = [*model.parameters(), *model.buffers(), *computed(model)]
    memo: dict[int, object] = {}
    for tensor in tensors:
        bare = torch.empty_like(tensor, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(bare, tensor.requires_grad) if is_parameter else bare
    return copy.deepcopy(model, memo)


def computed(model: nn.Module) -> list[Tensor]:
    """Tensors that a forward has computed and modules have kept, also in lists, which `copy.deepcopy` refuses."""
    kept = (one for module in model.modules() for one in tree_leaves(vars(module)))
    return [one for one in kept if isinstance(one, Tensor) and not one.is_leaf]


def misfit(module: nn.Module, factory: Factory[nn.Module], axis: Axis, name: str) -> MisfitError | None:
    """Why a factory cannot split a module, if its heads do not divide, or layers in it are adapted; None if it can.

    Args:
        module: Stays as it is.
        factory: For its class.
        axis: Over which.
        name: Of the module in its model.
    """
    try:
        twin = without_memory(module)
    except Exception:  # what cannot be copied is not tried before it is split
        return None
    try:
        factory(twin, Splitter(axis, name))
    except MisfitError as error:
        return error
    except ModelError:  # of another kind, which is raised when it is split
        return None
    return None
