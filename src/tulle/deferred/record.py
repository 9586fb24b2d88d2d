"""`Record`: what would have filled the parameters and buffers of a model that is built without memory.

Within the record tensors are made on device meta, and every operation that fills or changes one is written down: which
function, with which views of which memory. A tensor that is small and made of known numbers (`torch.linspace`,
`torch.tensor`) is there for real until such an operation touches it, since constructors read such values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import init
from torch.nn.modules import module as hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from tulle.deferred.give import BUILT
from tulle.errors import ModelError

SMALL_BYTES = 1024 * 1024
"""A tensor of known numbers up to this size is made for real."""
_META = torch.device("meta")
_TAG = "_tulle_record"
"""The attribute of a storage that says which memory of which record it is."""
_CPU = torch.device("cpu")
_IS_META = vars(torch._C.TensorBase)["is_meta"].__get__
_OF_DATA = {torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor}
_READ_NUMBERS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.allclose.default,
    torch.ops.aten.equal.default,
}
"""Operations whose result is a number of Python's, which hangs on values."""
_numbers = count()

Function = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class View:
    """A tensor, as a view of some memory of the record.

    Args:
        memory: Its number.
        dtype: Of the elements.
        shape: Of the view.
        stride: In elements.
        offset: In elements.
    """

    memory: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, storage: torch.UntypedStorage) -> Tensor:
        """The same view of real memory."""
        return torch.empty(0, dtype=self.dtype, device=storage.device).set_(
            storage, self.offset, self.shape, self.stride
        )


@dataclass(frozen=True, slots=True)
class Call:
    """One operation that was recorded, to be done again.

    Args:
        function: To be called again.
        arguments: By position, with views in place of tensors of the record.
        keywords: By name, likewise.
        results: Views, or None for what is no tensor, in the order of the leaves of the result.
        made: Numbers of the memories that it allocates.
        changed: Numbers of the memories that it changes.
        is_random: Whether it draws random numbers.
    """

    function: Function
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    results: tuple[View | None, ...]
    made: frozenset[int]
    changed: frozenset[int]
    is_random: bool

    @property
    def name(self) -> str:
        """Of the function, without its overload."""
        return getattr(self.function, "overloadpacket", self.function).__name__

    @property
    def generator(self) -> torch.Generator | None:
        """The one that it was told to draw from."""
        given = tree_leaves((self.arguments, self.keywords))
        return next((one for one in given if isinstance(one, torch.Generator)), None)

    @property
    def views(self) -> list[View]:
        """The tensors of the record that it is given."""
        return [one for one in tree_leaves((self.arguments, self.keywords)) if isinstance(one, View)]

    @property
    def touched(self) -> set[int]:
        """Numbers of all memories that it has to do with."""
        return {view.memory for view in self.views} | self.made


class Record(TorchDispatchMode):
    """A context in which tensors are made without memory, and what would have filled them is written down."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.initial: dict[int, Tensor] = {}
        """What was there for real when the first operation touched it."""
        self.sizes_bytes: dict[int, int] = {}
        self.random_state = torch.get_rng_state()
        """With which the first number is drawn."""
        self._has_drawn = False
        self._seeming = _Seeming()
        self._given: list[Function] = []
        self._built: list[Tensor] = []
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> Record:
        """Begin."""
        self._hooks += [
            hooks.register_module_parameter_registration_hook(self._note_built),
            hooks.register_module_buffer_registration_hook(self._note_built),
        ]
        self._given.append(init._no_grad_trunc_normal_)
        init._no_grad_trunc_normal_ = self._opaque(init._no_grad_trunc_normal_)
        super().__enter__()
        self._seeming.__enter__()
        return self

    def __exit__(self, *problem: Any) -> None:
        """End."""
        self._seeming.__exit__(*problem)
        super().__exit__(*problem)
        init._no_grad_trunc_normal_ = self._given.pop()
        while self._hooks:
            self._hooks.pop().remove()
        while self._built:
            tensor = self._built.pop()
            setattr(tensor, BUILT, tensor._version)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Have an operation done for real, or write it down."""
        keywords = dict(kwargs or {})
        tensors = _tensors_of((args, keywords))
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if _is_view(func):
            return func(*args, **keywords)
        if (
            not is_random
            and not any(map(_is_deferred, tensors))
            and (tensors or _is_known_and_small(func, args, keywords))
        ):
            is_told_meta = not tensors or keywords.get("device") == _META  # as parameters say that they are
            return func(*args, **{**keywords, "device": _CPU} if is_told_meta else keywords)
        if func in _READ_NUMBERS:
            raise ModelError(
                "the model reads a number of a tensor while it is built, and within tulle.deferred_init there is none "
                "yet: build that part outside, or leave out the check"
            )
        return self._write_down(func, tuple(args), keywords, is_random=is_random)

    def view_of(self, tensor: Tensor) -> View:
        """A tensor as a view of its memory; what has no number yet becomes part of the record."""
        storage = tensor.untyped_storage()
        record, number = getattr(storage, _TAG, (self, None))
        if record is not self:
            raise ModelError("a tensor of one tulle.deferred_init is changed in another: let one have all")
        if number is None:
            number = next(_numbers)
            setattr(storage, _TAG, (self, number))
            self.sizes_bytes[number] = storage.nbytes()
            if tensor.device != _META:
                base = torch.empty(0, dtype=tensor.dtype).set_(storage)
                self.initial[number] = base.clone()
        return View(number, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def _note_built(self, _module: nn.Module, _name: str, tensor: Tensor | None) -> None:
        if tensor is not None and _is_deferred(tensor):
            self._built.append(tensor)

    def _write_down(self, func: Any, args: tuple[Any, ...], keywords: dict[str, Any], *, is_random: bool) -> Any:
        keywords = _without_device(func, args, keywords)
        changed = _changed(func, args, keywords)
        # What an operation changes belongs to the record from here on; other real tensors are constants.
        for tensor in changed:
            self.view_of(tensor)
        arguments, words = tree_map(self._argument, (args, keywords))
        on_meta, words_on_meta = tree_map(_on_meta, (args, keywords))
        try:
            given = func(*on_meta, **words_on_meta)
            results = () if changed else tuple(map(self._result, tree_leaves(given)))
        except NotImplementedError as error:
            raise ModelError(
                f"{func} makes a tensor whose size depends on values, or a sparse one, while the model is "
                "built, and within tulle.deferred_init there are no values yet: build that part outside"
            ) from error
        made = frozenset(view.memory for view in results if view is not None)
        changes = frozenset(self.view_of(tensor).memory for tensor in changed)
        words = {name: _CPU if value == _META else value for name, value in words.items()}
        self._note(Call(func, arguments, words, results, made, changes, is_random))
        return changed[0] if len(changed) == 1 and isinstance(given, Tensor) else given

    def _note(self, call: Call) -> None:
        if call.is_random and call.generator is None:
            # What is written down draws nothing, so the state moves only if somebody seeds, or draws for real.
            state = torch.get_rng_state()
            if self._has_drawn and not torch.equal(state, self.random_state):
                raise ModelError(
                    "torch was seeded, or drew numbers for real, between two random numbers of tulle.deferred_init, "
                    "which are drawn later, one after the other: seed before the model draws its first"
                )
            self.random_state, self._has_drawn = state, True
        self.calls.append(call)

    def _argument(self, value: object) -> object:
        if not isinstance(value, Tensor):
            return value
        return self.view_of(value) if _is_deferred(value) else value.detach().clone()

    def _result(self, value: object) -> View | None:
        return self.view_of(value) if isinstance(value, Tensor) else None

    def _opaque(self, function: Function) -> Function:
        """A function of PyTorch's that looks at values, to be called as a whole."""

        def opaque(tensor: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
            if tensor.untyped_storage() is None or not _is_deferred(tensor):
                return function(tensor, *arguments, **keywords)
            view = self.view_of(tensor)
            self._note(Call(function, (view, *arguments), keywords, (), frozenset(), frozenset({view.memory}), True))
            return tensor

        return opaque


class _Seeming(TorchFunctionMode):
    """What must be told before it becomes operations.

    `torch.nn.init` leaves tensors as they are that say that they are on device meta: ours do not say so. A deep copy
    of a tensor that is there for real copies memory of its own. What is made of data of Python's is there for real, on
    whatever device parameters say that they are.
    """

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func == _IS_META:
            return False
        if func is Tensor.__deepcopy__ and not _is_deferred(args[0]):
            with _disable_current_modes():
                return func(*args)
        keywords = dict(kwargs or {})
        told = keywords.get("device") or (args[0].device if func == Tensor.new_tensor else None)
        if func in _OF_DATA and str(told) == "meta":
            keywords["device"] = _CPU
        return func(*args, **keywords)


def record_of(tensor: Tensor) -> tuple[Record, int] | None:
    """The record that a tensor's memory is part of, and its number there."""
    return getattr(tensor.untyped_storage(), _TAG, None) if tensor.layout == torch.strided else None


def was_changed(tensor: Tensor) -> bool:
    """Whether a parameter or buffer was converted or written to after the context that it was built in."""
    version = getattr(tensor, BUILT, None)
    return version is not None and (record_of(tensor) is None or tensor._version != version)


def _is_deferred(tensor: Tensor) -> bool:
    return tensor.device == _META or record_of(tensor) is not None


def _tensors_of(arguments: object) -> list[Tensor]:
    return [one for one in tree_leaves(arguments) if isinstance(one, Tensor)]


def _is_view(func: Any) -> bool:
    """Whether it gives another view of the memory that it is given."""
    return any(given.alias_info is not None and not given.alias_info.is_write for given in func._schema.returns)


def _is_known_and_small(func: Any, args: Sequence[Any], keywords: Mapping[str, Any]) -> bool:
    """Whether a function that makes a tensor fills it, with few bytes."""
    if func.overloadpacket.__name__.startswith("empty"):
        return False
    made = func(*args, **{**keywords, "device": _META, "pin_memory": False})
    return made.nbytes <= SMALL_BYTES


def _without_device(func: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
    """With device meta where a tensor is made on, or moved to, another."""
    declared = {argument.name for argument in func._schema.arguments}
    changed = dict(keywords)
    if "device" in declared and (keywords.get("device") is not None or not _tensors_of((args, keywords))):
        changed["device"] = _META
    if "pin_memory" in declared:
        changed["pin_memory"] = False
    return changed


def _changed(func: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> list[Tensor]:
    """The tensors that it writes to."""
    given = [*args, *(keywords.get(argument.name) for argument in func._schema.arguments[len(args) :])]
    declared = zip(func._schema.arguments, given, strict=False)
    return [
        tensor
        for argument, value in declared
        if argument.alias_info is not None and argument.alias_info.is_write
        for tensor in _tensors_of(value)
    ]


def _on_meta(value: object) -> object:
    return value.to(_META) if isinstance(value, Tensor) else value
