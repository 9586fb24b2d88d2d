"""`tulle.sync.ddp_hook`: sparse gradients for plain DistributedDataParallel, on gloo and nccl (pytorch#22400)."""

# Without `from __future__ import annotations`: DDP compares the annotations of a hook with the types themselves.

from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from tulle.comm import BackgroundThread, lane
from tulle.mesh import Axis, Mesh, axis_of
from tulle.sync.persistent import PersistentAllReduce
from tulle.sync.schemes import AUTO, check_scheme
from tulle.sync.table import WireDtype, as_wire_dtype


@dataclass(slots=True)
class DDPState:
    """How `ddp_hook` reduces; the `state` of `register_comm_hook`.

    Args:
        axis: The axis or process group that DDP uses; None for all processes.
        scheme: For sparse gradients, one of `tulle.sync.SCHEMES`, or `"auto"`.
        wire_dtype: In which the values of sparse gradients travel; None loses nothing.
    """

    axis: Axis | dist.ProcessGroup | None = None
    scheme: str = AUTO
    wire_dtype: WireDtype = None
    _axis: Axis = field(init=False, repr=False)
    _reductions: dict[object, PersistentAllReduce] = field(init=False, repr=False, default_factory=dict)
    """By number of the bucket, shape and dtype: DDP gives buckets other numbers after the first step."""

    def __post_init__(self) -> None:
        check_scheme(self.scheme)
        as_wire_dtype(self.wire_dtype)
        self._axis = self.axis if isinstance(self.axis, Axis) else axis_of(self.axis)

    def start(self, gradient: Tensor, bucket: int) -> torch.futures.Future[Tensor]:
        """Begin to reduce the sparse gradient of a bucket to its mean, beside backward."""
        axis = lane(self._axis, "ddp_hook")
        # The process group's, not this state's: of two states on one axis the threads would submit in any order.
        if BackgroundThread not in axis.kept:
            axis.kept[BackgroundThread] = BackgroundThread("tulle ddp_hook", axis.device)
        kind = bucket, gradient.shape, gradient.dtype
        if kind not in self._reductions:
            self._reductions[kind] = PersistentAllReduce(axis, self.scheme, self.wire_dtype)
        future: torch.futures.Future[Tensor] = torch.futures.Future(
            devices=[gradient.device] if gradient.is_cuda else None
        )
        axis.kept[BackgroundThread].submit(partial(_reduce, gradient, self._reductions[kind], future))
        return future


def ddp_hook(
    state: DDPState | Axis | Mesh | dist.ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[Tensor]:
    """A communication hook with which DDP trains `nn.Embedding(sparse=True)` by any scheme of tulle, on any backend.

    Dense buckets are all-reduced as DDP does. Sparse ones are reduced as by `tulle.sync.all_reduce`, in a thread and on
    a process group of their own, while backward goes on. Gradients are means, as DDP's. All ranks register it alike.

    Args:
        state: What was given to `register_comm_hook`: None for DDP over all processes, the process group or axis that
            DDP uses, or a `DDPState` with a scheme or a `wire_dtype`.
        bucket: What DDP gives.

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
    if gradient.layout != torch.strided:
        return ready.start(gradient, bucket.index())
    mean = gradient.div_(ready._axis.size)
    work = dist.all_reduce(mean, group=ready._axis.group, async_op=True)
    assert work is not None, "an asynchronous collective returns its work on every rank of its group"
    return work.get_future().then(lambda future: future.value()[0])


def _reduce(gradient: Tensor, reduction: PersistentAllReduce, future: torch.futures.Future[Tensor]) -> None:
    try:
        future.set_result(reduction.mean(gradient))
    except Exception as error:
        future.set_exception(error)  # pyright: ignore[reportArgumentType] - torch's annotation is wrong


def _state_of(state: DDPState | Axis | Mesh | dist.ProcessGroup | None) -> DDPState:
    if isinstance(state, DDPState):
        return state
    if isinstance(state, Mesh):
        state = state["data"]
    group = state.group if isinstance(state, Axis) else (state or dist.group.WORLD)
    if group not in _states:
        _states[group] = DDPState(state)
    return _states[group]


_states: dict[object, DDPState] = {}
"""Of hooks that were registered without a state of their own, by process group."""
