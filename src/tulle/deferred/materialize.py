"""`deferred_init` and `materialize`: build a model without memory; give it the values that one process would have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from tulle.comm import gather_values
from tulle.deferred.record import Record, View, record_of
from tulle.deferred.replay import Giver, Replay, Taker
from tulle.errors import ModelError
from tulle.mesh import Axis


@contextmanager
def deferred_init() -> Iterator[None]:
    """Build a model within it without memory: its parameters are on device meta, and what would fill them is recorded.

    `materialize` (or `tulle.distribute`, which calls it) gives them the values that they would have had, with the same
    random numbers, if no other were drawn in between.

    Example:
        >>> import torch, tulle
        >>> with tulle.deferred_init():
        ...     model = torch.nn.Embedding(1_000_000_000, 1024)
        >>> model.weight.is_meta
        True
    """
    with Record():
        yield


def is_deferred(model: nn.Module) -> bool:
    """Whether some of a model's parameters or buffers have no values yet."""
    return any(tensor.is_meta for tensor in _tensors(model).values())


def materialize(
    model: nn.Module,
    *,
    device: torch.device | str = "cpu",
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
        keep: Parameters that are not to be whole anywhere, by name: called with the number of the first row and the
            values `[rows, ...]` of one chunk after another. They stay on device meta; see `give`. Values that come
            about in a way that needs all rows at once are made whole for a moment, and the log says so.
        axis: Whose ranks all draw the random numbers of its first rank, and must all call this.

    Raises:
        ModelError: If a module on device meta has nothing that could fill it, naming it.

    Example:
        >>> import torch, tulle
        >>> with tulle.deferred_init():
        ...     model = torch.nn.Linear(2, 1)
        >>> materialize(model)
        >>> model.weight.shape
        torch.Size([1, 2])
    """
    tensors = _tensors(model)
    keep = dict(keep or {})
    record = _record(model, tensors)
    if record is None:
        model.to(device)
        return
    givers: dict[int, Giver] = {}
    takers: dict[int, tuple[str, View, Taker]] = {}
    by_memory: dict[int, list[Tensor]] = {}
    for name, tensor in tensors.items():
        if record_of(tensor) is None:
            tensor.data = tensor.data.to(device)
            continue
        view = record.view_of(tensor)
        if name in keep:
            takers[view.memory] = (name, view, keep.pop(name))
        by_memory.setdefault(view.memory, []).append(tensor)
    if keep:
        raise ModelError(
            f"the model has no {', '.join(map(repr, keep))} without values: name parameters on device meta"
        )
    for memory, views in by_memory.items():
        if memory not in takers:
            givers[memory] = _giver(record, views, torch.device(device))
    if axis is not None:
        record.random_state = gather_values(record.random_state, axis, label="random state")[0]
    before = torch.get_rng_state()
    torch.set_rng_state(record.random_state)
    try:
        with _without_references(model):
            Replay(record, givers, takers).run()
    finally:
        if not torch.equal(before, record.random_state):
            torch.set_rng_state(before)


def give(tensor: Tensor, values: Tensor) -> None:
    """Give a parameter or buffer on device meta its values, of any shape: it stays the object that it is."""
    made = torch.Tensor._make_subclass(type(tensor), values.detach(), tensor.requires_grad)
    vars(made).update(vars(tensor))
    torch.utils.swap_tensors(tensor, made)


@contextmanager
def _without_references(model: nn.Module) -> Iterator[None]:
    """Recurrent modules keep weak references to their weights, which `swap_tensors` refuses."""
    recurrent = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    for module in recurrent:
        module._flat_weight_refs = []
    try:
        yield
    finally:
        for module in recurrent:
            module._init_flat_weights()


def _giver(record: Record, tensors: list[Tensor], device: torch.device) -> Giver:
    """What gives these tensors, all views of one memory, its values."""
    views = [record.view_of(tensor) for tensor in tensors]

    def giver(storage: torch.UntypedStorage) -> None:
        there = torch.empty(0, dtype=torch.uint8).set_(storage).to(device).untyped_storage()
        for tensor, view in zip(tensors, views, strict=True):
            give(tensor, view.of(there))

    return giver


def _record(model: nn.Module, tensors: Mapping[str, Tensor]) -> Record | None:
    """The record of a model, of what its modules' resets do if it was built without one; None if it has all values."""
    records = {id(found[0]): found[0] for tensor in tensors.values() if (found := record_of(tensor)) is not None}
    without = [name for name, tensor in tensors.items() if tensor.is_meta and record_of(tensor) is None]
    if len(records) > 1 or (records and without):
        raise ModelError(
            f"the model's parameters come from {len(records)} tulle.deferred_init"
            + (f" and from torch.device('meta') ({without[0]!r})" if without else "")
            + ": build all of it within one"
        )
    if records:
        return next(iter(records.values()))
    return _resets(model) if without else None


def _resets(model: nn.Module) -> Record:
    """The record of every module's `reset_parameters`, children first, as constructors call them."""
    record = Record()
    with record:
        for module in _children_first(model):
            reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
            if callable(reset) and any(tensor.device.type == "meta" for tensor in _tensors(module).values()):
                reset()
    filled = {memory for call in record.calls for memory in call.changed}
    for name, module in model.named_modules():
        for own, tensor in [*module.named_parameters(name, recurse=False), *module.named_buffers(name, recurse=False)]:
            if tensor.is_meta and record.view_of(tensor).memory not in filled:
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
