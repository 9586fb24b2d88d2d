"""`share_out`: each rank keeps a part of every parameter, and a module has the wholes while it runs, and no longer.

    forward of a module     gather the parts  | run on the wholes | let go of them
    backward                gather them again | ...               | sum the gradients to the ranks that keep the parts

Gathering is an operation of autograd, whose backward is the sum, so gradients add up over micro-batches, tied and used
again as any others do. What autograd saves of a whole is a note that says where it was; the whole is gathered again
when the first of a call's notes is read, and goes with the last of them. The parameters are the objects that they were,
of smaller shapes, so that an optimizer made before steps the parts.

Source: Rajbhandari et al., *ZeRO* (2020), section 5.3; Zhang et al., *SimpleFSDP* (2024), for gathering as an operation
whose result is made again in backward.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from tulle.comm import all_gather_parts, all_to_all_parts
from tulle.errors import GradientError, ModelError
from tulle.memory.shard import Shard, mark, shard_of
from tulle.mesh import Axis

_autograd: Any = vars(torch._C)["_autograd"]
_UNIT = "_tulle_shared_out"
"""The attribute by which a module holds what is gathered when it runs."""
_SHARDS = "_tulle_shards"
"""The attribute by which a module holds how its own parameters are cut."""
_gives_parts: ContextVar[bool] = ContextVar("gives parts", default=False)


def share_out(model: nn.Module, axis: Axis, units: Collection[str], *, leave: Collection[int] = ()) -> dict[str, Shard]:
    """Share the parameters of some modules out over an axis, in place. Every rank of it must call it, alike.

    Gradients are means over the axis afterwards. `state_dict` is whole, and takes whole ones: every rank of the axis
    must call it.

    Args:
        model: With the same values on every rank of the axis.
        axis: `mesh["data"]`, say.
        units: Names of the modules whose parameters are gathered together when they run, `""` for the model; a
            parameter goes with the innermost around it, and stays as it is if there is none.
        leave: Identities of parameters that stay as they are.

    Returns:
        How each parameter that is shared out is cut, by its names in the model.

    Raises:
        ModelError: If the forward of one of the modules was set on the object.

    Example:
        >>> import torch, tulle
        >>> model = torch.nn.Linear(4, 4)
        >>> sorted(share_out(model, tulle.init(data=-1)["data"], [""]))
        ['bias', 'weight']
    """
    cuts = {id(p): cut for p in model.parameters() if id(p) not in leave and (cut := _cut(p, axis)) is not None}
    found: dict[str, Shard] = {}
    members: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        around = [unit for unit in units if not unit or name.startswith(f"{unit}.")]
        if id(parameter) in cuts and around:
            found[name] = cuts[id(parameter)]
            unit = max(around, key=len)
            members.setdefault(unit, []).append(name[len(unit) + 1 :] if unit else name)
    for name in members:
        if "forward" in model.get_submodule(name).__dict__:
            raise ModelError(
                f"{name or type(model).__name__!r} has a forward of its own, which was set on the object, so that "
                "nothing could be gathered before it runs: define it in a class"
            )
    for name, shard in found.items():
        _cut_in_place(model, name, shard)
    for name, within in members.items():
        module = model.get_submodule(name)
        numbers: dict[int, int] = {}
        places = tuple(
            (path, own, numbers.setdefault(id(module.get_parameter(member)), len(numbers)))
            for member in within
            for path, _, own in [member.rpartition(".")]
        )
        shards = tuple(cuts[identity] for identity in numbers)
        module.__dict__[_UNIT] = Unit(name or type(model).__name__, axis, shards, places)
        object.__setattr__(module, "__class__", _shared_out(type(module)))
    return found


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
        for name, shard in module.__dict__.get(_SHARDS, {}).items()
    }


@contextmanager
def state_of_shards() -> Iterator[None]:
    """Within this context `state_dict()` gives this rank's parts of what is shared out, and sends nothing."""
    token = _gives_parts.set(True)
    try:
        yield
    finally:
        _gives_parts.reset(token)


@dataclass(frozen=True, slots=True)
class Unit:
    """Parameters that are gathered together when a module runs.

    Args:
        name: Of the module.
        axis: Over which they are shared out.
        shards: How each is cut.
        places: Where each is: the path of a module from the unit's, the name in it, and the number of the shard. A tied
            parameter has several.
    """

    name: str
    axis: Axis
    shards: Sequence[Shard]
    places: Sequence[tuple[str, str, int]]

    def gather(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """The wholes, in memory of their own. Every rank of the axis must call it."""
        wholes: dict[int, Tensor] = {}
        for numbers in _by_dtype(parts):
            own = torch.cat([parts[number].detach().reshape(-1) for number in numbers])
            sizes = [[self.shards[number].size_on(rank) for number in numbers] for rank in range(self.axis.size)]
            gathered = all_gather_parts(own, [sum(of_rank) for of_rank in sizes], self.axis, label="parameters").wait()
            pieces = gathered.split([size for of_rank in sizes for size in of_rank])
            for place, number in enumerate(numbers):
                shard, of_ranks = self.shards[number], pieces[place :: len(numbers)]
                shaped = [piece.view(shard.shape_on(rank)) for rank, piece in enumerate(of_ranks)]
                wholes[number] = torch.cat(shaped, shard.dim)
        return [wholes[number] for number in range(len(parts))]

    def reduce(self, gradients: Sequence[Tensor | None], parts: Sequence[Tensor]) -> list[Tensor | None]:
        """Of the means of all ranks' gradients this rank's parts; None where no rank has one. Every rank must call it.

        A flag for each parameter travels along, so that one which no rank used keeps none, as in one process.
        """
        reduced: list[Tensor | None] = [None] * len(parts)
        trained = [number for number, part in enumerate(parts) if part.requires_grad]
        for group in _by_dtype([parts[number] for number in trained]):
            numbers = [trained[place] for place in group]
            *means, any_used = self._sum(numbers, gradients, parts[numbers[0]])
            for number, mean, used in zip(numbers, means, any_used.tolist(), strict=True):
                if used:
                    reduced[number] = mean.view(self.shards[number].local_shape) / self.axis.size
        return reduced

    def _sum(self, numbers: Sequence[int], gradients: Sequence[Tensor | None], like: Tensor) -> Sequence[Tensor]:
        """This rank's parts of the sums of some gradients, flat, and by how many ranks each was used."""
        flags = like.new_tensor([gradients[number] is not None for number in numbers])
        outgoing = [
            torch.cat([*(_for_rank(gradients[number], self.shards[number], rank, like) for number in numbers), flags])
            for rank in range(self.axis.size)
        ]
        sizes = [*(self.shards[number].size_on(self.axis.rank) for number in numbers), len(numbers)]
        lengths = [sum(sizes)] * self.axis.size
        incoming = all_to_all_parts(outgoing, lengths, self.axis, label="sharded gradients").wait()
        return incoming.view(self.axis.size, -1).sum(0).split(sizes)


@dataclass(slots=True, eq=False)
class _Call:
    """The wholes of one call of a unit's module, which come back when backward reads one, and go with its notes."""

    unit: Unit
    parts: Sequence[nn.Parameter]
    versions: Sequence[int]
    wholes: list[Tensor] = field(default_factory=list)

    @torch.no_grad()
    def whole(self, number: int) -> Tensor:
        if [part._version for part in self.parts] != list(self.versions):
            raise GradientError(
                f"parameters of {self.unit.name!r} were changed between its forward and its backward: step the "
                "optimizer after all backwards"
            )
        if not self.wholes:
            self.wholes = self.unit.gather(self.parts)
        return self.wholes[number]


@dataclass(frozen=True, slots=True)
class _Note:
    """What autograd saved instead of a view of a whole."""

    call: _Call
    number: int
    size: Sequence[int]
    stride: Sequence[int]
    offset: int

    def read(self) -> Tensor:
        return self.call.whole(self.number).as_strided(self.size, self.stride, self.offset)


@dataclass(frozen=True, slots=True)
class _Saved:
    """Another tensor that autograd saved; it does not look for changes of what went through our hands."""

    tensor: Tensor
    version: int

    def read(self) -> Tensor:
        if self.tensor._version != self.version:
            raise GradientError(
                f"a tensor of shape {list(self.tensor.shape)} that backward needs was changed in place after forward"
            )
        return self.tensor


class _Gather(torch.autograd.Function):
    """Parts to wholes; gradients of wholes to those of parts."""

    @staticmethod
    def forward(ctx: Any, unit: Unit, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.unit, ctx.parts = unit, parts
        ctx.set_materialize_grads(False)
        wholes = unit.gather(parts)
        ctx.mark_non_differentiable(*(w for w, p in zip(wholes, parts, strict=True) if not p.requires_grad))
        return tuple(wholes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (None, *ctx.unit.reduce(gradients, ctx.parts))


class _SharedOut(nn.Module):
    """What a module's class gains: its forward runs on the wholes."""

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """As before."""
        unit: Unit = self.__dict__[_UNIT]
        owners = [(self.get_submodule(path), name, number) for path, name, number in unit.places]
        by_number = {number: owner._parameters[name] for owner, name, number in owners}
        parts = [part for _, part in sorted(by_number.items()) if isinstance(part, nn.Parameter)]
        if len(parts) < len(unit.shards):  # called from within itself
            return super().forward(*arguments, **keywords)
        # As views: a function of parameters themselves is what a pipeline takes for an operation between its modules.
        views = [part.view_as(part) for part in parts]
        wholes: Sequence[Tensor] = _Gather.apply(unit, *views)
        with _in_place_of(owners, wholes), _noting(unit, parts, wholes):
            return super().forward(*arguments, **keywords)


@cache
def _shared_out(kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"SharedOut{kind.__name__}", (_SharedOut, kind), {"__module__": __name__})


@contextmanager
def _in_place_of(owners: Sequence[tuple[nn.Module, str, int]], wholes: Sequence[Tensor]) -> Iterator[None]:
    """Have modules see wholes where their parameters are."""
    before = [(owner, name, owner._parameters[name]) for owner, name, _ in owners]
    recurrent = {owner for owner, _, _ in owners if isinstance(owner, nn.RNNBase)}
    try:
        for owner, name, number in owners:
            owner._parameters[name] = wholes[number]  # pyright: ignore[reportArgumentType]
        for layer in recurrent:
            _follow(layer)
        yield
    finally:
        for owner, name, part in before:
            owner._parameters[name] = part
        for layer in recurrent:
            _follow(layer)


def _follow(layer: nn.RNNBase) -> None:
    """A recurrent layer keeps a list of its parameters besides."""
    layer._flat_weights = [layer._parameters.get(name) for name in layer._flat_weights_names]


@contextmanager
def _noting(unit: Unit, parts: Sequence[nn.Parameter], wholes: Sequence[Tensor]) -> Iterator[None]:
    """Have autograd save notes instead of wholes, and all else as it would have."""
    if not torch.is_grad_enabled():
        yield
        return
    outer: tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None
    outer = _autograd._top_saved_tensors_default_hooks(True)
    call = _Call(unit, parts, [part._version for part in parts])
    numbers = {whole.untyped_storage()._cdata: number for number, whole in enumerate(wholes)}

    def pack(tensor: Tensor) -> Any:
        number = numbers.get(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else None
        if number is not None and tensor.dtype == parts[number].dtype:
            return _Note(call, number, tensor.shape, tensor.stride(), int(tensor.storage_offset()))
        return outer[0](tensor) if outer is not None else _Saved(tensor, tensor._version)

    def unpack(packed: Any) -> Tensor:
        return packed.read() if isinstance(packed, _Note | _Saved) or outer is None else outer[1](packed)

    with saved_tensors_hooks(pack, unpack):
        yield


def _cut_in_place(model: nn.Module, name: str, shard: Shard) -> None:
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
        parameter.data = shard.part(parameter)


def _give_wholes(module: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
    for name, shard in module.__dict__[_SHARDS].items() if not _gives_parts.get() else ():
        if prefix + name in state:
            state[prefix + name] = shard.whole(state[prefix + name], label=f"state_dict {prefix + name}")


def _take_parts(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    for name, shard in module.__dict__[_SHARDS].items():
        value = state.get(prefix + name)
        if isinstance(value, Tensor) and value.shape == shard.shape:
            state[prefix + name] = shard.part(value)


def _cut(parameter: nn.Parameter, axis: Axis) -> Shard | None:
    return None if parameter.is_meta else Shard.of(parameter, axis)


def _by_dtype(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Numbers of tensors that can travel together."""
    groups: dict[torch.dtype, list[int]] = {}
    for number, tensor in enumerate(tensors):
        groups.setdefault(tensor.dtype, []).append(number)
    return list(groups.values())


def _for_rank(gradient: Tensor | None, shard: Shard, rank: int, like: Tensor) -> Tensor:
    """Of this rank's gradient of a whole what belongs to a rank, flat."""
    if gradient is None:
        return like.new_zeros(shard.size_on(rank))
    dense = gradient.to_dense() if gradient.layout != torch.strided else gradient
    return dense.narrow(shard.dim, shard.begin_on(rank), shard.length(rank)).reshape(-1).to(like.dtype)
