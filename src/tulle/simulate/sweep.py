"""`sweep`: a step on one cluster after the other, and how well more of them scale."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

from tulle.errors import PlanError
from tulle.simulate.clusters import Change, another
from tulle.simulate.forecast import Forecast
from tulle.simulate.noise import Noise, Stragglers
from tulle.simulate.run import run
from tulle.simulate.task import Step
from tulle.workload import Cluster


@dataclass(frozen=True, slots=True)
class Weather:
    """What disturbs the ranks of a simulated cluster.

    Args:
        noise: How much computation varies.
        stragglers: Which ranks are slow.
        steps: How many are simulated, if one differs from the other.
        seed: Of both.
    """

    noise: Noise | None = None
    stragglers: Stragglers | None = None
    steps: int = 20
    seed: int = 0

    def run(self, step: Step) -> Forecast:
        """Simulate a step under these disturbances."""
        steps = self.steps if self.noise else 1
        return run(step, steps=steps, noise=self.noise, stragglers=self.stragglers, seed=self.seed)


@dataclass(frozen=True, slots=True)
class Point:
    """A step as simulated on one cluster.

    Args:
        cluster: Where.
        batch: Samples of the step, of all ranks.
        forecast: What came of it.
    """

    cluster: Cluster
    batch: int
    forecast: Forecast

    @property
    def samples_per_s(self) -> float:
        """Samples that all ranks together process in a second."""
        return self.batch / self.forecast.step_s

    def efficiency(self, base: Point) -> float:
        """Samples a second and rank, by those of another point: of weak and of strong scaling alike.

        Example:
            >>> from tulle.cost import Network
            >>> from tulle.simulate import Step, Task
            >>> from tulle.workload import Machine
            >>> one, four = (Cluster(hosts, 1, Machine(1e12, 1e11), Network(1e-4, 1e9)) for hosts in (1, 4))
            >>> slower = Step({"data": 4}, (Task("all", "device", 1.25),))
            >>> first = Point(one, 32, run(Step({}, (Task("all", "device", 1.0),))))
            >>> Point(four, 128, run(slower)).efficiency(first)
            0.8
        """
        return (self.samples_per_s / self.cluster.ranks) / (base.samples_per_s / base.cluster.ranks)


def changes(change: Change, over: Mapping[str, Sequence[Any]]) -> list[Change]:
    """All combinations of values of some fields of a `Change`, the last field varying fastest.

    Raises:
        PlanError: If a name is not that of a field.

    Example:
        >>> [(one.hosts, one.latency_s) for one in changes(Change(latency_s=1e-6), {"hosts": [1, 2, 4]})]
        [(1, 1e-06), (2, 1e-06), (4, 1e-06)]
    """
    known = [one.name for one in fields(Change)]
    unknown = [name for name in over if name not in known]
    if unknown:
        raise PlanError(f"cannot sweep over {unknown[0]!r}: {', '.join(known)} can be swept")
    return [replace(change, **dict(zip(over, values, strict=True))) for values in product(*over.values())]


def sweep(
    base: Cluster,
    over: Sequence[Change],
    step_on: Callable[[Cluster, int], Step],
    batch_on: Callable[[Cluster], int],
    weather: Weather | None = None,
) -> list[Point]:
    """Simulate a step on one cluster after the other.

    Args:
        base: The cluster that was measured.
        over: What each cluster has different.
        step_on: The step on a cluster, for so many samples.
        batch_on: Samples of a step on a cluster: as many a rank for weak scaling, always as many for strong.
        weather: What disturbs the ranks; None: nothing.
    """
    points: list[Point] = []
    for change in over:
        cluster = another(base, change)
        batch = batch_on(cluster)
        points.append(Point(cluster, batch, (weather or Weather()).run(step_on(cluster, batch))))
    return points
