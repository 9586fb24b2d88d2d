"""`tulle.sync.ddp_hook`: sparse gradients for plain DistributedDataParallel, on gloo and nccl (pytorch#22400)."""

# Without `from __future__ import annotations`: DDP compares the annotations of a hook with the types themselves.

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.autograd import Variable
from torch.utils.weak import WeakIdKeyDictionary

from tulle.comm import BackgroundThread, lane
from tulle.errors import GradientError, MeshError
from tulle.mesh import Axis, Mesh, axis_of
from tulle.sync.persistent import PersistentAllReduce, means_in_packet
from tulle.sync.schemes import AUTO, check_scheme
from tulle.sync.table import WireDtype, as_wire_dtype

_NOT_RUNNING = -1
"""What torch gives for the number of the backward where there is none."""
_Means = Callable[[Sequence[PersistentAllReduce], Sequence[Tensor]], list[Tensor]]


class _Waiting(NamedTuple):
    """A sparse gradient that is to be reduced, what knows its parameter's, and where the mean goes."""

    gradient: Tensor
    reduction: PersistentAllReduce
    future: torch.futures.Future[Tensor]


@dataclass(slots=True)
class DDPState:
    """How `ddp_hook` reduces; the `state` of `register_comm_hook`.

    Args:
        axis: The axis or process group that DDP uses; None for all processes.
        scheme: For sparse gradients, one of `tulle.sync.SCHEMES`, or `"auto"`.
        wire_dtype: In which the values of sparse gradients travel; None loses nothing.

    Raises:
        MeshError: If `axis` is none of these.
        PlanError: If there is no such scheme or dtype.
    """

    axis: Axis | dist.ProcessGroup | None = None
    scheme: str = AUTO
    wire_dtype: WireDtype = None
    _axis: Axis = field(init=False, repr=False)
    _reductions: WeakIdKeyDictionary = field(init=False, repr=False, default_factory=WeakIdKeyDictionary)
    """What is known of each parameter's gradients."""
    _waiting: list[_Waiting] = field(init=False, repr=False, default_factory=list)
    """Gradients of few rows, which travel as one when the last bucket has come."""
    _errors: list[Exception] = field(init=False, repr=False, default_factory=list)
    """What went wrong in this backward."""
    _backward: int = field(init=False, repr=False, default=_NOT_RUNNING)
    """Torch's number of it."""
    _are_all_first: bool = field(init=False, repr=False, default=False)
    """Whether another bucket was the first in it before."""

    def __post_init__(self) -> None:
        check_scheme(self.scheme)
        as_wire_dtype(self.wire_dtype)
        if not isinstance(self.axis, Axis | dist.ProcessGroup | None):
            raise MeshError(
                f"tulle.sync.DDPState was given a {type(self.axis).__name__} as axis, expected one of a mesh, as "
                "mesh['data'], the process group that DDP uses, or None for all processes"
            )
        self._axis = self.axis if isinstance(self.axis, Axis) else axis_of(self.axis)

    def __reduce__(self) -> tuple[type, tuple[None, str, WireDtype]]:
        """DDP pickles models, and what was registered with them, if they are trained on all processes."""
        if self._axis.size != dist.get_world_size():
            raise MeshError(
                f"a tulle.sync.DDPState of {self._axis.size} of {dist.get_world_size()} processes cannot be pickled, "
                "nor can DDP of some: pickle the model within it, model.module, or its state_dict"
            )
        return DDPState, (None, self.scheme, self.wire_dtype)

    def __deepcopy__(self, memo: object) -> "DDPState":
        return DDPState(self.axis, self.scheme, self.wire_dtype)

    def begin(self) -> None:
        """The first bucket has come: what goes wrong from here on is raised when DDP is done with all of them.

        DDP takes nothing but tensors from a future, so an error in one would reach the user as that of a cast.
        """
        self._errors = []
        before, self._backward = self._backward, torch._C._current_graph_task_id()
        self._are_all_first = before == self._backward != _NOT_RUNNING
        if self._backward == _NOT_RUNNING:
            return  # and `finish` raises it
        queue: Callable[[Callable[[], None]], None] = Variable._execution_engine.queue_callback
        queue(partial(queue, partial(_raise_first, self._errors)))  # after DDP's own, which is queued by then

    def start(self, parameter: Tensor, gradient: Tensor) -> torch.futures.Future[Tensor]:
        """Begin to reduce a parameter's sparse gradient to its mean, beside backward or, of few rows, at its end."""
        if parameter not in self._reductions:
            self._reductions[parameter] = PersistentAllReduce(self._lane, self.scheme, self.wire_dtype)
        reduction: PersistentAllReduce = self._reductions[parameter]
        future = _future_on(gradient.device)
        waiting = _Waiting(gradient, reduction, future)
        if reduction.is_in_packets:
            self._waiting.append(waiting)
        else:
            self._submit([waiting], _one_by_one)
        return future

    def finish(self, *, is_last: bool) -> None:
        """Send what has waited for others, if the last bucket has come; wait for it where nobody else does.

        Where the thread takes turns it goes on while it is waited for, and DDP waits in C++. In the first step of a
        static graph DDP calls every bucket the first. And a rank that has no more batches (`with model.join():`), whose
        zeros DDP sends out of any backward, is to raise what went wrong here.
        """
        if is_last and self._waiting:
            self._submit(self._waiting, means_in_packet)
            self._waiting = []
        is_apart = self._backward == _NOT_RUNNING
        is_done = is_last or self._are_all_first
        if is_done and self._reductions and (is_apart or self._thread.takes_turns):
            self._thread.submit(_nothing).result()
        if is_last and is_apart:
            _raise_first(self._errors)

    @property
    def _lane(self) -> Axis:
        return lane(self._axis, "ddp_hook")

    @property
    def _thread(self) -> BackgroundThread:
        # The process group's, not this state's: of two states on one axis the threads would submit in any order.
        kept, device = self._lane.kept, self._lane.device
        if BackgroundThread not in kept:
            kept[BackgroundThread] = BackgroundThread("tulle ddp_hook", device)
        return kept[BackgroundThread]

    def _submit(self, gradients: list[_Waiting], means: _Means) -> None:
        self._thread.submit(partial(_reduce, gradients, means, self._errors))


def ddp_hook(
    state: DDPState | Axis | Mesh | dist.ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[Tensor]:
    """A communication hook with which DDP trains `nn.Embedding(sparse=True)` by any scheme of tulle, on any backend.

    Dense buckets are all-reduced as DDP does. Sparse ones are reduced as by `tulle.sync.all_reduce`, in a thread and on
    a process group of their own, while backward goes on; those of few rows go together, in one message at its end.
    Gradients are means, as DDP's. All ranks register it alike.

    Args:
        state: What was given to `register_comm_hook`: None for DDP over all processes, the process group or axis that
            DDP uses, or a `DDPState` with a scheme or a `wire_dtype`.
        bucket: What DDP gives.

    Raises:
        GradientError: In backward, if the state is none of these.
        TulleError: At the end of backward, what reducing a sparse gradient raised; gradients are then this rank's own.

    Example:
        >>> import torch, tulle
        >>> from torch.nn.parallel import DistributedDataParallel
        >>> mesh = tulle.init()  # or torch.distributed.init_process_group
        >>> model = DistributedDataParallel(torch.nn.EmbeddingBag(100, 4, sparse=True))
        >>> model.register_comm_hook(None, tulle.sync.ddp_hook)
        >>> model(torch.tensor([[1, 2, 2]])).sum().backward()
        >>> model.module.weight.grad.coalesce().indices().tolist()
        [[1, 2]]
    """
    ready = _state_of(state)
    gradient = bucket.buffer()
    if ready._axis.size == 1:
        return _done(gradient)  # which is the mean, and nobody is there to send it to
    if bucket.index() == 0:
        ready.begin()
    is_sparse = gradient.layout != torch.strided
    mean = ready.start(bucket.parameters()[0], gradient) if is_sparse else _dense_mean(gradient, ready._axis)
    ready.finish(is_last=bucket.is_last())
    return mean


def _dense_mean(gradient: Tensor, axis: Axis) -> torch.futures.Future[Tensor]:
    """As DDP's own."""
    work = dist.all_reduce(gradient.div_(axis.size), group=axis.group, async_op=True)
    assert work is not None, "an asynchronous collective returns its work on every rank of its group"
    return work.get_future().then(lambda future: future.value()[0])


def _done(gradient: Tensor) -> torch.futures.Future[Tensor]:
    future = _future_on(gradient.device)
    _give(future, gradient)
    return future


def _give(future: torch.futures.Future[Tensor], gradient: Tensor) -> None:
    """Be done with a gradient as it is; on a GPU torch wants to see its rows, which it can if each is there once."""
    is_sparse = gradient.layout != torch.strided
    future.set_result(gradient.coalesce() if is_sparse and gradient.is_cuda else gradient)


def _future_on(device: torch.device) -> torch.futures.Future[Tensor]:
    return torch.futures.Future(devices=[device] if device.type == "cuda" else None)


def _reduce(gradients: list[_Waiting], means: _Means, errors: list[Exception]) -> None:
    try:
        found = means([one.reduction for one in gradients], [one.gradient for one in gradients])
        for one, mean in zip(gradients, found, strict=True):
            one.future.set_result(mean)
    except Exception as error:
        errors.append(error)
        for one in gradients:
            _give(one.future, one.gradient)


def _nothing() -> None:
    """What is done behind all that was submitted."""


def _raise_first(errors: list[Exception]) -> None:
    if errors:
        raise errors[0]


def _one_by_one(reductions: Sequence[PersistentAllReduce], gradients: Sequence[Tensor]) -> list[Tensor]:
    return [one.mean(gradient) for one, gradient in zip(reductions, gradients, strict=True)]


def _state_of(state: DDPState | Axis | Mesh | dist.ProcessGroup | None) -> DDPState:
    if isinstance(state, DDPState):
        return state
    if isinstance(state, Mesh):
        state = state["data"]
    if not isinstance(state, Axis | dist.ProcessGroup | None):
        raise GradientError(
            f"tulle.sync.ddp_hook was given the state {state!r}, expected None, the axis or process group that DDP "
            "uses, or a tulle.sync.DDPState: register_comm_hook(DDPState(scheme='balanced'), ddp_hook), say"
        )
    group = state.group if isinstance(state, Axis) else (state or dist.group.WORLD)
    if group not in _states:
        for destroyed in _states.keys() - dist.distributed_c10d._world.pg_map.keys():
            del _states[destroyed]  # and with it threads and connections
        _states[group] = DDPState(state)
    return _states[group]


_states: dict[object, DDPState] = {}
"""Of hooks that were registered without a state of their own, by process group."""
