"""`profile`: what each module takes for one micro-batch, and what it reads of others, found on one process.

The model runs once on the sample, its modules placed at a stage each of a pipeline of one rank, which tells the bytes
that each reads of what others made. When a module's turn comes, its forward and backward are timed apart from the
others. A module without memory is lent some while it runs, so that the model need not fit.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tulle.comm import alone
from tulle.live import LiveBytes, looking_at_saved
from tulle.mesh import Axis
from tulle.parts import local_of, refuses_saved_hooks
from tulle.pipeline.attributes import own_attributes
from tulle.pipeline.calls import Calls, pieces_of, watch
from tulle.pipeline.carried import state_within
from tulle.pipeline.holdings import Holdings, Unit
from tulle.pipeline.homes import outward
from tulle.pipeline.hooks import is_hooked, users_aside
from tulle.pipeline.interception import run_in_this_thread
from tulle.pipeline.lent import lent
from tulle.pipeline.mailbox import Mailbox
from tulle.pipeline.objects import copied, mapped, objects_in
from tulle.pipeline.partition import Piece
from tulle.pipeline.placeholder import Placeholder
from tulle.pipeline.program import Program
from tulle.pipeline.randomness import forked
from tulle.pipeline.structure import flatten, is_atom
from tulle.pipeline.tape import Entry
from tulle.pipeline.trial import trial
from tulle.pipeline.unfit import refuse_lazy, refuse_scripted, refuse_sending
from tulle.pipeline.untouched import untouched
from tulle.pipeline.values import Values
from tulle.pipeline.written import written_back

PIECES_PER_STAGE = 8
"""A module that takes more than this part of a stage's share is cut further, if it can be."""
_REPEATS = 2


def profile(model: nn.Module, sample: object, axis: Axis, stages: int) -> tuple[list[Piece], Calls]:
    """Measure a model's modules on one micro-batch. For one rank; it sends nothing, and leaves the model as it is.

    Args:
        model: Not placed yet.
        sample: One micro-batch as the model is called with it: a mapping is passed as keywords, a tuple as positional
            arguments, anything else as the one argument.
        axis: Whose device the model is on.
        stages: For how many stages; more want smaller pieces.

    Returns:
        The pieces in the order in which they run, and the calls that were seen.

    Raises:
        ModelError: If a module is TorchScript's or lazy, or the forward puts other modules in place of some, or sends.
    """
    refuse_scripted(model)
    refuse_lazy(model)
    with untouched(model), written_back(model), lent(model, axis.device) as loans, forked(0):
        before = _kept_by(model)
        with refuse_sending(model):
            calls = watch(model, *as_call(sample, axis.device))
        # What runs as one on one rank can only be placed as one, and what it keeps is told to the others.
        calls.borrowers |= _not_whole(model, calls) | (_keeping(model, before) - calls.asking)
        largest = (calls.time_s.get("") or sum(calls.time_s.values())) / (stages * PIECES_PER_STAGE)
        names = pieces_of(model, calls, calls.time_s, largest)
        return _measured(model, names, as_call(sample, axis.device), alone(axis), loans), calls


def as_call(sample: object, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments and keywords that a sample stands for, on a device; copies, for models write in what they get."""
    moved: dict[int, Any] = {}

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or isinstance(leaf, nn.Parameter):
            return leaf
        if id(leaf) not in moved:
            moved[id(leaf)] = local_of(leaf).to(device, copy=True).requires_grad_(leaf.requires_grad)
        return moved[id(leaf)]

    given = copied(sample, move)
    if isinstance(given, Mapping):
        return (), {str(name): value for name, value in given.items()}
    return (given if isinstance(given, tuple) else (given,)), {}


def _measured(
    model: nn.Module,
    names: Sequence[str],
    call: tuple[tuple[Any, ...], dict[str, Any]],
    axis: Axis,
    loans: Collection[int],
) -> list[Piece]:
    weighed = [_Weighed(model.get_submodule(name), loans) for name in names]
    incoming: list[dict[int, int]] = [{} for _ in names]
    seen: set[tuple[int, int]] = set()
    kept: list[Placeholder] = []

    def read(placeholder: Placeholder, stage: int) -> None:
        if placeholder.stage < stage and (id(placeholder), stage) not in seen:
            seen.add((id(placeholder), stage))
            kept.append(placeholder)
            size = placeholder.described().nbytes
            incoming[stage][placeholder.stage] = incoming[stage].get(placeholder.stage, 0) + size

    holdings = Holdings(Mailbox(axis))
    program = Program(Values(0, holdings, _never, "the profile"), holdings, seed=0, read=read)
    units = [
        Unit(name, model.get_submodule(name), stage, compiled=one)
        for stage, (name, one) in enumerate(zip(names, weighed, strict=True))
    ]
    with _intercepted(program, units, model), run_in_this_thread(program):
        model(*call[0], **call[1])
    return [
        Piece(unit.name, one.time_s, one.parameter_bytes, one.activation_bytes, incoming[unit.stage])
        for unit, one in zip(units, weighed, strict=True)
    ]


def _never(*_: object) -> None:
    raise AssertionError("one rank has nothing to wait for")


@contextmanager
def _intercepted(program: Program, units: Sequence[Unit], model: nn.Module) -> Iterator[None]:
    modules = [model.get_submodule(unit.name) for unit in units]
    before = [module._compiled_call_impl for module in modules]

    def bound(unit: Unit) -> Any:
        return lambda *args, **kwargs: program.call_unit(unit, args, kwargs)

    try:
        for module, unit in zip(modules, units, strict=True):
            module._compiled_call_impl = bound(unit)
        yield
    finally:
        for module, one in zip(modules, before, strict=True):
            module._compiled_call_impl = one


def _not_whole(model: nn.Module, calls: Calls) -> set[str]:
    """Modules that cannot live at one stage with all that is in them.

    What hooks remember is to be on all ranks, so that what they are on runs between others. And what is called past the
    module that it is in, as a table of embeddings by the model around a language model, may live elsewhere.
    """
    hooked = [name for name, module in model.named_modules() if is_hooked(module)]
    around_hooked = {outer for name in hooked for outer in outward(name)[1:]}
    trained = [name for name in calls.chains if next(model.get_submodule(name).parameters(), None) is not None]
    past = {
        outer for name in trained for outer in outward(name)[1:] if any(outer not in on for on in calls.chains[name])
    }
    return around_hooked | past


def _keeping(model: nn.Module, before: Mapping[str, Mapping[str, object]]) -> set[str]:
    """Modules whose forward keeps numbers on themselves, such as a loss of experts, and those around them.

    What they keep is read by others, and so must be there on all ranks: their code runs between modules.
    """
    now = _kept_by(model)
    keeping = {
        name
        for name, module in model.named_modules()
        for attribute, value in own_attributes(module).items()
        if now[name][attribute] != before.get(name, {}).get(attribute) and any(map(_is_number, _leaves_in(value)))
    }
    return {outer for name in keeping for outer in (name, *outward(name))}


def _kept_by(model: nn.Module) -> dict[str, dict[str, object]]:
    return {
        name: {attribute: state_within(value) for attribute, value in own_attributes(module).items()}
        for name, module in model.named_modules()
    }


def _leaves_in(value: object) -> Sequence[object]:
    given = objects_in(value)
    return flatten(value)[0] if given is None else given.leaves


def _is_number(leaf: object) -> bool:
    if isinstance(leaf, Tensor):
        return leaf.is_floating_point()
    return isinstance(leaf, int | float) and not isinstance(leaf, bool)


class _Weighed:
    """A module's call, which weighs it. Hooks of the user run once, for they may count."""

    def __init__(self, module: nn.Module, loans: Collection[int]) -> None:
        self._module = module
        self._loans = loans  # storages of parameters that are lent, which are no activations either
        self.time_s, self.activation_bytes = 0.0, 0
        self.parameter_bytes = sum(parameter.nbytes for parameter in module.parameters())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, timed apart first."""
        leaves = flatten((args, kwargs))[0]
        with users_aside(self._module.modules()):
            weighed = self._weighed(args, kwargs)
        self.time_s += fmean(time_s for time_s, _ in weighed)
        self.activation_bytes += weighed[0][1]
        given = objects_in((args, kwargs))
        leaves = leaves if given is None else given.leaves
        needs_grad = any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves)
        needs_grad = needs_grad or any(parameter.requires_grad for parameter in self._module.parameters())
        result = trial(lambda: self._module._call_impl(*args, **kwargs))
        if not needs_grad:
            return result
        # What follows is to know that a gradient would come, not to keep what it would need.
        before = set(map(id, leaves))
        made = lambda leaves: [leaf if id(leaf) in before else _as_if_trained(leaf) for leaf in leaves]  # noqa: E731
        if given is not None:
            mapped(given.objects, made)
        return mapped(result, made)

    def _weighed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[float, int]]:
        try:
            return [self._weigh(*copied((args, kwargs), _apart)) for _ in range(_REPEATS)]
        except RuntimeError as error:
            if not refuses_saved_hooks(error):
                raise
        return [self._weigh(*copied((args, kwargs), _apart), looks=False) for _ in range(_REPEATS)]

    def _weigh(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, looks: bool = True) -> tuple[float, int]:
        """Seconds of forward and backward, and bytes kept between: what autograd saves, or else all that is there."""
        module = self._module
        here = [parameter for parameter in module.parameters() if not parameter.is_meta]
        parameters = {parameter.untyped_storage()._cdata for parameter in here}
        kept: dict[int, int] = {}

        def note(tensor: Tensor) -> None:
            storage = tensor.untyped_storage()
            if storage._cdata not in parameters and storage._cdata not in self._loans:
                kept[storage._cdata] = storage.nbytes()

        live = LiveBytes(here[0].device.type if here else "cpu")
        begin_s = time.perf_counter()
        with torch.enable_grad(), looking_at_saved(note) if looks else live:
            results = flatten(module._call_impl(*args, **kwargs))[0]
        kept_bytes = sum(kept.values()) if looks else live.now_bytes
        ends = [result for result in results if isinstance(result, Tensor) and result.requires_grad]
        if ends:
            torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])
        return time.perf_counter() - begin_s, kept_bytes


def _apart(leaf: Any) -> Any:
    """A tensor of its own, so that what a module does with it does not count for others."""
    if isinstance(leaf, Placeholder):  # the module may read it, or not
        return leaf
    if isinstance(leaf, Tensor):
        copied = local_of(leaf).clone()
        return Entry(copied).tensor() if leaf.requires_grad else copied  # no leaf of autograd: modules write in it
    if is_atom(leaf) or isinstance(leaf, nn.Module):
        return leaf
    with _TensorsApart(), suppress(Exception):  # not everything can be copied, such as a lock
        return copy.deepcopy(leaf)  # such as a cache of keys and values, to which modules add
    return leaf


class _TensorsApart(TorchFunctionMode):
    """Within it `copy.deepcopy` takes tensors that were computed, too."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        return tensor if isinstance(tensor, Placeholder) else memo.setdefault(id(tensor), _apart(tensor))


def _as_if_trained(leaf: Any) -> Any:
    is_tensor = isinstance(leaf, Tensor) and not isinstance(leaf, Placeholder)
    return Entry(leaf).tensor() if is_tensor and leaf.is_floating_point() else leaf
