"""`Problem`: what a model's step costs under a layout, operation by operation, fast enough to ask for thousands.

Each operation's price depends only on the axes of its own dimensions, so it is worked out once for each of those.
`explain` says the same exactly, from the program itself; here, what shares an *f* pays for it each time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple

from torch import nn

from tulle.cost import all_reduce_cost
from tulle.named.dims import Dim, Dims, Layout, volume
from tulle.named.explain import call, on_paper
from tulle.named.planned import PlannedWire
from tulle.named.rates import TYPICAL, Product, Rates
from tulle.named.scope import Scope, entered
from tulle.named.trace import Input, Step

Axes = tuple[str, ...]
Choice = Mapping[Dim, Axes]
"""The axes that split each dimension."""


class Held(NamedTuple):
    """A parameter, as the layout search sees it.

    Args:
        dims: Its dimensions; none of a plain module's.
        value_bytes: Bytes of one value; of a plain module's all of them.
        is_trained: Whether it has a gradient and an optimizer's state.
    """

    dims: Dims
    value_bytes: int
    is_trained: bool


_LONGEST = 4096
"""Of a product that is measured: beyond it, the rate hardly changes."""
_UNDOING = 2
"""An elementwise operation writes once forward and about so often backward."""


class Price(NamedTuple):
    """What something costs on each rank."""

    seconds: float = 0.0
    memory_bytes: float = 0.0


@dataclass(slots=True)
class Problem:
    """A model's step for the layout search.

    Args:
        steps: Operations, each with how often it happens.
        parameters: Parameters, with how many there are of each kind.
        conflicts: Pairs of dimensions that meet, so that no axis can split both.
        whole: Dimensions that some operation must see whole.
    """

    steps: Counter[Step]
    parameters: Counter[Held]
    conflicts: set[frozenset[Dim]]
    whole: set[Dim]

    @property
    def dims(self) -> list[Dim]:
        """All dimensions, those first that most work depends on."""
        weights: Counter[Dim] = Counter()
        for step, count in self.steps.items():
            weights.update(dict.fromkeys(step.dims, count * volume(step.dims)))
        for item in (*self.steps, *self.parameters):
            weights.update(dict.fromkeys(dims_of(item), 0))
        return [dim for dim, _ in weights.most_common()]

    def product(self, ranks: int) -> Product:
        """Rows, inner entries and columns of the product that takes most work, the largest of them cut by the ranks."""
        products = {step: n * volume(step.dims) for step, n in self.steps.items() if step.kind == "product"}
        if not products:
            return TYPICAL
        step = max(products, key=lambda one: products[one])
        left = set(step.inputs[0].dims)
        kept = left.intersection(step.out)
        sizes = [volume(kept), volume(left - kept), volume(set(step.out) - kept)]
        largest = sizes.index(max(sizes))
        sizes[largest] = max(1, sizes[largest] // ranks)
        rows, inner, columns = (min(size, _LONGEST) for size in sizes)
        return rows, inner, columns


def record(model: nn.Module, sample: object) -> Problem:
    """A model's step, written down by running it once on paper on a single rank.

    Raises:
        ModelError: If the model does not give a named tensor.
    """
    scope = Scope(PlannedWire({}), Layout())
    scope.trace = []
    with entered(scope), on_paper(model, scope) as held:
        call(model, sample)
        dims = [one for one in scope.seen if one]
        kinds = Counter(_held(dims, parameter) for dims, parameter in held)
    conflicts = {frozenset(pair) for one in dims for pair in combinations(one, 2)}
    return Problem(Counter(scope.trace), kinds, conflicts, scope.whole)


def _held(dims: Dims, parameter: nn.Parameter) -> Held:
    return Held(dims, parameter.nbytes // volume(dims), parameter.requires_grad)


@dataclass(slots=True)
class Pricing:
    """Prices of steps on one mesh.

    Args:
        sizes: Ranks along each axis.
        rates: What they give.
        state_slots: Numbers that the optimizer keeps for each parameter.
    """

    sizes: Mapping[str, int]
    rates: Rates
    state_slots: int = 2
    _seconds: dict[tuple[frozenset[str], float], float] = field(default_factory=dict)

    def of(self, item: Step | Held, choice: Choice) -> Price:
        """An operation, or a parameter."""
        return self.step(item, choice) if isinstance(item, Step) else self.parameter(item, choice)

    def step(self, step: Step, choice: Choice) -> Price:
        """One operation, forward and backward."""
        forwards = 1 + step.is_recomputed
        if step.kind == "move":
            return Price(self._move_s(step, choice, forwards))
        valued = step.inputs[:1] if step.kind == "lookup" else step.inputs  # not the indices
        out_bytes = self.local(step.out, choice) * max((one.value_bytes for one in valued), default=4)
        kept_bytes = 0.0 if step.is_recomputed else out_bytes
        if step.kind == "kept":
            return Price(0.0, kept_bytes)
        axes = self._axes(step.dims, choice)
        seconds = sum(self._enters_s(one, axes, choice) for one in step.inputs)
        lost = axes - self._axes(step.out, choice)
        if lost:
            repeats = 2 if step.kind == "extremum" and step.inputs[0].role == "trained" else 1
            seconds += forwards * repeats * self.all_reduce_s(lost, out_bytes)
        if step.kind == "product":
            passes = forwards + sum(one.role != "fixed" for one in step.inputs)
            seconds += 2 * passes * self.local(step.dims, choice) / self.rates.flops_per_s
        seconds += (_UNDOING + forwards) * out_bytes / self.rates.written_bytes_per_s
        return Price(seconds, kept_bytes)

    def parameter(self, held: Held, choice: Choice) -> Price:
        """Memory of a parameter, its gradient and the optimizer's state; and the time to update it."""
        own_bytes = self.local(held.dims, choice) * held.value_bytes
        if not held.is_trained:
            return Price(0.0, own_bytes)
        updated_s = (1 + self.state_slots) * own_bytes / self.rates.written_bytes_per_s
        return Price(updated_s, (2 + self.state_slots) * own_bytes)

    def local(self, dims: Iterable[Dim], choice: Choice) -> float:
        """Entries that each rank holds."""
        entries = 1.0
        for dim in dims:
            entries *= dim.size
            for axis in choice[dim]:
                entries /= self.sizes[axis]
        return entries

    def all_reduce_s(self, axes: frozenset[str], tensor_bytes: float) -> float:
        """An all-reduce over some axes together."""
        key = (axes, tensor_bytes)
        if key not in self._seconds:
            ranks = math.prod(self.sizes[axis] for axis in axes)
            self._seconds[key] = all_reduce_cost(tensor_bytes, self.rates.of(tuple(axes)), ranks).seconds
        return self._seconds[key]

    def _enters_s(self, one: Input, axes: frozenset[str], choice: Choice) -> float:
        missing = axes - self._axes(one.dims, choice)
        if not missing or one.role == "fixed":
            return 0.0
        own_bytes = self.local(one.dims, choice) * one.value_bytes
        whole_s = self.all_reduce_s(missing, own_bytes)
        # Parameters' gradients share their all-reduce, and so its latency.
        return whole_s - self.all_reduce_s(missing, 0.0) if one.role == "parameter" else whole_s

    def _move_s(self, step: Step, choice: Choice, forwards: int) -> float:
        (one,) = step.inputs
        before = {axis: place for place, (old, _) in enumerate(step.moves) if old for axis in choice[old]}
        after = {axis: place for place, (_, new) in enumerate(step.moves) if new for axis in choice[new]}
        own_bytes = self.local(one.dims, choice) * one.value_bytes
        seconds, backward = 0.0, one.role != "fixed"
        for axis in before | after:  # in one order on all ranks
            n = self.sizes[axis]
            if axis not in after:  # gathered; the gradient is cut
                seconds += forwards * self._exchange_s(axis, (n - 1) * own_bytes)
            elif axis not in before:  # cut; the gradient is gathered
                seconds += self._exchange_s(axis, (n - 1) / n * own_bytes) if backward else 0.0
            elif before[axis] != after[axis]:
                seconds += (forwards + backward) * self._exchange_s(axis, (n - 1) / n * own_bytes)
        return seconds

    def _exchange_s(self, axis: str, sent_bytes: float) -> float:
        network = self.rates.of((axis,))
        return network.latency_s + sent_bytes / network.bandwidth_bytes_per_s

    @staticmethod
    def _axes(dims: Iterable[Dim], choice: Choice) -> frozenset[str]:
        return frozenset(axis for dim in dims for axis in choice[dim])


def dims_of(item: Step | Held) -> Dims:
    """The dimensions whose axes the price of an operation or of a parameter depends on."""
    return tuple(dict.fromkeys((*item.dims, *item.out))) if isinstance(item, Step) else item.dims
