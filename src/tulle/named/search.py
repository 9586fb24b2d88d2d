"""`best_layout`: the fastest layout that fits in memory, by exact branch and bound over dimensions and mesh shapes.

One choice per dimension, an axis or none, as in Mesh-TensorFlow: the space is small enough to be searched in full. A
branch is cut off where what is settled of it costs more than the best complete layouts so far, as nothing that is
still open can cost less than its flops shared by all ranks.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import combinations

from torch import nn

from tulle.errors import PlanError
from tulle.mesh import Mesh
from tulle.named.dims import Dim, Layout
from tulle.named.explain import Explanation, explain, sizes_of
from tulle.named.price import Axes, Choice, Held, Price, Pricing, Problem, dims_of, record
from tulle.named.rates import ASSUMED, Rates, measured
from tulle.named.trace import Step

_MOST_AXES = 3
_REPRICED = 16
"""So many of the search's best are priced again, exactly."""


@dataclass(frozen=True, slots=True, order=True)
class Found:
    """A layout that the search has found.

    Args:
        seconds: Its predicted time of a step.
        memory_bytes: Its predicted memory on each rank.
        sizes: Ranks along each axis.
        layout: The rules.
    """

    seconds: float
    memory_bytes: float = field(compare=False)
    sizes: Mapping[str, int] = field(compare=False)
    layout: Layout = field(compare=False)


class Ranking(list[Explanation]):
    """The fastest layouts, the best first; `tn.use` and `tn.explain` take it for its best.

    Args:
        told: Explanations, the fastest first.
        rates: What they were weighed with.
    """

    def __init__(self, told: Iterable[Explanation], rates: Rates) -> None:
        super().__init__(told)
        self.rates = rates

    @property
    def layout(self) -> Layout:
        """The fastest."""
        return self[0].layout

    @property
    def sizes(self) -> Mapping[str, int]:
        """Ranks along each axis under the fastest: `tulle.init(**sizes)`."""
        return self[0].sizes

    def __str__(self) -> str:
        head = f"{'ms':>10} {'MB of memory':>13} {'MB sent':>9} {'messages':>8}  mesh, layout"
        return "\n".join([head, *map(self._row, self)])

    def _row(self, one: Explanation) -> str:
        mesh = ", ".join(f"{name}={size}" for name, size in one.sizes.items())
        cells = f"{1e3 * one.seconds(self.rates):>10.3f} {one.memory_bytes / 1e6:>13.3f} {one.bytes_sent / 1e6:>9.3f}"
        return f"{cells} {one.messages:>8}  ({mesh}) '{one.layout}'"


def best_layout(
    model: nn.Module,
    sample: object,
    mesh_or_ranks: Mesh | Mapping[str, int] | int,
    *,
    memory_bytes: float = math.inf,
    rates: Rates | None = None,
    best: int = 3,
    state_slots: int = 2,
) -> Ranking:
    """The fastest layouts of a model that fit in memory, the best first, each with its explanation.

    With a mesh, its networks and the ranks' own speed are measured first: every rank must call it. With the sizes of
    axes, or a number of ranks, whose every arrangement along up to three axes is tried, `rates` says what they give.

    Args:
        model: As for `explain`.
        sample: One batch of named tensors, whole.
        mesh_or_ranks: A mesh, the sizes of its axes, or a number of ranks.
        memory_bytes: What each rank has for parameters, gradients, optimizer and activations.
        rates: What ranks and network give.
        best: How many to return.
        state_slots: Numbers that the optimizer keeps for each parameter.

    Raises:
        PlanError: If no layout fits in memory.
        ModelError: If the model does not give a named tensor.
        MeshError: If it is given neither a mesh nor a positive number of ranks.

    Example:
        >>> import torch
        >>> from tulle import named as tn
        >>> batch, d_model, d_ff = tn.dims(batch=4096, d_model=1024, d_ff=4096)
        >>> model = tn.Module()
        >>> model.up, model.down = tn.param(d_model, d_ff), tn.param(d_ff, d_model)
        >>> model.forward = lambda x: tn.relu(x.dot(model.up, d_model)).dot(model.down, d_ff).mean()
        >>> x = tn.from_torch(torch.empty(4096, 1024, device="meta"), (batch, d_model))
        >>> best_layout(model, x, 8).layout
        Layout('d_ff:a')
    """
    if isinstance(mesh_or_ranks, int):
        sizes_of({"ranks": mesh_or_ranks}, "best_layout")
    problem = record(model, sample)
    if rates is None:
        is_mesh = isinstance(mesh_or_ranks, Mesh)
        rates = measured(mesh_or_ranks, problem.product(mesh_or_ranks.size)) if is_mesh else ASSUMED
    found = search_shapes(problem, mesh_or_ranks, rates, memory_bytes, max(best, _REPRICED), state_slots)
    told: list[Explanation] = []
    for one in found:
        with suppress(PlanError):  # an operation's own rules, such as a stride's, are known to it alone
            told.append(explain(model, sample, one.sizes, one.layout, state_slots=state_slots))
    fitting = [one for one in told if one.memory_bytes <= memory_bytes]
    if not fitting:
        raise PlanError(
            f"no layout of the model fits in {memory_bytes / 1e9:.3g} GB on {mesh_or_ranks!r}: give it more ranks, or "
            "keep less with tn.recompute"
        )
    return Ranking(sorted(fitting, key=lambda one: one.seconds(rates))[:best], rates)


def search_shapes(
    problem: Problem,
    mesh_or_ranks: Mesh | Mapping[str, int] | int,
    rates: Rates,
    memory_bytes: float = math.inf,
    best: int = 1,
    state_slots: int = 2,
) -> list[Found]:
    """Search one mesh, or all arrangements of a number of ranks."""
    if isinstance(mesh_or_ranks, int):
        shapes = list(arrangements(mesh_or_ranks))
    else:
        shapes = [sizes_of(mesh_or_ranks, "best_layout")]
    kept: list[Found] = []
    for sizes in shapes:
        Search(
            problem, Pricing(sizes, rates, state_slots), memory_bytes, best, kept, is_one_of_many=len(shapes) > 1
        ).run()
    return kept


def arrangements(ranks: int) -> Iterator[dict[str, int]]:
    """All ways to arrange ranks along up to three axes, longest first, named a, b, c.

    Example:
        >>> list(arrangements(8))
        [{'a': 8}, {'a': 4, 'b': 2}, {'a': 2, 'b': 2, 'c': 2}]
    """

    def factors(rest: int, largest: int, room: int) -> Iterator[list[int]]:
        if rest == 1:
            yield []
        elif room:
            for size in range(min(rest, largest), 1, -1):
                if rest % size == 0:
                    yield from ([size, *more] for more in factors(rest // size, size, room - 1))

    for sizes in factors(ranks, ranks, _MOST_AXES):
        yield dict(zip("abc", sizes, strict=False))


@dataclass(slots=True)
class Search:
    """Branch and bound on one mesh.

    Args:
        problem: The model's step.
        pricing: What its operations cost.
        memory_bytes: The cap.
        best: How many layouts to keep.
        kept: The best so far, of other meshes too, in order.
        is_one_of_many: Whether all other arrangements of as many ranks are searched too.
    """

    problem: Problem
    pricing: Pricing
    memory_bytes: float
    best: int
    kept: list[Found]
    is_one_of_many: bool = False
    _dims: list[Dim] = field(init=False)
    _settled: list[list[tuple[Step | Held, int]]] = field(init=False)
    _floors: list[Price] = field(init=False)
    _prices: dict[tuple[object, ...], Price] = field(default_factory=dict)
    _parts: dict[Axes, int] = field(init=False)

    def __post_init__(self) -> None:
        self._dims = self.problem.dims
        sizes = {axis: size for axis, size in self.pricing.sizes.items() if size > 1}
        together = [axes for count in range(len(sizes) + 1) for axes in combinations(sizes, count)]
        self._parts = {axes: math.prod(sizes[axis] for axis in axes) for axes in together}
        depth = {dim: number for number, dim in enumerate(self._dims)}
        self._settled = [[] for _ in range(len(self._dims) + 1)]
        items: list[tuple[Step | Held, int]] = [*self.problem.steps.items(), *self.problem.parameters.items()]
        for item, count in items:
            dims = dims_of(item)
            self._settled[max((depth[dim] + 1 for dim in dims), default=0)].append((item, count))
        # What remains at each depth costs at least its share of all ranks.
        floors = [Price()]
        for level in reversed(self._settled[1:]):
            least = [self._floor(item, count) for item, count in level]
            floors.append(_sum([floors[-1], *least]))
        self._floors = floors[::-1]

    def run(self) -> None:
        """Put this mesh's best layouts among those kept."""
        begin = _sum([self._price(item, {}, count) for item, count in self._settled[0]])
        self._branch(0, {}, begin)

    def _branch(self, depth: int, choice: dict[Dim, Axes], spent: Price) -> None:
        least = _sum([spent, self._floors[depth]])
        if least.memory_bytes > self.memory_bytes or not self._is_better(least.seconds):
            return
        if depth == len(self._dims):
            if self.is_one_of_many and self._has_equal(choice):
                return
            rules = {dim.name: "+".join(axes) for dim, axes in choice.items() if axes}
            found = Found(spent.seconds, spent.memory_bytes, self.pricing.sizes, Layout(rules))
            bisect.insort(self.kept, found)
            del self.kept[self.best :]
            return
        dim = self._dims[depth]
        branches: list[tuple[Price, Axes]] = []
        for axes in self._choices(dim, choice):
            choice[dim] = axes
            added = [self._price(item, choice, count) for item, count in self._settled[depth + 1]]
            branches.append((_sum([spent, *added]), axes))
        for price, axes in sorted(branches, key=lambda branch: branch[0]):
            choice[dim] = axes
            self._branch(depth + 1, choice, price)
        del choice[dim]

    def _has_equal(self, choice: Choice) -> bool:
        """Whether no dimension tells two axes apart: on the mesh where they are one, the layout is the same."""
        pairs = combinations(self.pricing.sizes, 2)
        return any(all((one in axes) == (other in axes) for axes in choice.values()) for one, other in pairs)

    def _choices(self, dim: Dim, choice: Choice) -> Iterator[Axes]:
        """No axis, or some that divide the dimension and split none that it meets; of equal fresh axes the first."""
        barred = {
            axis for other, axes in choice.items() for axis in axes if frozenset((dim, other)) in self.problem.conflicts
        }
        used = {axis for axes in choice.values() for axis in axes}
        for axes, parts in self._parts.items():
            is_legal = barred.isdisjoint(axes) and dim.size % parts == 0
            if is_legal and not (axes and dim in self.problem.whole) and not self._skips_alike(axes, used):
                yield axes

    def _skips_alike(self, axes: Axes, used: set[str]) -> bool:
        """Whether a fresh axis is taken while one as long, fresh too, is passed over: the same by another name."""
        if not self._are_alike:
            return False
        sizes = self.pricing.sizes
        passed: set[int] = set()
        for axis in sizes:
            if axis in used:
                continue
            if axis not in axes:
                passed.add(sizes[axis])
            elif sizes[axis] in passed:
                return True
        return False

    @property
    def _are_alike(self) -> bool:
        return not isinstance(self.pricing.rates.network, Mapping)

    def _is_better(self, seconds: float) -> bool:
        return len(self.kept) < self.best or seconds < self.kept[-1].seconds

    def _price(self, item: Step | Held, choice: Choice, count: int) -> Price:
        key = (item, *[choice[dim] for dim in dims_of(item)])
        price = self._prices.get(key)
        if price is None:
            price = self._prices[key] = self.pricing.of(item, choice)
        return Price(price.seconds * count, price.memory_bytes * count)

    def _floor(self, item: Step | Held, count: int) -> Price:
        """The least that something can cost: split over all ranks, and nothing sent."""
        ranks = math.prod(self.pricing.sizes.values())
        whole = self.pricing.of(item, dict.fromkeys(dims_of(item), ()))
        return Price(whole.seconds * count / ranks, whole.memory_bytes * count / ranks)


def _sum(prices: Iterable[Price]) -> Price:
    seconds = memory_bytes = 0.0
    for price in prices:
        seconds += price.seconds
        memory_bytes += price.memory_bytes
    return Price(seconds, memory_bytes)
