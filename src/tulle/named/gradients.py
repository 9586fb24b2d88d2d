"""`Gradients`: the gradients of parameters are summed over mesh axes late and together, beside the rest of backward.

An operation's input enters through *f*, an all-reduce in backward. A parameter has nothing behind it that would wait
for this sum, so it is put off: gradients are laid end to end in buckets, one sequence of them for each set of axes,
and each bucket is summed by one all-reduce while backward goes on. The last ones are waited for at the end.

    uses of w in one step     axes that split the use, but not w     what is done
    the first that is split   {data}                                 put off: the sum over {data} comes at the end
    another                   {data, model}                          f over {model}, and the rest with the first
    another, or one before    {}                                     equal on all ranks of data: its share, 1 / size

`torch.autograd.grad` has no end at which to sum: what it asks for is summed at once.

Source: Li et al., *PyTorch Distributed* (VLDB'20, section 3.2), gradient bucketing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor, nn

from tulle.comm import Deferred
from tulle.named.wire import Wire

FIRST_BUCKET_BYTES = 1024 * 1024
"""The first bucket of a backward is sent when it has so many bytes, so that the network has something to do early."""
BUCKET_BYTES = 25 * 1024 * 1024
"""A further bucket of so many bytes is sent without waiting for more (both are DDP's choices too)."""
LABEL = "named parameter gradients"
Axes = tuple[str, ...]


@dataclass(slots=True)
class _Filling:
    """A bucket that is not sent yet."""

    parameters: list[nn.Parameter] = field(default_factory=list)
    size_bytes: int = 0

    def add(self, parameter: nn.Parameter) -> None:
        """Put one more gradient into it."""
        self.parameters.append(parameter)
        self.size_bytes += parameter.nbytes


@dataclass(slots=True)
class _Bucket:
    parameters: list[nn.Parameter]
    pending: Deferred[Tensor]


@dataclass(slots=True, eq=False)
class Gradients:
    """The put-off sums of one scope's parameters. Every rank uses the same parameters in the same order.

    Args:
        wire: What sums them; None where nothing is split.
        bucket_bytes: Size at which a bucket is sent.
        first_bucket_bytes: Size at which the first of each backward is sent.
    """

    wire: Wire | None
    bucket_bytes: int = BUCKET_BYTES
    first_bucket_bytes: int = FIRST_BUCKET_BYTES
    is_held: bool = False
    """Whether gradients gather on each rank without being summed, as between micro-batches."""
    _unsummed: dict[nn.Parameter, Axes] = field(default_factory=dict)
    """Parameters whose gradient is this rank's part of a sum."""
    _before: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    """What earlier backwards had left, summed already."""
    _open: dict[tuple[Any, ...], _Filling] = field(default_factory=dict)
    _sent: list[_Bucket] = field(default_factory=list)
    _task: int = -1

    def follow(self, parameter: nn.Parameter, axes: Axes) -> list[Any]:
        """Sum a parameter's gradient over some axes at the end of each backward; gives the hooks that do."""
        own = ref(parameter)  # no collector sees that a parameter is held by its own hooks
        return [
            parameter.register_hook(lambda gradient: self._set_apart(cast("nn.Parameter", own()), axes, gradient)),
            parameter.register_post_accumulate_grad_hook(lambda parameter: self._arrive(parameter, axes)),
        ]

    @contextmanager
    def held(self) -> Iterator[None]:
        """Within the block, gradients gather on each rank; the first backward after it sums them all."""
        self.is_held = True
        try:
            yield
        finally:
            self.is_held = False

    def _set_apart(self, parameter: nn.Parameter, axes: Axes, gradient: Tensor | None) -> Tensor | None:
        if gradient is None:  # backward of a gradient may come to a parameter on which that does not depend
            return None
        if not _is_accumulated(parameter):
            assert self.wire is not None, "sums are put off only where something is split"
            return self.wire.leave(gradient, axes, LABEL)
        if parameter.grad is None:
            self._before.pop(parameter, None)
        elif parameter not in self._unsummed:
            self._before[parameter], parameter.grad = parameter.grad, None
        self._unsummed[parameter] = axes
        return None

    def _arrive(self, parameter: nn.Parameter, axes: Axes) -> None:
        self._await_the_end()
        if self.is_held or parameter not in self._unsummed:
            return
        filling = self._put(parameter, axes)
        enough_bytes = self.bucket_bytes if self._sent else self.first_bucket_bytes
        if filling.size_bytes >= enough_bytes:
            del self._open[_kind(parameter, axes)]
            self._send(filling.parameters, axes)

    def _put(self, parameter: nn.Parameter, axes: Axes) -> _Filling:
        filling = self._open.setdefault(_kind(parameter, axes), _Filling())
        filling.add(parameter)
        return filling

    def _await_the_end(self) -> None:
        """Have `_finish` called at the end of this backward; what one that failed has left is forgotten."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            self._open.clear()
            self._sent.clear()
            queue = cast(
                "Callable[[Callable[[], None]], None]", torch.autograd.Variable._execution_engine.queue_callback
            )
            queue(self._finish)

    def _send(self, parameters: list[nn.Parameter], axes: Sequence[str]) -> None:
        assert self.wire is not None, "sums are put off only where something is split"
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        self._sent.append(_Bucket(parameters, self.wire.start_sum(flat, axes, LABEL)))

    @torch.no_grad()
    def _finish(self) -> None:
        self._task = -1
        if self.is_held:
            return
        self._open_the_rest()
        for (axes, *_), filling in self._open.items():
            self._send(filling.parameters, axes)
        for bucket in self._sent:
            parts = bucket.pending.wait().split([parameter.numel() for parameter in bucket.parameters])
            for parameter, part in zip(bucket.parameters, parts, strict=True):
                before = self._before.pop(parameter, None)
                summed = part.view(parameter.shape)
                parameter.grad = summed if before is None else before.add_(summed)
        self._unsummed.clear()
        self._open.clear()
        self._sent.clear()

    def _open_the_rest(self) -> None:
        """Take in the parameters that had gradients in held backwards only."""
        under_way = {id(one) for filling in self._open.values() for one in filling.parameters}
        under_way |= {id(one) for bucket in self._sent for one in bucket.parameters}
        for parameter, axes in self._unsummed.items():
            if id(parameter) not in under_way and parameter.grad is not None:
                self._put(parameter, axes)


def _kind(parameter: nn.Parameter, axes: Axes) -> tuple[Any, ...]:
    """What gradients of one bucket have in common."""
    return axes, parameter.dtype, parameter.device


def _is_accumulated(parameter: nn.Parameter) -> bool:
    """Whether the backward that runs leaves the gradient at the parameter; else `torch.autograd.grad` gives it back."""
    try:
        return torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(parameter).node)
    except RuntimeError:  # torch says so of leaves whose gradients are given back
        return False


class Leaf:
    """A parameter under one scope: how it enters operations, and where the sum of its gradient is put off to.

    Args:
        parameter: This rank's part.
        gradients: The scope's.
    """

    __slots__ = ("_gradients", "_hooks", "_put_off", "parameter")

    def __init__(self, parameter: nn.Parameter, gradients: Gradients) -> None:
        self.parameter = parameter
        self._gradients = gradients
        self._put_off: Axes = ()
        self._hooks: list[Any] = []

    def entered(self, axes: Axes, label: str) -> Tensor:
        """The parameter as it enters an operation that further axes split; the first such settles what is put off."""
        wire = self._gradients.wire
        if wire is None or not (self.parameter.requires_grad and torch.is_grad_enabled()):
            return self.parameter
        if axes and not self._put_off:
            self._put_off = axes
            self._hooks = self._gradients.follow(self.parameter, axes)
        if axes and axes == self._put_off:
            return self.parameter
        further = tuple(axis for axis in axes if axis not in self._put_off)
        entered = wire.enter(self.parameter, further, label) if further else self.parameter
        return cast("Tensor", _Share.apply(entered, partial(self._share, axes)))

    def _share(self, axes: Axes, gradient: Tensor) -> Tensor:
        """What a use's gradient, equal on all ranks of the axes that do not split it, gives to the sum over them."""
        wire = self._gradients.wire
        assert wire is not None, "gradients are shared where something is split"
        alike = tuple(axis for axis in self._put_off if axis not in axes)
        if not alike:
            return gradient
        return wire.enter(gradient, alike, LABEL) / math.prod(wire.sizes[axis] for axis in alike)

    def __deepcopy__(self, memo: dict[int, Any]) -> Leaf:
        """That of the parameter's copy, which nobody follows yet."""
        copied = deepcopy(self.parameter, memo)
        if "clipped_with" in vars(self.parameter):
            vars(copied)["clipped_with"] = vars(self.parameter)["clipped_with"]
        return Leaf(copied, self._gradients)

    def close(self) -> None:
        """Have nothing more to do with the parameter."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._put_off = [], ()


class PlainLeaf(Leaf):
    """The leaf of a plain module's parameter, kept by the parameter: whoever uses it puts its sum off to one place."""

    __slots__ = ()

    @classmethod
    def of(cls, parameter: nn.Parameter, gradients: Gradients) -> PlainLeaf:
        """The parameter's own under a scope; of one scope at a time."""
        leaf = getattr(parameter, _LEAF, None)
        if not isinstance(leaf, cls) or leaf._gradients is not gradients:
            if isinstance(leaf, cls):
                leaf.close()
            leaf = cls(parameter, gradients)
            setattr(parameter, _LEAF, leaf)
        return leaf

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        """A pickled parameter is a plain one."""
        return type(None), ()


_LEAF = "_tulle_leaf"


class _Share(torch.autograd.Function):
    """Identity whose gradient is scaled, by what is known when it comes: a later use may settle what is put off."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, share: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.share = share
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.share(gradients[0]), None
