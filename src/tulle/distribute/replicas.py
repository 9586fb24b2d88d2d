"""`Replicas`: data parallelism of a model that other axes split: torch's own clipping and scaling hear of all ranks.

What ranks of axis `model` hold whole stays the same on all, as long as they are given the same batch and draw the same
numbers. It is looked at now and then, as replicas along axis `data` are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim import Optimizer

from tulle.clip import Proxied, ProxyGradient, ProxyParameter, Spread
from tulle.comm import gather_values
from tulle.distribute.axes import Axes
from tulle.distribute.held import Held
from tulle.engine import DataParallel
from tulle.engine.alike import Alike
from tulle.engine.ends import NOT_RUNNING
from tulle.engine.slots import Slot
from tulle.memory import shard_of
from tulle.mesh import Axis
from tulle.parts import hook_arrival, whole_of
from tulle.plan import Memory
from tulle.tables import ShardGradient, gradient_of_part, split_of
from tulle.tensor_parallel import placements

_SAME = (
    "its ranks must be given the same batch (a sampler takes mesh['data'].size and mesh['data'].rank, not those of all "
    "processes), draw the same numbers (torch.manual_seed(seed + mesh['data'].rank)), and load, write and step alike. "
    "Of what is trained between layers that were selected by name, register the class"
)


class Replicas(DataParallel):
    """Keeps replicas in step, and makes one gradient of each optimizer a proxy for those of all ranks.

    Args:
        model: The model.
        axes: Of the mesh.
        optimizers: Over its parameters.
        memory: What is done to save some.
        options: Of `DataParallel`.
    """

    def __init__(
        self, model: nn.Module, axes: Axes, optimizers: Sequence[Optimizer], memory: Memory, **options: Any
    ) -> None:
        super().__init__(Held(model, only_replicas=True), axes.data, **options)
        held = Held(model)
        spread = Spread(tuple(axes.spreading(memory)), counts=False)
        # Gradients of shared parameters know all ranks' along axis `data`, and others are the same on all of these.
        self._proxies = _proxies(held, options["tables"], axes, spread, optimizers) if axes.splitting else []
        shared = {name: p for name, p in held.named_parameters() if shard_of(p) is not None}
        split = {id(model.get_parameter(name)) for name in placements(model)}
        self._parts = [one for one in held.parameters() if shard_of(one) is not None or id(one) in split]
        self._told: list[ref[Tensor]] = []
        """Gradients of parts of layers, which know at the moment that they are."""
        self._whole = _Whole(split, held, axes.model) if axes.model is not None else None
        self.tie(held, [*shared.values()])
        for name, parameter in shared.items():
            if parameter.requires_grad:
                hook_arrival(parameter, _shard_arrived(ref(self), name))
        if axes.data.size == 1 and axes.pipe is None:  # else each backward is followed to its end
            arrived = _marked_at_end(ref(self))
            for proxy in self._proxies:
                for parameter in proxy.parameters:
                    hook_arrival(parameter, arrived)

    def came(self, name: str, gradient: Tensor) -> None:
        """A gradient that others have kept in step is complete."""
        own = gradient.as_subclass(Tensor) if isinstance(gradient, ShardGradient) else gradient
        self._split_came(name, own)

    def end_backward(self) -> None:
        """All gradients are there."""
        have_travelled = bool(self.syncing)
        super().end_backward()
        self._tell_parts()
        if have_travelled:
            self.mark_proxies()
            self._check_whole()

    def _begin_backward(self) -> None:
        """Have gradients of parts of layers be plain for those that average them."""
        if self._told and torch._C._current_graph_task_id() != self._backward:
            for one in self._told:
                gradient = one()
                if gradient is not None and type(gradient) is ShardGradient:
                    object.__setattr__(gradient, "__class__", Tensor)
            self._told.clear()
        super()._begin_backward()

    def _tell_parts(self) -> None:
        """Let gradients of parts know that they are."""
        self._told.clear()
        for part in self._parts:
            gradient, whole = part.grad, whole_of(part)
            if gradient is None or whole is None or type(gradient) not in _TAKEN:
                continue
            if type(gradient) is Tensor:
                gradient_of_part(gradient, whole)
            if shard_of(part) is None:  # nobody averages what is shared out
                self._told.append(ref(gradient))

    def end_backward_alone(self) -> None:
        """All gradients are there, and nobody has averaged them."""
        self._tell_parts()
        self.mark_proxies()
        if self.syncing:
            self._check_whole()

    def _check_whole(self) -> None:
        if self._whole is not None:
            self._whole.check()

    def mark_proxies(self) -> None:
        """Make one gradient of each optimizer a proxy for all ranks'."""
        takes_norms = True
        for proxy in self._proxies:
            proxied = replace(proxy.proxied, takes_norms=takes_norms and proxy.proxied.takes_norms)
            if proxy.stand_in is not None:
                zero = torch.zeros(1, dtype=proxy.parameters[0].dtype, device=self.home.device)
                proxy.stand_in.set_gradient(zero, proxied)
            else:
                gradients = [p.grad for p in proxy.parameters if p.grad is not None]
                taken = [one for one in gradients if isinstance(one, ProxyGradient) or type(one) in _TAKEN]
                if not taken:
                    continue
                ProxyGradient.of(min(taken, key=_unlikely), proxied)
            takes_norms = takes_norms and not proxied.takes_norms


_TAKEN = (Tensor, ShardGradient)


class _Whole:
    """The parameters that ranks of axis `model` hold alike, as no layer of theirs is split.

    Args:
        split: Identities of those that are.
        held: What this rank has of the model.
        axis: The axis.
    """

    def __init__(self, split: Collection[int], held: nn.Module, axis: Axis) -> None:
        slots = {
            name: Slot(name, parameter)
            for name, parameter in held.named_parameters()
            if id(parameter) not in split and (parameter.is_floating_point() or parameter.is_complex())
        }
        self._parameters = [slot.parameter for slot in slots.values()]
        self._alike = Alike(slots, axis, mend=_SAME)
        self._backwards = 0

    def check(self) -> None:
        """At the end of a backward. Every rank of the axis must call it, and raises if some have other values."""
        self._backwards += 1
        self._alike.look((one for one in self._parameters if one.requires_grad), self._backwards)
        self._alike.check(self._backwards + 1, is_late=False)


def _unlikely(gradient: Tensor) -> int:
    """A proxy stays one; else the first gradient that is whole, if one is."""
    return 0 if isinstance(gradient, ProxyGradient) else 1 + isinstance(gradient, ShardGradient)


class _Seen(Sequence[Tensor]):
    """Parameters, for as long as somebody else holds them.

    For who is held by a gradient: its parameter holds that where no garbage collector sees it.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._seen = [ref(parameter) for parameter in parameters]

    def __len__(self) -> int:
        return len([*self])

    def __iter__(self) -> Iterator[Tensor]:
        return (parameter for one in self._seen if (parameter := one()) is not None)

    def __getitem__(self, index: Any) -> Any:
        return [*self][index]


@dataclass(frozen=True, slots=True)
class _Proxy:
    """What answers for one optimizer on this rank: the first gradient of some parameters, or that of a stand-in."""

    parameters: Sequence[nn.Parameter]
    stand_in: ProxyParameter | None
    proxied: Proxied


def _proxies(
    model: nn.Module, tables: Collection[str], axes: Axes, spread: Spread, optimizers: Sequence[Optimizer]
) -> list[_Proxy]:
    """A proxy for each optimizer that can have one on every rank. Every rank must call it."""
    held = _Seen([*model.parameters()])  # one that is frozen may be trained later
    known = {id(parameter) for parameter in held if parameter.requires_grad}
    sparse = {id(parameter) for name, parameter in model.named_parameters() if name in tables}
    found: list[tuple[str, Sequence[nn.Parameter]]] = []
    for optimizer in optimizers:
        stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        mine = [p for p in stepped if id(p) in known and split_of(p) is None]
        kinds = {
            "dense": [p for p in mine if id(p) not in sparse],
            "absent": [p for p in stepped if p.is_meta],
            "sparse": [p for p in mine if id(p) in sparse],
        }
        found.append(next(((kind, parameters) for kind, parameters in kinds.items() if parameters), ("none", [])))
    everywhere = gather_values([kind for kind, _ in found], axes.whole, label="optimizers")
    proxies: list[_Proxy] = []
    for (kind, parameters), heard in zip(found, zip(*everywhere, strict=True), strict=True):
        if "none" not in heard and set(heard) != {"absent"}:
            stand_in = ProxyParameter.of(parameters[0]) if kind == "absent" else None
            proxied = Proxied(spread, held, takes_norms="dense" in heard and "sparse" not in heard)
            proxies.append(_Proxy(parameters, stand_in, proxied))
    return proxies


def _shard_arrived(engine: ref[Replicas], name: str) -> Any:
    """The mean of all ranks' gradients is there; other gradients, and buffers, are at the end of this backward."""

    def begin_backward(parameter: Tensor) -> None:
        alive = engine()
        if alive is not None and parameter.grad is not None:
            alive.came(name, parameter.grad)

    return begin_backward


def _marked_at_end(engine: ref[Replicas]) -> Any:
    """Of each backward, once: to look through all gradients at each of them would take the square of their number."""
    followed = NOT_RUNNING

    def mark_proxies() -> None:
        alive = engine()
        if alive is not None:
            alive.end_backward_alone()

    def arrived(_: Tensor) -> None:
        nonlocal followed
        backward = torch._C._current_graph_task_id()
        if backward != followed:
            followed = backward
            Variable._execution_engine.queue_callback(mark_proxies)

    return arrived
