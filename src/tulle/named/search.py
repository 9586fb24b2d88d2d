"""`best_layout`: the fastest layout that fits in memory, by exact branch and bound over dimensions and mesh shapes.

One choice per dimension, an axis or none, as in Mesh-TensorFlow: the space is small enough to be searched in full. A
branch is cut off where what is settled of it costs more than the best complete layouts so far, as nothing that is
still open can cost less than its flops shared by all ranks.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import torch
from torch import nn

from tulle.comm import barrier, gather_values, probe
from tulle.comm.traffic import now_s
from tulle.cost import Network
from tulle.errors import PlanError
from tulle.mesh import Mesh
from tulle.named.dims import Dim, Layout
from tulle.named.explain import Explanation, Rates, explain
from tulle.named.price import Choice, Held, Price, Pricing, Problem, dims_of, record
from tulle.named.trace import Step

MAX_AXES = 3
ASSUMED = Rates(1e14, 1e12, Network(latency_s=1e-5, bandwidth_bytes_per_s=1e11))
"""Rates of an accelerator and its interconnect, where nothing is measured or said."""
_REPRICED = 8
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


def best_layout(
    model: nn.Module,
    sample: object,
    mesh_or_ranks: Mesh | Mapping[str, int] | int,
    *,
    memory_bytes: float = math.inf,
    rates: Rates | None = None,
    best: int = 3,
    state_slots: int = 2,
) -> list[Explanation]:
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
    """
    if rates is None:
        rates = measured(mesh_or_ranks) if isinstance(mesh_or_ranks, Mesh) else ASSUMED
    problem = record(model, sample)
    found = search_shapes(problem, mesh_or_ranks, rates, memory_bytes, max(best, _REPRICED), state_slots)
    told = [explain(model, sample, one.sizes, one.layout, state_slots=state_slots) for one in found]
    fitting = [one for one in told if one.memory_bytes <= memory_bytes]
    if not fitting:
        raise PlanError(
            f"no layout of the model fits in {memory_bytes / 1e9:.3g} GB on {mesh_or_ranks!r}: give it more ranks, or "
            "keep less with tn.recompute"
        )
    return sorted(fitting, key=partial(_seconds, rates))[:best]


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
        shapes = [mesh_or_ranks.shape if isinstance(mesh_or_ranks, Mesh) else dict(mesh_or_ranks)]
    kept: list[Found] = []
    for sizes in shapes:
        search = Search(problem, Pricing(sizes, rates, state_slots), memory_bytes, best, kept)
        search.run()
    return kept


def arrangements(ranks: int, axes: int = MAX_AXES) -> Iterator[dict[str, int]]:
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

    for sizes in factors(ranks, ranks, axes):
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
    """

    problem: Problem
    pricing: Pricing
    memory_bytes: float
    best: int
    kept: list[Found]
    _dims: list[Dim] = field(init=False)
    _settled: list[list[tuple[Step | Held, int]]] = field(init=False)
    _floors: list[Price] = field(init=False)
    _prices: dict[tuple[object, ...], Price] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._dims = self.problem.dims
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

    def _branch(self, depth: int, choice: dict[Dim, str | None], spent: Price) -> None:
        least = _sum([spent, self._floors[depth]])
        if least.memory_bytes > self.memory_bytes or not self._is_better(least.seconds):
            return
        if depth == len(self._dims):
            rules = {dim.name: axis for dim, axis in choice.items() if axis}
            found = Found(spent.seconds, spent.memory_bytes, self.pricing.sizes, Layout(rules))
            bisect.insort(self.kept, found)
            del self.kept[self.best :]
            return
        dim = self._dims[depth]
        branches: list[tuple[Price, str | None]] = []
        for axis in self._choices(dim, choice):
            choice[dim] = axis
            added = [self._price(item, choice, count) for item, count in self._settled[depth + 1]]
            branches.append((_sum([spent, *added]), axis))
        for price, axis in sorted(branches, key=lambda branch: branch[0]):
            choice[dim] = axis
            self._branch(depth + 1, choice, price)
        del choice[dim]

    def _choices(self, dim: Dim, choice: Choice) -> Iterator[str | None]:
        """No axis, or one that divides the dimension and splits none that it meets; of equal fresh axes only one."""
        yield None
        used = set(choice.values())
        fresh: set[int] = set()
        for axis, size in self.pricing.sizes.items():
            if dim.size % size or size == 1:
                continue
            if axis not in used and self._are_alike:
                if size in fresh:
                    continue
                fresh.add(size)
            conflicts = self.problem.conflicts
            if not any(taken == axis and frozenset((dim, other)) in conflicts for other, taken in choice.items()):
                yield axis

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
        whole = self.pricing.of(item, dict.fromkeys(dims_of(item)))
        return Price(whole.seconds * count / ranks, whole.memory_bytes * count / ranks)


def measured(mesh: Mesh) -> Rates:
    """What the ranks of a mesh and its networks give: one answer on all ranks. Every rank must call it."""
    networks = {axis.name: probe(axis) for axis in mesh.axes}
    for axis in mesh.axes:
        barrier(axis)  # all ranks shall be busy at once
    speeds = _flops_per_s(mesh.device), _written_bytes_per_s(mesh.device)
    # Lines of one axis are measured apart, and speeds by each rank: networks are the first rank's, speeds the slowest.
    for axis in mesh.axes:
        heard = gather_values((networks, speeds), axis, label="rates")
        networks = heard[0][0]
        speeds = min(flops for _, (flops, _) in heard), min(written for _, (_, written) in heard)
    return Rates(*speeds, networks)


_TRIALS = 15
_MATRIX = 512
_WRITTEN = 4 * 1024 * 1024
"""Numbers that an operation fills, more than a cache holds."""


def _seconds(rates: Rates, told: Explanation) -> float:
    return told.seconds(rates)


def _flops_per_s(device: torch.device) -> float:
    matrix = torch.ones(_MATRIX, _MATRIX, device=device)
    return 2 * _MATRIX**3 / _typical_s(lambda: matrix @ matrix, device)


def _written_bytes_per_s(device: torch.device) -> float:
    tensor = torch.ones(_WRITTEN, device=device)
    return tensor.nbytes / _typical_s(lambda: tensor * tensor, device)


def _typical_s(work: Callable[[], object], device: torch.device) -> float:
    times: list[float] = []
    for _ in range(_TRIALS):
        begin_s = now_s()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(now_s() - begin_s)
    return median(times)


def _sum(prices: Iterable[Price]) -> Price:
    seconds = memory_bytes = 0.0
    for price in prices:
        seconds += price.seconds
        memory_bytes += price.memory_bytes
    return Price(seconds, memory_bytes)
