"""Activation checkpointing, chosen per module by cost: those whose activations are cheapest to compute again, by byte.

What a module saves for its backward and how long its forward takes are measured on one batch; then, of all choices that
free enough, the one with the least time is found exactly.

Source: Chen et al., *Training Deep Nets with Sublinear Memory Cost* (2016); the choice as a knapsack as in Korthikanti
et al., *Reducing Activation Recomputation in Large Transformer Models* (2022), section 5, who choose by bytes and time
per byte as well.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from tulle.comm import gather_values
from tulle.derived import put_before
from tulle.errors import ModelError
from tulle.memory.again import as_given
from tulle.memory.inputs import Inputs
from tulle.memory.notes import naming
from tulle.mesh import Axis
from tulle.names import as_names


@dataclass(frozen=True, slots=True)
class Activation:
    """What one module saves for its backward.

    Args:
        name: Of the module.
        saved_bytes: Saved within its forward beyond its inputs, parameters and buffers: freed if it is recomputed.
        forward_s: What its forward takes: the price.
    """

    name: str
    saved_bytes: int
    forward_s: float


class _Recomputed(nn.Module):
    """What a module's class gains: its forward saves its inputs only, and runs again in backward."""

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Compute what the module's own forward does."""
        if not torch.is_grad_enabled():
            return super().forward(*arguments, **keywords)
        with naming("recompute", self):
            if torch.compiler.is_compiling():
                return checkpoint(super().forward, *arguments, use_reentrant=False, **keywords)
            inputs = Inputs(self, arguments, keywords)
            forward = as_given(self, super().forward, inputs, arguments, keywords)
            return inputs.checkpoint(forward, arguments, keywords)


def recompute(model: nn.Module, names: Sequence[str]) -> None:
    """Have some modules recompute their activations in backward, in place; the numbers stay the same, dropout included.

    Args:
        model: The model.
        names: Of the modules, as `named_modules` gives them.

    Raises:
        ModelError: If the model has no such module.
    """
    modules = dict(model.named_modules())
    for name in as_names(names):
        if name not in modules:
            raise ModelError(
                f"memory.recompute was given {name!r}, but the {type(model).__name__} has no module of that name"
            )
        kind = type(modules[name])
        if not issubclass(kind, _Recomputed):
            put_before(_Recomputed, modules[name], f"Recomputed{kind.__name__}")


def choose_recomputed(costs: Sequence[Activation], *, free_bytes: int) -> list[str]:
    """The modules to recompute that free at least so much in the least time; all of them if that is not enough.

    Exact: of all subsets, those that free no more in no less time than another are left out (Pareto's front).

    Args:
        costs: What each module saves, and takes.
        free_bytes: How much less is to be saved.

    Example:
        >>> costs = [Activation("a", 60, 3.0), Activation("b", 50, 1.0), Activation("c", 50, 1.5)]
        >>> choose_recomputed(costs, free_bytes=100)
        ['b', 'c']
    """
    if free_bytes <= 0:
        return []
    front: list[tuple[float, int, tuple[str, ...]]] = [(0.0, 0, ())]
    for cost in costs:
        grown = [(s + cost.forward_s, min(free_bytes, b + cost.saved_bytes), (*n, cost.name)) for s, b, n in front]
        front = list(_undominated(front + grown))
    enough = [names for _, freed, names in front if freed >= free_bytes]
    return list(enough[0]) if enough else [cost.name for cost in costs if cost.saved_bytes]


def _undominated(
    choices: list[tuple[float, int, tuple[str, ...]]],
) -> Iterator[tuple[float, int, tuple[str, ...]]]:
    most = -1
    for choice in sorted(choices, key=lambda choice: (choice[0], -choice[1])):
        if choice[1] > most:
            most = choice[1]
            yield choice


def profile_activations(model: nn.Module, sample: object, names: Sequence[str] | None = None) -> list[Activation]:
    """Measure what modules save for backward and how long their forward takes, on one batch.

    A model whose layers send anything must be called so on all ranks alike.

    Args:
        model: In training mode, if that is how it is trained.
        sample: One batch, as the model is called with it: a mapping is passed as keywords, a tuple as positional
            arguments, anything else as the one argument.
        names: Of the modules; None for those that repeat: in lists of several of one class, outermost first.

    Example:
        >>> import torch
        >>> layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        >>> [(cost.name, cost.saved_bytes) for cost in profile_activations(layers, torch.ones(2, 4))]
        [('0', 0), ('1', 0)]
    """
    chosen = list(repeated(model)) if names is None else list(names)
    modules = dict(model.named_modules())
    held = (*model.parameters(), *model.buffers())
    known = {one.untyped_storage()._cdata for one in held if one.layout == torch.strided}
    meters = {name: _Meter(modules[name], known) for name in chosen}
    running: list[_Meter] = []
    handles = [handle for meter in meters.values() for handle in meter.watch(running)]

    def saved(tensor: Tensor) -> Tensor:
        for meter in running:
            meter.note(tensor)
        return tensor.detach()  # else what an operation gave, and saves, would hold itself

    states = [buffer.clone() for buffer in model.buffers()]
    random_state = torch.get_rng_state()
    try:
        for _ in range(2):  # the first warms up
            for meter in meters.values():
                meter.reset()
            with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(saved, lambda tensor: tensor):
                call(model, sample)
    finally:
        for handle in handles:
            handle.remove()
        torch.set_rng_state(random_state)
        for buffer, state in zip(model.buffers(), states, strict=True):
            buffer.data.copy_(state)
    return [Activation(name, meter.saved_bytes, meter.seconds) for name, meter in meters.items()]


def recompute_by_cost(
    model: nn.Module, sample: object, *, keep_bytes: int, axis: Axis | None = None
) -> tuple[list[Activation], list[str]]:
    """Measure, choose and recompute, so that repeated modules save at most `keep_bytes` between forward and backward.

    Args:
        model: The model.
        sample: As in `profile_activations`.
        keep_bytes: Of activations.
        axis: Whose ranks must choose alike: they do what its rank 0 measured. Every rank of it must call it.

    Returns:
        What each module saves and takes, and which are recomputed.
    """
    costs = profile_activations(model, sample)
    if axis is not None:
        costs = gather_values(costs, axis, label="cost of activations")[0]
    names = choose_recomputed(costs, free_bytes=sum(cost.saved_bytes for cost in costs) - keep_bytes)
    recompute(model, names)
    return costs, names


def repeated(model: nn.Module) -> Iterator[str]:
    """Names of the modules that repeat: members of lists and sequences with several of one class, outermost only."""
    inside: set[str] = set()
    for name, module in model.named_modules():
        if any(f"{name}.".startswith(f"{outer}.") for outer in inside) or not isinstance(
            module, nn.ModuleList | nn.Sequential
        ):
            continue
        children = dict(module.named_children())
        kinds = [type(child) for child in children.values()]
        members = [f"{name}.{key}" if name else key for key, child in children.items() if kinds.count(type(child)) > 1]
        members = [member for member in members if any(True for _ in model.get_submodule(member).parameters())]
        inside.update(members)
        yield from members


@dataclass(slots=True)
class _Meter:
    """Counts what one module saves, and how long its forward takes."""

    module: nn.Module
    known: set[int]
    saved_bytes: int = 0
    seconds: float = 0.0
    seen: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    """Held, so that no other tensor takes their place in memory."""
    begin_s: float = 0.0

    def watch(self, running: list[_Meter]) -> list[Any]:
        def begin(_: nn.Module, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
            inputs = [leaf for leaf in tree_leaves((arguments, dict(keywords))) if isinstance(leaf, Tensor)]
            dense = [leaf.untyped_storage() for leaf in inputs if leaf.layout == torch.strided]
            self.seen |= {storage._cdata: storage for storage in dense}
            running.append(self)
            self.begin_s = _now_s(inputs)

        def end(_module: nn.Module, _arguments: object, output: object) -> None:
            self.seconds += _now_s([leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]) - self.begin_s
            running.remove(self)

        return [
            self.module.register_forward_pre_hook(begin, with_kwargs=True),
            self.module.register_forward_hook(end),
        ]

    def note(self, tensor: Tensor) -> None:
        if tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
        if storage._cdata not in self.seen and storage._cdata not in self.known:
            self.seen[storage._cdata] = storage
            self.saved_bytes += storage.nbytes()

    def reset(self) -> None:
        self.saved_bytes, self.seconds, self.seen = 0, 0.0, {}


def _now_s(tensors: Sequence[Tensor]) -> float:
    for device in {tensor.device for tensor in tensors if tensor.device.type == "cuda"}:
        torch.cuda.synchronize(device)
    return time.perf_counter()


def call(model: nn.Module, sample: object) -> Any:
    """Call a model with a batch: a mapping as keywords, a tuple as positional arguments, else one argument."""
    if isinstance(sample, Mapping):
        return model(**sample)
    return model(*sample) if isinstance(sample, tuple) else model(sample)
