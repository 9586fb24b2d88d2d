"""`Calls`: which modules a model called, in which order, from within which, and how long each took."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn


@dataclass(slots=True)
class Calls:
    """What was seen of one run, by the names of modules in the order of their first calls."""

    chains: dict[str, list[tuple[str, ...]]] = field(default_factory=dict)
    """Of each call of a module, the names of the modules that it was called from, the outermost first."""
    time_s: dict[str, float] = field(default_factory=dict)
    """Of all calls of a module, with what is called within."""

    def children(self, name: str) -> list[str]:
        """Modules whose first call came directly from within a module's call."""
        return [other for other, chains in self.chains.items() if chains[0] and chains[0][-1] == name]


def watch(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Calls:
    """Run a model's forward, and see its calls."""
    calls, stack, begins_s = Calls(), [], []
    names = {module: name for name, module in model.named_modules()}

    def enter(module: nn.Module, _: object) -> None:
        calls.chains.setdefault(names[module], []).append(tuple(stack))
        stack.append(names[module])
        begins_s.append(time.perf_counter())

    def leave(module: nn.Module, _: object, __: object) -> None:
        name = stack.pop()
        calls.time_s[name] = calls.time_s.get(name, 0.0) + time.perf_counter() - begins_s.pop()

    hooks = [module.register_forward_pre_hook(enter) for module in names]
    hooks += [module.register_forward_hook(leave) for module in names]
    try:
        model(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def pieces_of(model: nn.Module, calls: Calls, weights: dict[str, float], largest: float) -> list[str]:
    """Modules that stay whole: as large as can be, but for those that weigh more than `largest` and can be cut.

    Args:
        model: The model.
        calls: What was seen of a run.
        weights: What each called module weighs, with what is called within.
        largest: What a piece may weigh.
    """

    def within(name: str) -> list[str]:
        children = calls.children(name)
        has_own = next(model.get_submodule(name).parameters(recurse=False), None) is not None
        if name and (not children or weights[name] <= largest or (has_own and weights[name] <= 4 * largest)):
            return [name]
        return [piece for child in children for piece in within(child)]

    return within("") or [""]


def coarsened(assignment: dict[str, int], calls: Calls) -> dict[str, int]:
    """The same assignment with fewer, larger modules: one that calls modules of one stage only stands for them.

    It must be called whenever they are, or another could call them past it.
    """
    stages: dict[str, set[int]] = {}
    is_always_around: dict[str, bool] = {}
    for name, stage in assignment.items():
        for chain in calls.chains.get(name, ()):
            for around in chain:
                stages.setdefault(around, set()).add(stage)
                others = all(around in other for other in calls.chains[name])
                is_always_around[around] = is_always_around.get(around, True) and others
    whole = {name for name, found in stages.items() if len(found) == 1 and is_always_around[name]}
    result: dict[str, int] = {}
    for name, stage in assignment.items():
        chain = calls.chains.get(name, [()])[0]
        result[next((around for around in chain if around in whole), name)] = stage
    return result
