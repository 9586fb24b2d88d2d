"""What PyTorch's own modules and optimizers do with parameters: it decides if these are cut into parts, and how."""

from __future__ import annotations

from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop, SparseAdam
from torch.optim.optimizer import Optimizer

from tulle.errors import ModelError

ELEMENTWISE = (SGD, ASGD, Adam, AdamW, Adamax, NAdam, RAdam, Adagrad, Adadelta, RMSprop, Rprop, SparseAdam)
"""Optimizers that treat every element by itself, so that a part of a parameter is updated as in the whole."""
SHARDABLE = tuple(kind for kind in ELEMENTWISE if kind is not SparseAdam)
"""Those of them whose state can be sharded, as their gradients are dense."""
_registered: WeakSet[type[Optimizer]] = WeakSet()
_Kind = TypeVar("_Kind", bound=type[Optimizer])


def register_elementwise(kind: _Kind) -> _Kind:
    """Say of a class of optimizers that it treats every number of a parameter by itself, as Adam and SGD do.

    It is given plain tensors then where a rank has parts of what it steps, and is taken where a plan has
    `shard_optimizer`. Call it on every rank, before `tulle.distribute`. One that looks at whole tensors (at norms, as
    LAMB does, or rows, as Adafactor) would compute other numbers than one process, unseen; of which nothing is said
    an optimizer is told wholes' norms, sums and means, and takes longer.

    Args:
        kind: A subclass of `torch.optim.Optimizer`; one that derives from it is not registered with it.

    Returns:
        The class, so that this is a decorator too.

    Raises:
        ModelError: If it is one of torch's own that is known not to: LBFGS, Adafactor, Muon.

    Example:
        >>> class Signed(SGD): ...
        >>> register_elementwise(Signed) is Signed, is_elementwise(Signed([nn.Parameter(torch.ones(1))]))
        (True, True)
    """
    if is_of_wholes(kind):
        raise ModelError(
            f"register_elementwise was given torch.optim.{kind.__name__}, which looks at whole parameters, not at "
            "every number by itself: of parts it would make other steps than one process"
        )
    _registered.add(kind)
    return kind


def doubt(kind: type[Optimizer]) -> str:
    """What the log says of a class of optimizers of which nothing is known, where ranks have parts of what it steps."""
    return (
        f"{kind.__name__} is not known to treat every number by itself, so it sees that it steps parts: sums, means, "
        "norms and numel() are those of wholes, on all ranks, and what else would take a part for all of it raises; "
        "shapes are the part's, and a kernel of its own, past torch's functions, would see no more"
    )


def is_of_wholes(kind: type[Optimizer]) -> bool:
    """Whether a class is one of torch's own that do not treat every number by itself."""
    return kind.__module__.startswith("torch.optim") and kind not in ELEMENTWISE


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether an optimizer is known to treat every element by itself: one of torch's, or of a registered class."""
    return type(optimizer) in ELEMENTWISE or type(optimizer) in _registered


def is_shardable(optimizer: Optimizer) -> bool:
    """Whether an optimizer's state can be sharded: it is one of `SHARDABLE`, or of a registered class."""
    return type(optimizer) in SHARDABLE or type(optimizer) in _registered


def memory_key(tensor: Tensor) -> int:
    """What tells a tensor's memory from other memory; of one whose layout has several, the tensor itself."""
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else id(tensor)


def attribute_of(owner: object, name: str) -> Any:
    """An attribute that may not be there, None then: also where a user's `__getattr__` raises what it should not.

    Example:
        >>> class Wrapper(nn.Module):
        ...     def __getattr__(self, name):
        ...         return self._modules[name]  # a KeyError, where Python's own look-ups expect an AttributeError
        >>> attribute_of(Wrapper(), "no_sync")
    """
    try:
        return getattr(owner, name, None)
    except Exception:  # `suppress` takes longer than the look-up
        return None


def saved_otherwise(model: nn.Module) -> tuple[str, nn.Module, str] | None:
    """The first module that has parts of a layout of its own, its name, and what saves it; None if there is none."""
    for name, module in model.named_modules():
        if isinstance(saver := attribute_of(module, "saved_with"), str):
            return name, module, saver
    return None


def is_compiled(module: nn.Module) -> bool:
    """By `module.compile()` or `torch.compile(module)`.

    Example:
        >>> is_compiled(nn.Linear(2, 2)), is_compiled(torch.compile(nn.Linear(2, 2), backend="eager"))
        (False, True)
    """
    by_itself = getattr(module, "_compiled_call_impl", None) is not None  # TorchScript's modules have none
    return by_itself or attribute_of(module, "_orig_mod") is not None


def has_forward(module: nn.Module) -> bool:
    """Whether a module can be called: `nn.ModuleList` and the like only hold others.

    Example:
        >>> has_forward(nn.Sequential()), has_forward(nn.ModuleList())
        (True, False)
    """
    return "forward" in module.__dict__ or type(module).forward is not nn.Module.forward


def has_hooks(optimizer: Optimizer) -> bool:
    """Whether `Optimizer.__init__` has run; wrappers that do without have no hooks, or those of steps alone.

    Example:
        >>> has_hooks(SGD([nn.Parameter(torch.ones(1))])), has_hooks(SGD.__new__(SGD))
        (True, False)
    """
    return hasattr(optimizer, "_optimizer_load_state_dict_post_hooks")


def states_of(optimizer: Optimizer) -> dict[Tensor, dict[str, Any]]:
    """What an optimizer keeps of each parameter; by other keys, such as names, it may keep what it likes.

    Example:
        >>> optimizer = SGD([nn.Parameter(torch.ones(1))])
        >>> optimizer.state["calls"] = 3
        >>> states_of(optimizer)
        {}
    """
    return {key: kept for key, kept in optimizer.state.items() if isinstance(key, Tensor)}


def makes_weights(module: nn.Module) -> bool:
    """Whether hooks make a module's weight of its parameters before its forward.

    Those of `weight_norm`, `spectral_norm` and `prune` of `torch.nn.utils` do; a parametrization works within forward,
    and functions of tulle's make none.

    Example:
        >>> makes_weights(nn.Linear(2, 2)), makes_weights(nn.utils.spectral_norm(nn.Linear(2, 2)))
        (False, True)
    """
    if not module._forward_pre_hooks or all(_is_ours(hook) for hook in module._forward_pre_hooks.values()):
        return False
    return any(isinstance(value, Tensor) for value in vars(module).values())


def _is_ours(hook: object) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("tulle.")


def hold(parameter: nn.Parameter, part: Tensor) -> None:
    """Have a parameter hold a part of what it held, also where a graph that was made before is still there.

    Such a graph (of a loss that somebody keeps, of what `weight_norm` made) has the node that adds up the parameter's
    gradient, which expects the shape of the whole. Torch makes a new one only where another dtype comes.

    Example:
        >>> weight = nn.Parameter(torch.ones(4))
        >>> kept = weight.sum()
        >>> hold(weight, torch.ones(2))
        >>> weight.sum().backward()
        >>> weight.grad
        tensor([1., 1.])
    """
    other = torch.bfloat16 if parameter.dtype == torch.float16 else torch.float16
    parameter.data = torch.empty_like(part[:0], dtype=other)
    parameter.data = part
