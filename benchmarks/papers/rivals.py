"""Steps of systems that a plan is compared with, as tasks of the simulator: replicas whose gradients are exchanged.

device   forward 0 .. k | backward k | backward k-1 | ...                      | update
link     first                       | bucket k     | bucket k-1 ...   | last  |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tulle.cost import Cost, Network, all_reduce_cost
from tulle.simulate import Forecast, Step, Task
from tulle.workload import ModuleProfile


@dataclass(frozen=True, slots=True)
class Exchange:
    """Something that is sent in a step.

    Args:
        name: For people.
        cost: What it costs.
        kind: `"dense"` or `"sparse"`.
    """

    name: str
    cost: Cost
    kind: str = "dense"


@dataclass(slots=True)
class Replicas:
    """A data-parallel step: buckets of dense gradients go as backward gives them, the rest when it is over.

    Args:
        modules: Pieces of the model, in the order of forward.
        network: Of axis `data`.
        ranks: Of it.
        bucket_bytes: Gradients that are all-reduced as one.
        first: Exchanges before forward: what lookups fetch.
        last: Exchanges after backward, in order.
        update_s: Of the optimizer.
    """

    modules: Sequence[ModuleProfile]
    network: Network
    ranks: int
    bucket_bytes: int
    first: Sequence[Exchange] = ()
    last: Sequence[Exchange] = ()
    update_s: float = 0.0
    _tasks: list[Task] = field(default_factory=list)

    def step(self) -> Step:
        """All tasks, in the order in which ranks begin them."""
        self._tasks = []
        before = tuple(self._exchange(one, ()) for one in self.first)
        for module in self.modules:
            self._tasks.append(Task(f"forward {module.name}", "device", module.forward_s, before))
            before = ()
        over = self._backward()
        sent = [self._exchange(one, (over,)) for one in self.last]
        links = [index for index, task in enumerate(self._tasks) if task.resource == "link"]
        waits = tuple({over, *sent, *links[-1:]})
        self._tasks.append(Task("update", "device", self.update_s, tuple(sorted(waits)), kind="update"))
        return Step({"data": self.ranks}, tuple(self._tasks))

    def _backward(self) -> int:
        """Backward of all pieces, with their buckets: the index of the last piece's."""
        pending_bytes, index = 0, len(self._tasks) - 1
        for module in reversed(self.modules):
            self._tasks.append(Task(f"backward {module.name}", "device", module.backward_s))
            index = len(self._tasks) - 1
            full, pending_bytes = divmod(pending_bytes + module.parameters_bytes, self.bucket_bytes)
            for _ in range(full):
                self._bucket(self.bucket_bytes, index)
        if pending_bytes:
            self._bucket(pending_bytes, index)
        return index

    def _bucket(self, size_bytes: int, after: int) -> None:
        cost = all_reduce_cost(size_bytes, self.network, self.ranks)
        self._exchange(Exchange("all-reduce bucket", cost), (after,))

    def _exchange(self, one: Exchange, after: tuple[int, ...]) -> int:
        seconds, sent_bytes = one.cost.seconds, one.cost.bytes
        self._tasks.append(Task(one.name, "link", seconds, after, axis="data", sent_bytes=sent_bytes, kind=one.kind))
        return len(self._tasks) - 1


def lasting_s(forecast: Forecast, slowdown: float) -> float:
    """Seconds of a step, where computation takes longer by a factor while the link is busy beside it."""
    link_s = sum(task.seconds for task in forecast.step.tasks if task.resource == "link")
    hidden_s = max(0.0, link_s - forecast.exposed_s)
    return forecast.step_s + hidden_s * (1.0 - 1.0 / slowdown)
