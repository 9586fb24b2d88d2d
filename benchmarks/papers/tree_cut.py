"""SageMaker's partition of a tree of modules, as its documentation and its open re-implementations tell it.

    devices 0 1 2 3      model           cost 1.0
                         |- embedding    0.1    segment 1: no device of its own, so the parent's first
                         |- layers       0.7    segment 2: devices 0 1 2, cut again among its children
                         `- head         0.2    segment 3: device 3

Children are cut into as many consecutive segments as there are devices, the costliest as cheap as can be (algorithm 2);
devices go to segments by d'Hondt's rule, one after the other to the largest cost by devices held + 1 (algorithm 3).

Source: Karakus et al., *Amazon SageMaker Model Parallelism* (arXiv 2111.05972), algorithms 1 to 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class Module:
    """A module of the tree; what children have is counted at them.

    Args:
        name: In the model.
        time_s: Of a leaf, forward and backward of one micro-batch.
        memory_bytes: Of a leaf, parameters and activations.
        children: In the order in which they run.
    """

    name: str
    time_s: float = 0.0
    memory_bytes: float = 0.0
    children: tuple[Module, ...] = ()

    @property
    def leaves(self) -> list[Module]:
        """In the order in which they run."""
        return [leaf for child in self.children for leaf in child.leaves] if self.children else [self]


@dataclass(frozen=True, slots=True)
class TreeCut:
    """The algorithm for one model.

    Args:
        model: Its root.
        memory_weight: Of memory in a module's cost, the rest is time: 0.2 for speed, 0.8, the default, for memory.
    """

    model: Module
    memory_weight: float = 0.8

    def cost(self, module: Module) -> float:
        """A module's, of which the model's is 1."""
        leaves, whole = module.leaves, self.model.leaves
        memory = sum(leaf.memory_bytes for leaf in leaves) / sum(leaf.memory_bytes for leaf in whole)
        time = sum(leaf.time_s for leaf in leaves) / sum(leaf.time_s for leaf in whole)
        return self.memory_weight * memory + (1 - self.memory_weight) * time

    def cut(self, devices: int) -> dict[str, int]:
        """The device of each leaf by name."""
        found: dict[str, int] = {}
        self._place((self.model,), list(range(devices)), found)
        return found

    def _place(self, modules: Sequence[Module], devices: list[int], found: dict[str, int]) -> None:
        """Some consecutive children of one parent, on some devices."""
        if len(modules) == 1 and modules[0].children and len(devices) > 1:
            return self._place(modules[0].children, devices, found)
        if len(devices) == 1 or len(modules) == 1:
            found.update((leaf.name, devices[0]) for module in modules for leaf in module.leaves)
            return None
        costs = [self.cost(module) for module in modules]
        segments = linear(costs, min(len(devices), len(modules)))
        held = d_hondt([sum(costs[start:end]) for start, end in segments], len(devices))
        first = 0
        for (start, end), count in zip(segments, held, strict=True):
            self._place(modules[start:end], devices[first : first + count] or devices[:1], found)
            first += count
        return None


def linear(costs: Sequence[float], segments: int) -> list[tuple[int, int]]:
    """Consecutive segments, begin and end of each, so that the costliest costs least (algorithm 2).

    Example:
        >>> linear([1.0, 2.0, 2.0, 4.0], 2)
        [(0, 3), (3, 4)]
    """
    sums = [0.0, *accumulate(costs)]
    best: list[list[tuple[float, int]]] = [[(sums[end], 0) for end in range(len(sums))]]
    for _ in range(segments - 1):
        before = best[-1]
        row = [
            min((max(before[cut][0], sums[end] - sums[cut]), cut) for cut in range(end + 1)) for end in range(len(sums))
        ]
        best.append(row)
    found: list[tuple[int, int]] = []
    end = len(costs)
    for row in reversed(best):
        found.append((row[end][1], end))
        end = row[end][1]
    return [segment for segment in reversed(found) if segment[0] < segment[1]]


def d_hondt(costs: Sequence[float], devices: int) -> list[int]:
    """How many devices each segment gets (algorithm 3).

    Example:
        >>> d_hondt([0.1, 0.7, 0.2], 4)
        [0, 3, 1]
    """
    held = [0] * len(costs)
    for _ in range(devices):
        held[max(range(len(costs)), key=lambda i: costs[i] / (held[i] + 1))] += 1
    return held
