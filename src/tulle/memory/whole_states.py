"""The `state_dict` of modules whose parameters are shared out: it gives and takes wholes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tulle.comm import weighed
from tulle.errors import ModelError
from tulle.memory.ahead import Ahead, ahead_of
from tulle.memory.shard import Shard, mark, shard_of
from tulle.mesh import Axis
from tulle.parts import Assembled, CutOnce, Reduction, guard, load_part, one_whole, write_through
from tulle.traits import hold

_SHARDS = "_tulle_shards"
"""The attribute by which a module holds how its own parameters are cut."""
_gives_parts: ContextVar[bool] = ContextVar("gives parts", default=False)


@dataclass(frozen=True, slots=True)
class _SharedOut(CutOnce):
    """A parameter of which a rank has its share."""

    name: str
    shard: Shard
    parameter: ref[nn.Parameter]

    @property
    def dims(self) -> list[int]:
        """The one along which it is shared out."""
        return [self.shard.dim]

    @property
    def local_shape(self) -> Sequence[int]:
        """Of the share."""
        return self.shard.local_shape

    def refusal(self, taker: str) -> str:
        """Names the parameter, its shapes, and the mend."""
        return (
            f"{taker} was given {self.name!r} as if all of it were here, but full_shard shares it out: this rank has "
            f"{self.shard.local_shape} of {tuple(self.shard.shape)} while no module runs that it belongs to. Have the "
            "forward of the module that holds it do so, take it from model.state_dict() and give it back by "
            "model.load_state_dict, leave full_shard out of the plan, or take its .to_local(), this rank's part"
        )

    @property
    def shape(self) -> torch.Size:
        """Of what this rank computes with."""
        return self.shard.shape

    @property
    def axes(self) -> list[Axis]:
        """The one over which it is shared out."""
        return [self.shard.axis]

    @property
    def count(self) -> int:
        """Of all ranks."""
        return self.shard.shape.numel()

    def held(self) -> None:
        """Everywhere."""

    @property
    def layout(self) -> Hashable:
        """Where it is cut."""
        return self.shard.axis.name, self.shard.dim, tuple(self.shard.shape)

    def over(self, number: Tensor, op: Reduction) -> Tensor:
        """Over the axis; a rank that is alone with it is told by name."""
        ahead = self._ahead()
        if ahead is None:
            raise ModelError(
                f"one number of all of {self.name!r} was asked of a copy, but the model that it was copied from is "
                "gone: keep that as long as the copy"
            )
        whole = ahead.number(number.detach(), op, self.name)
        return weighed(_Made.apply(number, whole), self.shard.axis) if number.requires_grad else whole

    def assemble(self, part: Tensor, dim: int) -> Assembled | None:
        """With a gradient: the mean of the ranks'. None of a copy whose model is gone."""
        ahead, shape = self._ahead(), [*part.shape]
        if ahead is None:
            return None
        shape[dim] = self.shard.shape[self.shard.dim]
        shard = replace(self.shard, dim=dim, shape=torch.Size(shape))
        return _GatheredApart.apply(part, ahead, shard, self.name), shard.part

    def _ahead(self) -> Ahead | None:
        parameter = self.parameter()
        return None if parameter is None else ahead_of(parameter)

    def refusal_of_gradient(self) -> None:
        """That of the part is given."""


class _GatheredApart(torch.autograd.Function):
    """A part to the whole, outside of the modules that it belongs to; the gradient is the mean, as theirs are."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, ahead: Ahead, shard: Shard, name: str) -> Tensor:
        ctx.ahead, ctx.of = ahead, (shard, name)
        return ahead.whole(part, shard, name, "what takes all of it")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.ahead.mean(gradient, *ctx.of), None, None, None


class _Made(torch.autograd.Function):
    """What a number of the whole was made of: the gradient goes to this rank's number as it is."""

    @staticmethod
    def forward(ctx: Any, number: Tensor, whole: Tensor) -> Tensor:
        return whole.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient, None


def named_shards(model: nn.Module) -> dict[str, Shard]:
    """How each parameter that is shared out is cut, by all its names in the model.

    Example:
        >>> import torch
        >>> named_shards(torch.nn.Linear(2, 3))
        {}
    """
    return {
        f"{path}.{name}" if path else name: shard
        for path, module in model.named_modules(remove_duplicate=False)
        for name, shard, _ in _shards_in(module)
    }


def _shards_in(module: nn.Module) -> Iterator[tuple[str, Shard, nn.Parameter]]:
    """How a module's own parameters are cut, but for those that others have taken the place of: these are whole."""
    for name, shard in module.__dict__.get(_SHARDS, {}).items():
        parameter = module._parameters.get(name)
        if parameter is not None and parameter.shape == shard.local_shape:
            yield name, shard, parameter


@contextmanager
def state_of_shards() -> Iterator[None]:
    """Within this context `state_dict()` gives this rank's parts of what is shared out, and sends nothing."""
    token = _gives_parts.set(True)
    try:
        yield
    finally:
        _gives_parts.reset(token)


def cut_in_place(model: nn.Module, name: str, shard: Shard) -> None:
    """Have a parameter be this rank's part, and the `state_dict` of the module that has it give and take wholes."""
    path, _, own = name.rpartition(".")
    module = model.get_submodule(path)
    if _SHARDS not in module.__dict__:
        module.__dict__[_SHARDS] = {}
        handle = module.register_state_dict_post_hook(_give_wholes)
        hooks = cast("OrderedDict[int, Any]", module._state_dict_hooks)
        hooks.move_to_end(handle.id, last=False)  # before they are put together over other axes
        module.register_load_state_dict_pre_hook(_take_parts)
    module.__dict__[_SHARDS][own] = shard
    parameter = model.get_parameter(name)
    if shard_of(parameter) is None:  # not by another of its names
        mark(parameter, shard)
        parameter.grad = None
        hold(parameter, shard.part(parameter))
        guard(parameter, _SharedOut(name, shard, ref(parameter)))


def _give_wholes(module: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
    for name, shard, parameter in _shards_in(module) if not _gives_parts.get() else ():
        if (key := prefix + name) in state:
            one_whole(parameter, state, key, partial(_whole, parameter, state[key], shard, key))


def _whole(parameter: nn.Parameter, part: Tensor, shard: Shard, key: str) -> Tensor:
    ahead = ahead_of(parameter)
    whole = shard.whole(part, label=f"state_dict {key}") if ahead is None else ahead.whole(part, shard, key)
    return write_through(whole, part, shard.part)


def _take_parts(module: nn.Module, state: dict[str, Any], prefix: str, *others: Any) -> None:
    for name, shard, part in _shards_in(module):
        load_part(part, prefix + name, state, others[-1], shape=shard.shape, take=shard.part)
