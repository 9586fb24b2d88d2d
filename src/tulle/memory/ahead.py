"""`Ahead`: gathers what comes next while the current unit computes, and sends gradients while backward goes on.

    forward     compute          u1          u2          u3
                on the wire  u1  u2          u3
    backward    compute                      u3          u2          u1
                on the wire  u3  u2          u1  grads 3     grads 2     grads 1

What comes next is what came next the last two times. Which units run, and in which order, must be alike on all ranks
anyway, so all predict alike, and a wrong prediction costs its bytes and nothing else: it is dropped by all. What a rank
sends never hangs on the values that it has. Ranks that take other branches are found by name
(`tulle.memory.execution_order`).
Nothing is predicted from one call of a model to the next, in between which its user may write to parameters, nor across
a step of an optimizer. At most one message of parameters is gathered ahead, and one of gradients on the way
(`tulle.memory.leaving`). A message has one unit, or as many as come one after the other and are small.

Source: Zhao et al., *PyTorch FSDP* (VLDB'23), section 3.3.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from tulle.comm import Weights, all_reduce, hosts_of, lane
from tulle.errors import ModelError
from tulle.memory.execution_order import ExecutionOrder, Sent
from tulle.memory.leaving import TOGETHER, Leaving, Reduced, for_time
from tulle.memory.shard import Shard
from tulle.memory.unit import Unit, joined
from tulle.mesh import Axis
from tulle.parts import Reduction

FORWARD, EVALUATING, BACKWARD = "forward", "evaluating", "backward"
"""What a unit is gathered for."""
_STATE, _NUMBER = "state", "number"
_COUNTED = 1000
"""Later uses of a unit without a step of an optimizer count as one."""
_FOLLOWER = "_tulle_ahead"
"""The attribute by which a part knows, weakly, what gathers it."""


@dataclass(frozen=True, slots=True)
class _Use:
    """A unit, what it is gathered for, and for which time since the last step of an optimizer."""

    unit: Unit
    what: str
    number: int


@dataclass(frozen=True, slots=True)
class _Coming:
    """Wholes that are being gathered for a use, of these parts, and where they are among those of their message."""

    use: _Use
    parts: Sequence[nn.Parameter]
    versions: Sequence[tuple[int, int]]
    job: Sent[list[Tensor]]
    place: slice

    def is_for(self, use: _Use, parts: Sequence[nn.Parameter]) -> bool:
        """Whether they are for that use, and of what these parts hold now: a forward may have written there since."""
        is_same = self.use == use and all(one is other for one, other in zip(self.parts, parts, strict=True))
        return is_same and self.versions == _versions(parts)


class Ahead:
    """What is under way for the units of one model; all that they send goes through it.

    Args:
        axis: Over which they are shared out; every rank of it must make one. Or the lane of another `Ahead`.
        within_hosts: Whether the ranks of each host share them out, and hosts are replicas.
    """

    def __init__(self, axis: Axis, *, within_hosts: bool = False) -> None:
        self._lane = axis if Ahead in axis.kept else lane(axis, "shared out")
        self._within_hosts = within_hosts
        self.axis, self.across = _sharing(self._lane, within_hosts=within_hosts)
        if Ahead not in self._lane.kept:
            self._lane.kept[Ahead] = ExecutionOrder(self._lane)
        self._order: ExecutionOrder = self._lane.kept[Ahead]
        self._parts: dict[Unit, Sequence[nn.Parameter]] = {}
        self._uses: Counter[tuple[Unit, str]] = Counter()
        self._followed: dict[_Use, tuple[_Use | None, _Use | None]] = {}
        """What came after a use, the last time and the time before; None for what was not to be gathered ahead."""
        self._last: tuple[_Use, int] | None = None
        self._recomputed: tuple[Unit, list[Tensor]] | None = None
        """The wholes that a unit was just recomputed with: backward reads them next."""
        self._coming: deque[_Coming] = deque()
        """In the order in which they are expected to be used: the rest of one message, and the next."""
        self._leaving = Leaving(self._order)

    def gather(self, unit: Unit, parts: Sequence[nn.Parameter], what: str, *, call: int) -> list[Tensor]:
        """The wholes of a unit, and the next one's are begun. Every rank of the axis must call it, in the same order.

        Args:
            unit: The unit.
            parts: Of its parameters, this rank's.
            what: It is gathered for.
            call: The number of the call of a model that it belongs to.
        """
        recomputed, self._recomputed = self._recomputed, None
        if recomputed is not None and recomputed[0] is unit and what == BACKWARD:
            return recomputed[1]
        self._parts[unit] = parts
        use = _Use(unit, what, self._time(unit, what))
        self._learn(use, call)
        coming = self._coming.popleft() if self._coming else None
        if coming is None or not coming.is_for(use, parts):
            self._coming = self._begin(use)
            coming = self._coming.popleft()
        if not self._coming or self._coming[-1].job is coming.job:  # nothing is under way behind its message
            following = self._expected(self._coming[-1].use if self._coming else use)
            self._coming += self._begin(following) if following is not None else ()
        wholes = coming.job.result()[coming.place]
        if what == FORWARD and in_backward() and not (unit.stays or unit.is_apart):
            self._recomputed = unit, [whole.detach() for whole in wholes]
        return wholes

    def reduce(self, unit: Unit, gradients: Sequence[Tensor | None], parts: Sequence[Tensor]) -> Reduced:
        """Send gradients to the ranks that keep the parts. Every rank of the axis must call it, in the same order."""
        return self._leaving.add(unit, gradients, parts, number=self._time(unit, "gradients"))

    def whole(self, part: Tensor, shard: Shard, name: str, reader: str = "model.state_dict()") -> Tensor:
        """All of what is shared out. Every rank of the axis must call it, in the same order.

        Args:
            part: This rank's.
            shard: How it is cut.
            name: Of the parameter.
            reader: Whom it is for.

        Raises:
            ModelError: If other ranks are at something else.
        """
        label = f"{name!r} for {reader}"
        gather = partial(replace(shard, axis=self.axis).whole, part, label=label)
        return self._order.submit(label, _STATE, gather).result()

    def mean(self, gradient: Tensor, shard: Shard, name: str) -> Tensor:
        """Of the mean of all ranks' gradients of a whole this rank's part. Every rank of the axis must call it.

        Args:
            gradient: This rank's.
            shard: How the parameter is cut.
            name: Of the parameter.

        Raises:
            ModelError: If other ranks are at something else.
        """
        label = f"the gradient of all of {name!r}"

        def reduce() -> Tensor:
            mean = gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True)
            for axis in (self.axis, self.across):
                mean = mean if axis is None else all_reduce(mean, axis, label=label).wait() / axis.size
            return replace(shard, axis=self.axis).part(mean).to(gradient.dtype)

        return self._order.submit(label, _STATE, reduce).result()

    def number(self, number: Tensor, op: Reduction, name: str) -> Tensor:
        """What all ranks' numbers of one of their parts make. Every rank of the axis must call it, in the same order.

        Args:
            number: This rank's, without a gradient.
            op: How they go together.
            name: Of the parameter.

        Raises:
            ModelError: If other ranks are at something else.
        """
        label = f"one number of all of {name!r}"

        def reduce() -> Tensor:
            return all_reduce(number.clone(), self.axis, label=label, op=op).wait()

        return self._order.submit(label, (_NUMBER, op), reduce).result()

    def follow(self, part: nn.Parameter) -> None:
        """Have a step end when an optimizer has stepped a part, also one that is made later."""
        setattr(part, _FOLLOWER, ref(self))
        _watch_steps()

    def end_step(self) -> None:
        """Parameters have changed: what was gathered of them is old."""
        self._uses.clear()
        self._last = self._recomputed = None
        self._coming.clear()

    def drop(self) -> None:
        """A parameter was written to: what is gathered ahead may be old. Every rank must call it, or none."""
        self._recomputed = None
        self._coming.clear()

    def _begin(self, use: _Use) -> deque[_Coming]:
        """Gather a unit, and as many of those that are expected behind it as go in its message."""
        uses = self._with_small(use)
        whole = joined([one.unit for one in uses])
        parts = [self._parts[one.unit] for one in uses]
        gather = partial(whole.gather, whole.pack([part for of_unit in parts for part in of_unit]))
        exchange = f"parameters of {whole.name!r}{for_time(use.number)}"
        job = self._order.submit(exchange, (use.what, use.number), gather)
        coming, begin = deque[_Coming](), 0
        for one, of_unit in zip(uses, parts, strict=True):
            place = slice(begin, begin := begin + len(of_unit))
            coming.append(_Coming(one, of_unit, _versions(of_unit), job, place))
        return coming

    def _with_small(self, use: _Use) -> list[_Use]:
        uses, last, count = {use: None}, use, use.unit.count
        while (following := self._expected(last)) is not None and following.what == use.what:
            count += following.unit.count
            if count > TOGETHER or following in uses:
                break
            uses[following], last = None, following
        return [*uses]

    def _expected(self, use: _Use) -> _Use | None:
        """What is to be gathered ahead behind a use."""
        before, last = self._followed.get(use, (None, None))
        return last if last is not None and before == last and last.unit in self._parts else None

    def _time(self, unit: Unit, what: str) -> int:
        """For which time since the last step of an optimizer; calls that only evaluate are not told apart."""
        number = self._uses[unit, what]
        self._uses[unit, what] += what != EVALUATING
        return min(number, _COUNTED)

    def _learn(self, use: _Use, call: int) -> None:
        if self._last is not None:
            last, its_call = self._last
            may_be_ahead = use.what == BACKWARD or call == its_call or in_backward()
            _, before = self._followed.get(last, (None, None))
            self._followed[last] = before, use if may_be_ahead else None
            if not may_be_ahead:
                self._coming.clear()
        self._last = use, call

    def __deepcopy__(self, memo: object) -> Ahead:
        """A copied model's parts lie where the model's do. One rank may make a copy alone."""
        return Ahead(self._lane, within_hosts=self._within_hosts)


def sharing_within_hosts(axis: Axis) -> Axis:
    """The ranks of an axis on this host, over which they share parameters out. Every rank of the axis must call it."""
    inside, _ = _sharing(axis, within_hosts=True)
    inside.kept.setdefault(Weights, Weights.on(axis))  # which all ranks compare
    return inside


def _sharing(axis: Axis, *, within_hosts: bool) -> tuple[Axis, Axis | None]:
    """Over which ranks parameters are shared out, and along which there are replicas of the parts, if there are any."""
    if not within_hosts:
        return axis, None
    inside, across = hosts_of(axis)
    if inside is None or across is None:
        raise ModelError(f"hosts have different numbers of ranks of axis {axis.name!r}: share out over all of them")
    return inside, across if across.size > 1 else None


def ahead_of(part: Tensor | None) -> Ahead | None:
    """What gathers a part when a module runs, or None."""
    follower = getattr(part, _FOLLOWER, None)
    return None if follower is None else follower()


@cache
def _watch_steps() -> None:
    """Look at the steps of all optimizers of this process from now on."""
    register_optimizer_step_post_hook(_stepped)


def _stepped(optimizer: Optimizer, *_: object) -> None:
    for ahead in dict.fromkeys(ahead_of(p) for group in optimizer.param_groups for p in group["params"]):
        if ahead is not None:
            ahead.end_step()


def _versions(parts: Sequence[nn.Parameter]) -> list[tuple[int, int]]:
    """How often each was written in, and where it lies (`part.data = ...`); what all ranks write, they write alike."""
    with torch._C.DisableTorchFunctionSubclass():
        return [(part._version, part.data_ptr()) for part in parts]


def in_backward() -> bool:
    """Whether autograd is running, as when a module is recomputed."""
    return torch._C._current_graph_task_id() != -1
