"""`share_out`: each rank keeps a part of every parameter, and a module has the wholes while it runs, and no longer.

    forward of a module     gather the parts  | run on the wholes | let go of them
    backward                gather them again | ...               | sum the gradients to the ranks that keep the parts

Gathering is an operation of autograd, whose backward is the sum, so gradients add up over micro-batches, tied and used
again as any others do. What is sent goes beside what computes: parameters ahead of it (`tulle.memory.ahead`), gradients
behind (`tulle.memory.arrivals`). The parameters are the objects that they were, of smaller shapes, so that an optimizer
made before steps the parts.

Source: Rajbhandari et al., *ZeRO* (2020), section 5.3; Zhang et al., *SimpleFSDP* (2024), for gathering as an operation
whose result is made again in backward.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.optim import Optimizer

from tulle.comm import eager
from tulle.derived import put_before
from tulle.errors import ModelError
from tulle.memory.ahead import EVALUATING, FORWARD, Ahead, sharing_within_hosts
from tulle.memory.arrivals import Arrival, in_pass
from tulle.memory.asked_for import asked_for, keep_in_mind
from tulle.memory.by_data import following
from tulle.memory.notes import Gathered, naming, noting
from tulle.memory.shard import Shard
from tulle.memory.unit import Unit
from tulle.memory.whole_states import cut_in_place
from tulle.mesh import Axis
from tulle.parts import is_transformed, part_of, present
from tulle.traits import has_forward, makes_weights

logger = logging.getLogger("tulle")

_UNIT, _AHEAD, _WITHIN = "_tulle_shared_out", "_tulle_ahead", "_tulle_within"
"""The attributes by which a module holds what is gathered when it runs, by what, and which units ran within it."""
_WHOLES = (
    "give torch.func.functional_call(model, wholes, ...) what tulle.full_state_dict(model, everywhere=True) gives, or "
    "leave full_shard out of the plan"
)


def share_out(
    model: nn.Module,
    axis: Axis,
    units: Collection[str],
    *,
    leave: Collection[int] = (),
    stay: Collection[str] = (),
    optimizers: Sequence[Optimizer] = (),
    within_hosts: bool = False,
) -> dict[str, Shard]:
    """Share the parameters of some modules out over an axis, in place. Every rank of it must call it, alike.

    Gradients are means over the axis afterwards. `state_dict` is whole, and takes whole ones: every rank of the axis
    must call it.

    Args:
        model: With the same values on every rank of the axis.
        axis: `mesh["data"]`, say.
        units: Names of the modules whose parameters are gathered together when they run, `""` for the model; a
            parameter goes with the innermost around it, and stays as it is if there is none, if TorchScript reads it,
            or if it is sparse (a graph's edges). One whose hooks make its weight goes with the next around it, too.
        leave: Identities of parameters that stay as they are.
        stay: Of the units those whose wholes stay from forward to backward: the model, which runs from end to end.
        optimizers: Over the parameters. Of state that they have, each rank keeps its part.
        within_hosts: Whether only the ranks of each host, as many on each, share them out among themselves, and hosts
            are replicas (FSDP's hybrid sharding).

    Returns:
        How each parameter that is shared out is cut, by its names in the model.

    Example:
        >>> import torch, tulle
        >>> model = torch.nn.Linear(4, 4)
        >>> sorted(share_out(model, tulle.init(data=-1)["data"], [""]))
        ['bias', 'weight']
    """
    stays_whole = {*leave, *_read_unseen(model, axis)}
    over = sharing_within_hosts(axis) if within_hosts else axis
    cuts = {id(p): cut for p in model.parameters() if id(p) not in stays_whole and (cut := _cut(p, over)) is not None}
    units = [unit for unit in units if not makes_weights(model.get_submodule(unit))]
    members = _members(model, units, cuts)
    ahead = Ahead(axis, within_hosts=within_hosts)
    gathered = {id(model.get_submodule(unit).get_parameter(name)) for unit, names in members.items() for name in names}
    named = model.named_parameters(remove_duplicate=False)
    found = {name: cuts[id(p)] for name, p in named if id(p) in gathered}
    for name, shard in found.items():
        cut_in_place(model, name, shard)
    for name, within in members.items():
        module = model.get_submodule(name)
        _share(module, _unit(module, name or type(model).__name__, within, cuts, ahead, stays=name in stay), ahead)
    for name, within in members.items():
        _share_inside(model.get_submodule(name), name, within, cuts, ahead)
    for name in found:
        ahead.follow(model.get_parameter(name))
    for optimizer in optimizers:
        _keep_parts(optimizer, {id(model.get_parameter(name)): shard for name, shard in found.items()})
    return found


def _read_unseen(model: nn.Module, axis: Axis) -> set[int]:
    """Identities of parameters that TorchScript reads, past what a module shows to Python: they stay whole."""
    scripted = [name for name, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
    if scripted and axis.rank == 0:
        logger.warning(
            "full_shard leaves the parameters of %r whole on every rank: TorchScript reads them by itself, so that "
            "they cannot be gathered for it. Give the module as it was before torch.jit to have them shared out",
            scripted[0],
        )
    return {id(parameter) for name in scripted for parameter in model.get_submodule(name).parameters()}


def _members(model: nn.Module, units: Collection[str], cuts: Mapping[int, Shard]) -> dict[str, list[str]]:
    """By unit, the names in it of the parameters that are gathered with it; of the model itself there may be none."""
    members: dict[str, list[str]] = {name: [] for name in units if not name}
    homes = {id(model.get_submodule(unit)): unit for unit in units}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        path = name.split(".")
        # Innermost first; a unit may be around a parameter by another of its names than the one that was given.
        lengths = range(len(path) - 1, -1, -1) if id(parameter) in cuts else ()
        around = (n for n in lengths if id(model.get_submodule(".".join(path[:n]))) in homes)
        if (length := next(around, None)) is not None:
            unit, member = homes[id(model.get_submodule(".".join(path[:length])))], ".".join(path[length:])
            if member not in members.setdefault(unit, []):
                members[unit].append(member)
    return members


def _unit(
    module: nn.Module, name: str, members: Sequence[str], cuts: Mapping[int, Shard], ahead: Ahead, **options: bool
) -> Unit:
    """Some of a module's parameters, by their names in it."""
    numbers: dict[int, int] = {}
    places = tuple(
        (path, own, numbers.setdefault(id(module.get_parameter(member)), len(numbers)))
        for member in members
        for path, _, own in [member.rpartition(".")]
    )
    return Unit(name, ahead.axis, tuple(cuts[identity] for identity in numbers), places, ahead.across, **options)


def _share_inside(
    module: nn.Module, name: str, members: Sequence[str], cuts: Mapping[int, Shard], ahead: Ahead
) -> None:
    """Have the modules inside of a unit's gather what they have of it, if they are called apart."""
    for path, inner in module.named_modules():
        below = [member[len(path) + 1 :] for member in members if member.startswith(f"{path}.")]
        if below and _UNIT not in inner.__dict__ and has_forward(inner):
            _share(inner, _unit(inner, f"{name}.{path}", below, cuts, ahead, is_apart=True), ahead)


def _share(module: nn.Module, unit: Unit, ahead: Ahead) -> None:
    """Have a module gather a unit when it is called."""
    module.__dict__.update({_UNIT: unit, _AHEAD: ahead, _WITHIN: {}})
    put_before(_SharedOut, module)


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """One call of a unit's module."""

    unit: Unit
    parts: Sequence[nn.Parameter]
    ahead: Ahead
    arrival: Arrival
    number: int
    """Of the call of a model that it belongs to."""
    what: str

    def gather(self) -> tuple[Tensor, ...]:
        return tuple(self.ahead.gather(self.unit, self.parts, self.what, call=self.number))

    def send(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Have gradients leave; what stands for them has shapes and no memory, for autograd to go on.

        Raises:
            ModelError: If they are to have gradients themselves.
        """
        if any(gradient is not None and gradient.requires_grad for gradient in gradients):
            raise ModelError(
                f"gradients of the parameters of {self.unit.name} were asked for with create_graph=True, but these are "
                "shared out over the ranks, and what adds their gradients up has none: train this model without "
                "full_shard"
            )
        self.arrival.expect(self.ahead.reduce(self.unit, gradients, self.parts))
        zeros: dict[torch.dtype, Tensor] = {}
        with torch._C.DisableTorchFunctionSubclass():  # parts, which are asked often
            for part in self.parts:
                if part.dtype not in zeros:
                    zeros[part.dtype] = part.new_zeros(())
            return [
                zeros[part.dtype].expand(shard.local_shape) if part.requires_grad else None
                for part, shard in zip(self.parts, self.unit.shards, strict=True)
            ]


class _Gather(torch.autograd.Function):
    """Parts to wholes; gradients of wholes leave for the parts."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *views: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        wholes = call.gather()
        with torch._C.DisableTorchFunctionSubclass():
            ctx.mark_non_differentiable(*(w for w, p in zip(wholes, call.parts, strict=True) if not p.requires_grad))
        return wholes

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (None, *ctx.call.send(gradients))


class _SharedOut(nn.Module):
    """What a module's class gains: its forward runs on the wholes."""

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """As before."""
        unit: Unit = self.__dict__[_UNIT]
        if unit.places:
            _, name, number = unit.places[0]
            _, given = _at(self, unit, *unit.places[0])
            if not unit.is_apart:  # a module that is also in what is around it, which runs, is gathered again
                given = part_of(given)
            if not isinstance(given, nn.Parameter):  # what is around it runs
                if not unit.is_apart:
                    _check_whole(given, unit.shards[number], name, unit)
                    if any(isinstance(_at(self, unit, *place)[1], nn.Parameter) for place in unit.places):
                        _refuse_some(unit)
                return super().forward(*arguments, **keywords)
        elif is_transformed():  # a pass is of no use to what is gathered for nobody, and takes no transform
            return super().forward(*arguments, **keywords)
        return _run(self, unit, partial(super().forward, *arguments, **keywords))


def _refuse_some(unit: Unit) -> NoReturn:
    raise ModelError(
        f"torch.func.functional_call was given some of the parameters of {unit.name!r} and not others, but full_shard "
        f"gathers all of them together, or none: {_WHOLES}"
    )


def _check_whole(given: Tensor, shard: Shard, name: str, unit: Unit) -> None:
    """Raise if `torch.func.functional_call` was given a part."""
    if given.shape == shard.local_shape and given.shape != shard.shape:
        raise ModelError(
            f"torch.func.functional_call was given this rank's part, {list(given.shape)}, for {name!r} of "
            f"{unit.name!r}, which full_shard has shared out over the ranks; expected was the whole, "
            f"{list(shard.shape)}: {_WHOLES}"
        )


def _refuse_transforms(module: nn.Module) -> None:
    """Raise within transforms of `torch.func`, which cannot gather."""
    if is_transformed():
        raise ModelError(
            f"a transform of torch.func (vmap, grad, jacrev, ...) was given a {type(module).__name__} whose parameters "
            f"full_shard has shared out over the ranks, which it cannot gather: {_WHOLES}"
        )


@eager
def _run(module: nn.Module, unit: Unit, forward: Callable[[], Any]) -> Any:
    if unit.places:
        _refuse_transforms(module)
    found = [(name, number, *_at(module, unit, path, name, number)) for path, name, number in unit.places]
    owners = [(owner, name, number) for name, number, owner, _ in found]
    by_number = {number: part_of(part) for _, number, _, part in found}
    parts = [part for _, part in sorted(by_number.items()) if isinstance(part, nn.Parameter)]
    if len(parts) < len(unit.shards):
        _refuse_some(unit)
    with in_pass(module.__dict__[_WITHIN]) as (whole, is_outermost):
        arrival, views = whole.views(unit, parts)
        what = FORWARD if torch.is_grad_enabled() else EVALUATING
        call = _Call(unit, parts, module.__dict__[_AHEAD], arrival, whole.number, what)
        asked = asked_for(parts)
        wholes: Sequence[Tensor] = _Gather.apply(call, *views) if len(asked) < len(parts) else ()
        keep_in_mind(wholes, parts)
        wholes = [asked[n] if n in asked else wholes[n] for n in range(len(parts))]
        if what == EVALUATING:
            for part, one in zip(parts, wholes, strict=True):
                one.requires_grad_(part.requires_grad)  # as a forward that looks finds its parameters
        gathered = Gathered(unit, parts, call.ahead, call.number, [w.detach() for w in wholes] if unit.stays else [])
        notes = nullcontext() if unit.is_apart else noting(gathered, wholes)
        follows = following(parts, wholes, unit.shards, call.ahead.drop)
        with _in_place_of(owners, wholes), present(parts, wholes), follows, naming("full_shard", module), notes:
            before = [_written(whole) for whole in wholes]
            result = forward()
        _write_back(call, wholes, before)
        if is_outermost:
            module.__dict__[_WITHIN] = whole.called
        return result


def _at(module: nn.Module, unit: Unit, path: str, name: str, number: int) -> tuple[nn.Module, Tensor]:
    """The module that has one of a unit's parameters, and what stands there: the part, or the whole within a call.

    Raises:
        ModelError: If it is neither, which would travel as what it is not.
    """
    try:
        owner = module.get_submodule(path)
        there = owner._parameters[name]
    except (AttributeError, KeyError):
        owner, there = module, None
    with torch._C.DisableTorchFunctionSubclass():
        is_another = isinstance(there, nn.Parameter) and there.shape != unit.shards[number].local_shape
    if there is None or is_another:
        raise ModelError(
            f"{f'{path}.{name}'.lstrip('.')!r} of {unit.name} was shared out by full_shard, and has been taken away or "
            "replaced by another parameter since: complete the model before it is distributed, write into the "
            "parameters that it has, by load_state_dict, or make a model that grows anew from "
            "tulle.full_state_dict(model, everywhere=True), and distribute that"
        )
    return owner, there


def _written(whole: Tensor) -> tuple[int, int]:
    """What is another after forward has written into a whole, or given it other memory (`weight.data = ...`)."""
    return whole._version, whole.data_ptr()


def _write_back(call: _Call, wholes: Sequence[Tensor], before: Sequence[tuple[int, int]]) -> None:
    """Have parts follow wholes into which forward wrote, alike on all ranks."""
    for number, (shard, part, whole) in enumerate(zip(call.unit.shards, call.parts, wholes, strict=True)):
        if _written(whole) != before[number]:
            _check_kind(call.unit, number, whole, part.dtype)
            part.data.copy_(shard.part(whole))  # unseen: of a pipeline other micro-batches wait for their backward
            call.ahead.drop()


def _check_kind(unit: Unit, number: int, whole: Tensor, dtype: torch.dtype) -> None:
    """Raise if forward has given a parameter another dtype or shape: the optimizer would go on with what it was."""
    shape = unit.shards[number].shape
    if whole.dtype != dtype or whole.shape != shape:
        name = next(f"{path}.{own}".lstrip(".") for path, own, place in unit.places if place == number)
        raise ModelError(
            f"the forward of {unit.name!r} has made its parameter {name!r} {whole.dtype} {list(whole.shape)}, where it "
            f"was {dtype} {list(shape)} when full_shard shared it out over the ranks: convert it before "
            "tulle.distribute, or leave full_shard out of the plan"
        )


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


def _cut(parameter: nn.Parameter, axis: Axis) -> Shard | None:
    return None if parameter.is_meta or parameter.layout != torch.strided else Shard.of(parameter, axis)


def _keep_parts(optimizer: Optimizer, shards: Mapping[int, Shard]) -> None:
    """Of what an optimizer remembers of parameters that were cut, keep this rank's parts."""
    for parameter in [key for key in optimizer.state if id(key) in shards]:
        state, shard = optimizer.state[parameter], shards[id(parameter)]
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == shard.shape:
                state[name] = shard.part(value)
