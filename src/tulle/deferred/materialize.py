"""`deferred_init` and `materialize`: build a model without memory; give it the values that one process would have.

Source: torchdistX's *deferred module initialization* (Meta AI, 2022), which did not keep the stream of random numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from tulle.comm import gather_values, raise_together
from tulle.deferred.give import give, swappable
from tulle.deferred.needs import needed_calls
from tulle.deferred.record import Record, View, record_of, was_changed
from tulle.deferred.replay import Giver, Replay, Taker
from tulle.errors import ModelError
from tulle.mesh import Axis
from tulle.traits import attribute_of


@contextmanager
def deferred_init() -> Iterator[None]:
    """A context in which a model is built without memory: its parameters are on device `meta`, for the time being.

    The operations that would fill them are recorded. `tulle.distribute` (or `materialize`, or `pipeline.place`) carries
    them out later, on each rank for what that rank is to hold, and with the random numbers of a model that is built at
    once: draw no others in between. All ranks must build the same model from the same seed; nothing is sent.

    Raises:
        ModelError: If the model reads a number of a tensor while it is built, if torch is seeded or draws for real
            between two of its random numbers, or if a tensor of one such context is changed within another.

    Example:
        >>> import torch, tulle
        >>> with tulle.deferred_init():
        ...     model = torch.nn.Embedding(1_000_000_000, 1024)
        >>> model.weight.is_meta
        True
    """
    with Record():
        yield


def is_deferred(model: nn.Module | Tensor) -> bool:
    """Whether a tensor, or some of a model's parameters or buffers, have no values yet."""
    if isinstance(model, Tensor):
        return model.is_meta or record_of(model) is not None
    return any(map(is_deferred, _tensors(model).values()))


def materialize(
    model: nn.Module,
    *,
    device: torch.device | str = "cpu",
    only: Collection[str] | None = None,
    keep: Mapping[str, Taker] | None = None,
    axis: Axis | None = None,
) -> None:
    """Give a model that was built on device meta its values, with the random numbers of one process; in place.

    Parameters stay the objects that they are, so an optimizer may have been made before. Afterwards PyTorch's random
    state is what it would be if the model had been built now.

    Args:
        model: Built within `deferred_init`; or on `torch.device("meta")`: modules are then reset in turn, children
            first, by their `reset_parameters`.
        device: Where to. Values are made on the CPU.
        only: Names of the parameters and buffers that get values; default all. The others stay as they are; their
            random numbers are drawn, a chunk at a time, and let go of.
        keep: Parameters that are not to be whole anywhere, by name: called with the number of the first row and the
            values `[rows, ...]` of one chunk after another. They stay on device meta; see `give`. Values that come
            about in a way that needs all rows at once are made whole for a moment, and the log says so.
        axis: Whose ranks all draw the random numbers of its first rank, and must all call this.

    Raises:
        ModelError: If a module on device meta has nothing that could fill it, naming it; or a name is not the model's;
            on every rank of the axis, if on one.

    Example:
        >>> import torch, tulle
        >>> with tulle.deferred_init():
        ...     model = torch.nn.Linear(2, 1)
        >>> materialize(model, only=["weight"])
        >>> model.weight.shape, model.weight.is_meta, model.bias.is_meta
        (torch.Size([1, 2]), False, True)
    """
    keep = keep or {}
    wanted, record = _looked_up(model, only, keep, axis)
    views: dict[str, View] = {}
    for name, tensor in wanted.items():
        if record is not None and record_of(tensor) is not None:
            views[name] = record.view_of(tensor)
        else:
            tensor.data = tensor.data.to(device)
    if record is None:
        return
    takers = {views[name].memory: (name, views[name], taker) for name, taker in keep.items()}
    by_memory: dict[int, list[Tensor]] = {}
    for name, view in views.items():
        if view.memory not in takers:
            by_memory.setdefault(view.memory, []).append(wanted[name])
    givers = {memory: _giver(record, those, torch.device(device)) for memory, those in by_memory.items()}
    with _drawing_as(record, axis), swappable(model):
        Replay(record, givers, takers, has_all_draws=True).run()


def _looked_up(
    model: nn.Module, only: Collection[str] | None, keep: Collection[str], axis: Axis | None
) -> tuple[dict[str, Tensor], Record | None]:
    """What is to get values, and the record that has them. One rank's error is all's: all must call it."""
    wanted: dict[str, Tensor] = {}
    record: Record | None = None
    error: ModelError | None = None
    try:
        tensors = _tensors(model)
        wanted = tensors if only is None else _named(model, [*only, *(name for name in keep if name in tensors)])
        record = _record(model, wanted)
        if unknown := [one for one in keep if record is None or one not in wanted or record_of(wanted[one]) is None]:
            raise ModelError(
                f"the model has no {', '.join(map(repr, unknown))} without values: name parameters on device meta"
            )
    except ModelError as found:
        error = found
    if axis is not None:
        raise_together(error, axis, label="values of a model without memory")
    elif error is not None:
        raise error
    return wanted, record


@contextmanager
def _drawing_as(record: Record, axis: Axis | None) -> Iterator[None]:
    """Draw what one process would have drawn; all ranks of the axis alike. What was drawn since stays as it is."""
    if axis is not None:
        record.random_state = gather_values(record.random_state, axis, label="random state")[0]
    before = torch.get_rng_state()
    torch.set_rng_state(record.random_state)
    try:
        yield
    finally:
        if not torch.equal(before, record.random_state):
            torch.set_rng_state(before)


def values_of(model: nn.Module, names: Collection[str]) -> dict[str, Tensor]:
    """The values on the CPU that some parameters and buffers would get from `materialize`; the model stays as it is.

    The random state stays as it is, too. Random numbers are drawn only if these values depend on some.

    Args:
        model: As for `materialize`.
        names: Of parameters and buffers. What has values already gives these.

    Raises:
        ModelError: As `materialize` does.

    Example:
        >>> import torch, tulle
        >>> with tulle.deferred_init():
        ...     model = torch.nn.Linear(2, 1)
        ...     _ = torch.nn.init.ones_(model.bias)
        >>> values_of(model, ["bias"]), model.bias.is_meta
        ({'bias': tensor([1.])}, True)
    """
    wanted = _named(model, names)
    record = _record(model, wanted)
    found = {name: tensor.detach() for name, tensor in wanted.items() if not is_deferred(tensor)}
    if record is None:
        return found
    views = {name: record.view_of(tensor) for name, tensor in wanted.items() if name not in found}
    made: dict[int, torch.UntypedStorage] = {}
    givers = {view.memory: partial(made.__setitem__, view.memory) for view in views.values()}
    calls = [record.calls[number] for number in needed_calls(record, givers, has_all_draws=False)]
    generators = {torch.default_generator, *(call.generator for call in record.calls if call.generator is not None)}
    states = [(generator, generator.get_state()) for generator in generators]
    torch.set_rng_state(record.random_state)
    try:
        Replay(record, givers, {}, has_all_draws=any(call.is_random for call in calls)).run()
    finally:
        for generator, state in states:
            generator.set_state(state)
    return found | {name: view.of(made[view.memory]) for name, view in views.items()}


def _giver(record: Record, tensors: list[Tensor], device: torch.device) -> Giver:
    """What gives these tensors, all views of one memory, its values."""
    views = [record.view_of(tensor) for tensor in tensors]

    def giver(storage: torch.UntypedStorage) -> None:
        there = torch.empty(0, dtype=torch.uint8).set_(storage).to(device).untyped_storage()
        for tensor, view in zip(tensors, views, strict=True):
            give(tensor, view.of(there))

    return giver


def _record(model: nn.Module, wanted: Mapping[str, Tensor]) -> Record | None:
    """The record of a model, of what its modules' resets do if it was built without one; None if all have values."""
    if changed := [name for name, tensor in wanted.items() if was_changed(tensor)]:
        raise ModelError(
            f"{changed[0]!r} was converted, or written to, after tulle.deferred_init, which knows nothing of "
            "that: do so within it"
        )
    found = [one for tensor in _tensors(model).values() if (one := record_of(tensor)) is not None]
    records = {id(record): record for record, _ in found}
    without = [name for name, tensor in wanted.items() if tensor.is_meta and record_of(tensor) is None]
    if len(records) > 1 or (records and without):
        raise ModelError(
            f"the model's parameters come from {len(records)} tulle.deferred_init"
            + (f" and from torch.device('meta') ({without[0]!r})" if without else "")
            + ": build all of it within one"
        )
    if records:
        return next(iter(records.values()))
    return _resets(model, set(without)) if without else None


def _resets(model: nn.Module, wanted: Collection[str]) -> Record:
    """The record of every module's `reset_parameters`, children first, as constructors call them."""
    record = Record()
    with record:
        for module in _children_first(model):
            reset = attribute_of(module, "reset_parameters") or attribute_of(module, "_reset_parameters")
            if callable(reset) and any(tensor.device.type == "meta" for tensor in _tensors(module).values()):
                reset()
    filled = {memory for call in record.calls for memory in call.changed}
    for name, module in model.named_modules():
        for own, tensor in [*module.named_parameters(name, recurse=False), *module.named_buffers(name, recurse=False)]:
            if own in wanted and record.view_of(tensor).memory not in filled:
                raise ModelError(
                    f"{own!r} is on device meta, and {type(module).__name__} has no reset_parameters that fills it: "
                    "build the model within tulle.deferred_init, or write that method"
                )
    return record


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _children_first(child)
    yield module


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, each once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _named(model: nn.Module, names: Collection[str]) -> dict[str, Tensor]:
    """Parameters and buffers by any of their names."""
    parameters, buffers = model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    every = {**dict(parameters), **dict(buffers)}
    unknown = [name for name in names if name not in every]
    if unknown:
        raise ModelError(
            f"the model has no parameter or buffer {', '.join(map(repr, unknown))}: name those of named_parameters() "
            "and named_buffers()"
        )
    return {name: every[name] for name in names}
