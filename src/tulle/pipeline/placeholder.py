"""`Placeholder`: stands for a tensor that lives on one rank, in a program that every rank runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor, nn

from tulle.comm import eager
from tulle.errors import ModelError
from tulle.pipeline.outcome import Described
from tulle.pipeline.structure import LEAF_KINDS, flatten
from tulle.pipeline.tape import Graph


class Operator(Protocol):
    """What runs operations on placeholders: a program."""

    @property
    def graph(self) -> Graph:
        """Which each placeholder that it makes keeps."""
        ...

    @property
    def is_between_modules(self) -> bool:
        """Whether what runs now is the user's code, which all ranks run."""
        ...

    def operate(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation where it belongs; every rank comes here."""
        ...

    def apply(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation that torch shows to no mode; every rank comes here."""
        ...

    def backward(self, losses: Sequence[Any], gradients: Sequence[Any] | None = None, **options: Any) -> None:
        """Run backward from losses; every rank comes here."""
        ...


running: ContextVar[Operator | None] = ContextVar("running", default=None)
"""The program that this thread runs."""


class Family:
    """Placeholders that share memory; writing in one writes in all."""

    __slots__ = ("__weakref__", "_borrowers", "_members", "lender", "outdated_by", "version")

    def __init__(self) -> None:
        self.version = 0
        self.outdated_by = ""
        """The operation that has written in what they are views of, where that lives; they show what was there."""
        self._borrowers: WeakKeyDictionary[Family, int] | None = None
        """Those who are views of a copy of this memory, and the ranks that have these."""
        self.lender: ref[Placeholder] | None = None
        """What they are views of, if it lives on another rank, and what they share memory with is a copy of it."""
        self._members: WeakSet[Placeholder] | None = None

    @property
    def has_others(self) -> bool:
        """Whether more than one of them is left."""
        return self._members is not None and len(self._members) > 1

    def with_all(self, one: Placeholder) -> list[Placeholder]:
        """One of them and all others."""
        return [one] if self._members is None else list(self._members)

    def add(self, first: Placeholder, other: Placeholder) -> None:
        """Note that another one shares the memory of the first."""
        self._members = self._members if self._members is not None else WeakSet([first])
        self._members.add(other)

    def lend(self, lender: Placeholder, borrower: Family, rank: int) -> None:
        """Note that others are views of one of these, of a copy that a rank has."""
        borrower.lender = ref(lender)
        self._borrowers = self._borrowers if self._borrowers is not None else WeakKeyDictionary()
        self._borrowers[borrower] = rank

    def note_written(self, rank: int, by: str) -> None:
        """Note that an operation wrote there, on a rank: views of copies that others have show it not."""
        self.version += 1
        for borrower, at in (self._borrowers or {}).items():
            if at != rank:
                borrower.outdated_by = by
                borrower.note_written(rank, by)


_METADATA = {
    *(torch.Tensor.size, torch.Tensor.dim, torch.Tensor.ndimension, torch.Tensor.stride, torch.Tensor.numel),
    *(torch.Tensor.nelement, torch.Tensor.element_size, torch.Tensor.is_contiguous, torch.Tensor.__len__),
    *(torch.Tensor.is_floating_point, torch.Tensor.is_complex, torch.Tensor.get_device, torch.Tensor.__hash__),
    *(torch.numel, torch.is_floating_point, torch.is_complex, torch.Tensor.is_signed, torch.Tensor.storage_offset),
}
"""Answered by the placeholder itself, without the tensor that it stands for."""
_TENSOR_PROPERTIES = {"T", "mT", "H", "mH", "real", "imag", "data"}
_LAYOUTS = {"is_sparse": torch.sparse_coo, "is_sparse_csr": torch.sparse_csr}
"""What a property asks for."""
_CPU = torch.device("cpu")
_REFUSED = {"register_hook", "retain_grad", "data_ptr", "untyped_storage", "storage", "share_memory_", "__reduce_ex__"}


class Placeholder(Tensor):
    """A tensor that lives on the rank of one stage. All ranks have it; the values are at the owner.

    Its shape, strides and dtype are known everywhere, and whether it is on the CPU. An operation on it is run by the
    program that it belongs to.
    """

    stage: int
    """Where it lives."""
    local: Tensor | None
    """The tensor itself at its owner, a copy at a rank that received one, else None."""
    phase: object
    """The phase of this rank's tape in which `local` was made; None if a gradient needs no tape."""
    needs_grad: bool
    _described: Described
    family: Family
    own: Tensor | None
    """A tensor that this rank has, as others have theirs, for which it stands: of a model, or of the user's code."""
    sent: dict[int, tuple[int, int | None]]
    """To whom it was sent: the version, and the number of the call for which a gradient is to come back, or None."""
    program: Operator
    graph: Graph

    @staticmethod
    def __new__(
        cls: type[Placeholder], described: Described, stage: int, program: Operator, device: torch.device
    ) -> Placeholder:
        """Stand for a tensor of that description, on this device if it is not on the CPU."""
        device = _CPU if described.is_of_host else device
        made = Tensor._make_wrapper_subclass(
            cls, described.shape, strides=described.stride or None, dtype=described.dtype, device=device
        )
        made.stage, made.program, made.graph = stage, program, program.graph
        made.local, made.phase, made.own = None, None, None
        made.needs_grad, made._described = described.needs_grad, described
        made.family, made.sent = Family(), {}
        return made

    @property
    def is_parameter(self) -> bool:
        """Whether it stands for a parameter of the model."""
        return isinstance(self.own, nn.Parameter)

    def described(self) -> Described:
        """What all ranks know of it."""
        known = self._described
        return known if known.needs_grad == self.needs_grad else replace(known, needs_grad=self.needs_grad)

    def share_memory_with(self, other: Placeholder) -> None:
        """Be of the family of another one."""
        self.family = other.family
        other.family.add(other, self)

    def check_up_to_date(self, reader: str) -> None:
        """Refuse to read a view of a copy of what was written in since. Every rank comes here.

        Args:
            reader: Name of what is to read it.
        """
        if self.family.outdated_by:
            raise ModelError(
                f"{reader!r} reads {self!r}, a view of what lives at another stage, in which "
                f"{self.family.outdated_by!r} has written since, so that it shows what was there before: make the view "
                "after that, or write in a copy (.clone())"
            )

    @property
    def _is_param(self) -> bool:
        """What torch asks by `isinstance(tensor, nn.Parameter)`."""
        return False

    @_is_param.setter
    def _is_param(self, _: object) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        raise ModelError(
            f"nn.Parameter was made of {self!r}, a tensor between modules of a pipeline, whose values one rank has, so "
            "that one rank only would train it: make the parameter, of that shape, before the model is placed, and "
            "have forward write in it (parameter.copy_(value) under torch.no_grad())"
        )

    def __repr__(self, *, tensor_contents: object = None) -> str:
        known = self.described()
        return f"Placeholder(stage={self.stage}, shape={list(known.shape)}, dtype={known.dtype})"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer what is known, leave the rest to the program."""
        return intercept(func, args, kwargs or {}, None)

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Reached only past `__torch_function__`: by compiled code, and by transforms such as `torch.vmap`."""
        given = next(leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, cls))
        raise ModelError(
            f"the operation {func} was given {given!r}, a tensor between modules of a pipeline, past torch's modes. "
            "A constructor does so (torch.tensor(x), torch.Tensor(x), torch.as_tensor(x, dtype=...)): write "
            "x.detach().clone(), or x.to(dtype). So does compiled code, or a transform of torch.func: do both inside "
            "the modules that are placed, not around them"
        )


LEAF_KINDS.add(Placeholder)


def is_about_shape(function: Callable[..., Any]) -> bool:
    """Whether a function of torch asks a tensor for something that can be told without its values."""
    if getattr(function, "__name__", "") != "__get__":
        return function in _METADATA
    return getattr(function, "__self__", None).__name__ not in _TENSOR_PROPERTIES  # type: ignore[union-attr]


@eager
def intercept(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], program: Operator | None
) -> Any:
    """Run a function of torch in whose arguments a placeholder may be."""
    first = args[0] if args else None
    if isinstance(first, Placeholder):
        program = program or first.program
        if function in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        name = getattr(function, "__name__", "")
        if name == "__get__":
            attribute = getattr(function, "__self__", None).__name__  # type: ignore[union-attr]
            if attribute not in _TENSOR_PROPERTIES:
                return _property(first, attribute, function, args)
        elif name == "backward":
            return program.backward([first], [kwargs.pop("gradient", None)], **kwargs)
        elif name == "__iter__":
            return iter(torch.unbind(first))
        elif name == "__set__" or name in _REFUSED:
            what = f"setting .{getattr(function, '__self__', function).__name__}" if name == "__set__" else f"{name}()"
            raise ModelError(
                f"{what} of {first!r}, a tensor between modules of a pipeline, is not possible: do it inside a module "
                "that is placed whole, by an assignment of modules to stages if need be"
            )
    program = program or next(leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, Placeholder)).program
    if function is torch.autograd.backward and any(isinstance(loss, Placeholder) for loss in args[0]):
        return program.backward(args[0], kwargs.pop("grad_tensors", None), **kwargs)
    return program.operate(function, args, kwargs)


def _property(placeholder: Placeholder, attribute: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    if attribute == "requires_grad":
        return placeholder.needs_grad
    if attribute == "is_leaf":
        return not placeholder.needs_grad
    if attribute in ("grad", "grad_fn"):
        return None
    if attribute in _LAYOUTS or attribute == "layout":
        layout = placeholder.described().layout
        return layout if attribute == "layout" else layout == _LAYOUTS[attribute]
    with torch._C.DisableTorchFunctionSubclass():
        return function(*args)
