"""`deferred`: builds a model without its memory, and later only the parts that are wanted, with one process' numbers.

Within the context, tensors are made on `meta`, and every operation on them is written down. To make some of them
real, the operations that these depend on are run, in order; of all others only those that draw random numbers are, into
memory that is given back at once, so that the stream of random numbers is that of one process.

Source: the idea is torchdistX's *deferred module initialization* (Meta AI, 2022), which did not keep the stream.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tulle.errors import ModelError


@dataclass(frozen=True, slots=True)
class _Ref:
    """A tensor of the recording: where it lies in which memory."""

    memory: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Step:
    """One operation of the recording."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: frozenset[int]
    writes: frozenset[int]
    results: tuple[_Ref | None, ...]

    @property
    def is_random(self) -> bool:
        """Whether it draws."""
        tags = getattr(self.function, "tags", (torch.Tag.nondeterministic_seeded,))
        return torch.Tag.nondeterministic_seeded in tags


@dataclass(eq=False)
class Recording:
    """The operations that made a model."""

    begin: Tensor = field(default_factory=torch.default_generator.get_state)
    steps: list[_Step] = field(default_factory=list)
    alive: list[Any] = field(default_factory=list)
    """The memory objects, so that none gets another's identity."""

    def replay(self, wanted: Collection[Tensor], device: torch.device, *, is_all: bool = True) -> list[Tensor]:
        """Make tensors of the recording real.

        Args:
            wanted: Which.
            device: Where.
            is_all: Whether to draw all random numbers, so that their stream goes on where it would in one process.
        """
        refs = [_ref(tensor) for tensor in wanted]
        steps = self._needed({ref.memory for ref in refs})
        kept = {ref.memory for ref in refs}
        last = {memory: number for number in sorted(steps) for memory in self.steps[number].reads}
        real: dict[int, torch.UntypedStorage] = {}
        if is_all:
            torch.default_generator.set_state(self.begin)
        with torch.no_grad():
            for number, step in enumerate(self.steps):
                if number in steps:
                    _run(step, real, device)
                    for memory in [m for m in step.reads if last[m] == number and m not in kept]:
                        real.pop(memory, None)
                elif step.is_random and is_all:
                    _run(step, {}, device)
        return [_view(ref, real, device) for ref in refs]

    def is_drawn(self, tensor: Tensor) -> bool:
        """Whether a tensor depends on random numbers."""
        return any(self.steps[number].is_random for number in self._needed({_ref(tensor).memory}))

    def _needed(self, memories: set[int]) -> set[int]:
        """Numbers of the steps that what is in some memories depends on."""
        needed, steps = set(memories), set()
        for number, step in reversed(list(enumerate(self.steps))):
            if step.writes & needed:
                steps.add(number)
                needed |= step.reads
        return steps


class _Recorder(TorchDispatchMode):
    """Has tensors made on `meta`, and writes down what is done to them."""

    def __init__(self) -> None:
        super().__init__()
        self.recording = Recording()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_factory = not leaves and "device" in kwargs
        if not is_factory and not any(map(_lies_on_meta, leaves)):
            return func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            return self._number(args[0])
        on_meta = pytree.tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, (args, kwargs))
        if on_meta[1].get("device") is not None:
            on_meta[1]["device"] = torch.device("meta")
        result = func(*on_meta[0], **on_meta[1])
        self.note(func, args, kwargs, result, _written(func, args, kwargs))
        return result

    def note(
        self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any], result: Any, written: list[Tensor]
    ) -> None:
        """Write an operation down."""
        reads = frozenset(ref.memory for ref in map(_ref, _metas((args, kwargs))))
        results = tuple(_ref(leaf) if isinstance(leaf, Tensor) else None for leaf in pytree.tree_leaves(result))
        fresh = {ref.memory for ref in results if ref is not None} - reads
        writes = frozenset(fresh | {_ref(leaf).memory for leaf in written if _lies_on_meta(leaf)})
        if not writes:
            return  # a view: what uses it says where it lies
        self.recording.alive.extend(leaf.untyped_storage() for leaf in _metas((args, kwargs, result)))
        noted_args, noted_kwargs = pytree.tree_map(_noted, (args, kwargs))
        self.recording.steps.append(_Step(func, noted_args, noted_kwargs, reads, writes, results))

    def _number(self, tensor: Tensor) -> Any:
        """A number that the constructor asks for."""
        if self.recording.is_drawn(tensor):
            raise ModelError(
                "a model that is built in pipeline.deferred() asks for the value of a tensor that depends on random "
                "numbers, which are not drawn yet: build it without, on each rank"
            )
        with _disable_current_modes():
            return self.recording.replay([tensor], torch.device("cpu"), is_all=False)[0].item()


_IS_META = vars(torch._C.TensorBase)["is_meta"].__get__


def _lies_on_meta(tensor: Tensor) -> bool:
    return tensor.device.type == "meta"


class _Unsuspected(TorchFunctionMode):
    """Has initializers treat the tensors as real ones: torch's own do nothing to those on `meta`."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == _IS_META:
            return False
        return func(*args, **(kwargs or {}))


@contextmanager
def _drawn_as_one(recorder: _Recorder) -> Iterator[None]:
    """Write down the one initializer of torch that looks at what it has drawn, and draws again, as one operation."""
    name = "_no_grad_trunc_normal_"
    native = getattr(nn.init, name)

    def note(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            recorder.note(native, (tensor, *args), kwargs, tensor, [tensor])
        return tensor

    setattr(nn.init, name, note)
    try:
        yield
    finally:
        setattr(nn.init, name, native)


@contextmanager
def deferred() -> Iterator[None]:
    """Build a model within this context without memory for its parameters: `place` gives each rank its own part's.

    What the model's constructor draws is drawn when it is placed, so that parameters are those of one process that
    began with the same seed.

    Example:
        >>> import torch
        >>> from tulle import pipeline
        >>> with pipeline.deferred():
        ...     model = torch.nn.Linear(1000, 1000)
        >>> model.weight.is_meta
        True
        >>> pipeline.materialize(model).weight.is_meta
        False
    """
    with _Recorder() as recorder, _Unsuspected(), _drawn_as_one(recorder):
        yield
    _recordings.append(recorder.recording)


def materialize(model: nn.Module, device: torch.device | None = None) -> nn.Module:
    """Give a model that was built in `deferred` its memory, all of it."""
    with swappable(model):
        make_real([*model.named_parameters(), *model.named_buffers()], device or torch.device("cpu"))
    return model


@contextmanager
def swappable(model: nn.Module) -> Iterator[None]:
    """Have nothing refer to a model's parameters, so that they can become others."""
    recurrent = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    for module in recurrent:
        module._flat_weight_refs = []
    yield
    for module in recurrent:
        module._init_flat_weights()


def make_real(tensors: Collection[tuple[str, Tensor]], device: torch.device) -> None:
    """Give named parameters and buffers of a model that was built in `deferred` their memory.

    All that are to be made real must be given at once: it runs through the whole recording. Raises a ModelError if they
    were not built in `deferred`.
    """
    metas = [(name, tensor) for name, tensor in tensors if tensor.is_meta]
    recording = next((one for one in reversed(_recordings) if _knows(one, [tensor for _, tensor in metas])), None)
    if recording is None:
        raise ModelError(
            f"{', '.join(name for name, _ in metas[:3])} ... have no memory, and nothing tells what would be in it: "
            "build the model in pipeline.deferred(), or give its weights"
        )
    for (_, tensor), real in zip(metas, recording.replay([t for _, t in metas], device), strict=True):
        become(tensor, real)


def lend_buffers(model: nn.Module, device: torch.device) -> None:
    """Give the buffers of a model that was built in `deferred` their memory, without drawing any random numbers."""
    metas = [buffer for buffer in model.buffers() if buffer.is_meta]
    recording = next((one for one in reversed(_recordings) if _knows(one, metas)), None)
    if metas and recording is not None:
        for buffer, real in zip(metas, recording.replay(metas, device, is_all=False), strict=True):
            become(buffer, real)


def become(tensor: Tensor, real: Tensor) -> None:
    """Have a parameter or buffer, the same object still, hold what another tensor does."""
    made = nn.Parameter(real, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else real
    torch.utils.swap_tensors(tensor, made)


_recordings: list[Recording] = []


def _knows(recording: Recording, tensors: Collection[Tensor]) -> bool:
    written = set().union(*(step.writes for step in recording.steps)) if recording.steps else set()
    return all(_ref(tensor).memory in written for tensor in tensors)


def _metas(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor) and _lies_on_meta(leaf)]


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments that an operation writes in, by its schema."""
    declared = func._schema.arguments
    given = [*zip(declared, args, strict=False), *((one, kwargs[one.name]) for one in declared if one.name in kwargs)]
    written = [value for one, value in given if one.alias_info is not None and one.alias_info.is_write]
    return [leaf for value in written for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _ref(tensor: Tensor) -> _Ref:
    memory = tensor.untyped_storage()._cdata
    return _Ref(memory, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)


def _noted(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return _ref(leaf) if _lies_on_meta(leaf) else leaf.clone()


def _run(step: _Step, real: dict[int, torch.UntypedStorage], device: torch.device) -> None:
    """Run a step on real memory; what is not there is made, and given back."""
    args, kwargs = pytree.tree_map_only(_Ref, lambda ref: _view(ref, real, device), (step.args, step.kwargs))
    if kwargs.get("device") is not None:
        kwargs["device"] = device
    result = step.function(*args, **kwargs)
    for ref, leaf in zip(step.results, pytree.tree_leaves(result), strict=True):
        if ref is not None:
            real.setdefault(ref.memory, leaf.untyped_storage())


def _view(ref: _Ref, real: dict[int, torch.UntypedStorage], device: torch.device) -> Tensor:
    storage = real.get(ref.memory)
    if storage is None:
        return torch.empty_strided(ref.shape, ref.stride, dtype=ref.dtype, device=device).zero_()
    return torch.empty(0, dtype=ref.dtype, device=device).set_(storage, ref.offset, ref.shape, ref.stride)
