"""`noting`: what autograd saves of a whole is a note that says where it was.

The whole is gathered again when the first of a call's notes is read, and goes with the last of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from tulle.comm import untraced
from tulle.errors import GradientError, ModelError
from tulle.memory.ahead import BACKWARD, Ahead
from tulle.memory.unit import Unit
from tulle.parts import local_of, refuses_saved_hooks

_autograd: Any = vars(torch._C)["_autograd"]


class Gathered:
    """The wholes of one call of a unit's module, which come back when backward reads one, and go with its notes.

    Args:
        unit: Whose module it is.
        parts: Of its parameters.
        ahead: Gathers them again.
        call: The number of the call of a model that this one belongs to.
        wholes: Those that forward gathered, if they stay.
    """

    def __init__(
        self, unit: Unit, parts: Sequence[nn.Parameter], ahead: Ahead, call: int, wholes: Sequence[Tensor]
    ) -> None:
        self._unit, self._parts, self._ahead, self._call, self._wholes = unit, parts, ahead, call, wholes
        with torch._C.DisableTorchFunctionSubclass():  # parts, which are asked often
            self.dtypes = [part.dtype for part in parts]
            self._versions = [part._version for part in parts]

    def whole(self, number: int) -> Tensor:
        """One of the wholes, gathered again if forward's are gone.

        Raises:
            GradientError: If its part is not what it was in forward.
        """
        with torch._C.DisableTorchFunctionSubclass():
            version = self._parts[number]._version
        if version != self._versions[number]:
            raise GradientError(
                f"parameters of {self._unit.name!r} were changed between its forward and its backward: step the "
                "optimizer after all backwards"
            )
        if not self._wholes:
            with torch.no_grad():
                self._wholes = self._ahead.gather(self._unit, self._parts, BACKWARD, call=self._call)
        return self._wholes[number]


@contextmanager
def noting(gathered: Gathered, wholes: Sequence[Tensor]) -> Iterator[None]:
    """Have autograd save notes instead of wholes, and all else as it would have."""
    if not torch.is_grad_enabled():
        yield
        return
    outer: tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None
    outer = _autograd._top_saved_tensors_default_hooks(True)
    held = [whole.untyped_storage() for whole in wholes]  # else others lie there where forward gives one other memory
    numbers = {storage._cdata: number for number, storage in enumerate(held)}

    def note(tensor: Tensor) -> Any:
        number = numbers.get(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else None
        if number is not None and tensor.dtype == gathered.dtypes[number] and not tensor.is_neg():
            offset = int(tensor.storage_offset())
            return _Note(gathered, number, tensor.shape, tensor.stride(), offset, is_conjugate=tensor.is_conj())
        return outer[0](tensor) if outer is not None else Saved.of(tensor)

    @untraced  # by a backward within a function that is compiled, too
    def read(packed: Any) -> Tensor:
        return packed.read() if isinstance(packed, _Note | Saved) or outer is None else outer[1](packed)

    with saved_tensors_hooks(note, read):
        yield


@contextmanager
def naming(option: str, module: nn.Module) -> Iterator[None]:
    """Have torch's refusal to differentiate by `torch.func` where saved tensors have hooks name whose they are."""
    try:
        yield
    except RuntimeError as error:
        if not refuses_saved_hooks(error):
            raise
        raise ModelError(
            f"the forward of a {type(module).__name__} runs torch.func.grad, vjp, jacrev or hessian, which torch does "
            f"not do where {option} looks after what autograd saves: use torch.autograd.grad(..., create_graph=True), "
            f"or leave {option} out of the plan"
        ) from error


@dataclass(frozen=True, slots=True)
class _Note:
    """What autograd saved instead of a view of a whole."""

    gathered: Gathered
    number: int
    size: Sequence[int]
    stride: Sequence[int]
    offset: int
    is_conjugate: bool

    def read(self) -> Tensor:
        view = self.gathered.whole(self.number).as_strided(self.size, self.stride, self.offset)
        return view.conj() if self.is_conjugate else view


@dataclass(frozen=True, slots=True)
class Saved:
    """Another tensor that autograd saved; it does not look for changes of what went through our hands."""

    tensor: Tensor
    version: int

    @staticmethod
    def of(tensor: Tensor) -> Saved:
        """What holds its memory, and not the graph: of what an operation gave, that would hold itself."""
        return Saved(local_of(tensor), tensor._version)

    def read(self) -> Tensor:
        """The tensor, unless it has changed since."""
        if self.tensor._version != self.version:
            raise GradientError(
                f"a tensor of shape {list(self.tensor.shape)} that backward needs was changed in place after forward"
            )
        return self.tensor
