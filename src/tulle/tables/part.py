"""`TablePart`: the parameter of a table that is split, which is not to be taken for the whole.

A rank holds some of the rows, in an order of their own, or some of the columns. What treats every number by itself (an
optimizer, weight decay, a penalty, a moving average) does to the part what it would do to the whole. A product with it,
a row read by its number, or numbers drawn anew would be others than one process has, without a word:

    hidden @ words.weight.T,  F.linear(hidden, words.weight),  words.weight[3],  nn.init.normal_(words.weight)

These raise. Of `parameter.data` only rows read or written by number and numbers drawn are refused, of
`parameter.detach()` nothing: it is for who knows that only a part lies here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from tulle.errors import ModelError
from tulle.tables.gradient import ShardGradient
from tulle.tables.placements import placement_of
from tulle.tables.split import Split, mark, split_of

_BY_NUMBER = {"__getitem__", "__setitem__"}
_DRAWN = {"uniform_", "normal_", "kaiming_uniform_", "bernoulli_", "exponential_", "log_normal_", "random_"}
"""Names of what writes random numbers, methods of tensors or functions of `torch.nn.init`."""
_SUMS = {"sum", "nansum"}
"""Names of what gives one number whose gradient is right for each part; its value is this rank's share."""
_NUMBER_BY_NUMBER = ("_foreach_", "_fused_", "_amp_")
"""How the names of functions begin that take many tensors and treat every number by itself."""
OF_NO_VALUES = frozenset(
    accessor
    for name in ("grad", "requires_grad", "is_leaf", "_version", "dtype", "device")
    for accessor in (getattr(vars(torch._C.TensorBase)[name], kind) for kind in ("__get__", "__set__", "__delete__"))
)
"""What may be asked of any tensor as it is: all that `zero_grad` asks, and that who fetches rows asks."""
_AS_IT_IS = OF_NO_VALUES | {Tensor.detach}
"""What may be asked of a part as it is."""


class _Part(Tensor):
    """What takes part in functions of torch as a part of a table."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Let pass what treats every number by itself.

        Raises:
            ModelError: Naming the table, what it was given to, and the mend.
        """
        keywords = kwargs or {}
        if func in _AS_IT_IS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **keywords)
        if not _KNOWN.issuperset(types):
            return NotImplemented  # what is still under way comes first
        name = _name_of(func)
        with torch._C.DisableTorchFunctionSubclass():
            if func is torch.autograd.backward or name.startswith(_NUMBER_BY_NUMBER):
                return func(*args, **keywords)
            given = [*_tensors(args), *_tensors(keywords.values())]
            part = next(one for one in given if isinstance(one, _Part))
            if func is torch.autograd.grad:
                _refuse_grad(part)
            part._check_given(name, given)
            result = func(*args, **keywords)
            return part._checked(name, result) if isinstance(result, Tensor | tuple | list) else result

    def _check_given(self, name: str, given: Iterable[Tensor]) -> None:
        """Refuse what is not to see a part, alone or together with other tensors."""
        if name in _BY_NUMBER or name in _DRAWN:
            _refuse(self, name)

    def _checked(self, name: str, result: Any) -> Any:
        """What a function gave, if nobody need look at it."""
        return result


class _Guarded(_Part):
    """What must not meet tensors of other shapes, nor become one."""

    def _check_given(self, name: str, given: Iterable[Tensor]) -> None:
        super()._check_given(name, given)
        if not all(_fits(one, self) for one in given):
            _refuse(self, name)

    def _checked(self, name: str, result: Any) -> Any:
        if not isinstance(result, Tensor):
            if not all(_fits(one, self) for one in result if isinstance(one, Tensor)):
                _refuse(self, name)
            return result
        if not _fits(result, self):
            _refuse(self, name)
        if name == "data":
            return _become(PartData, result, self)  # an object of its own, unlike what an operation in place gives
        if result.requires_grad and result.grad_fn is not None:
            if result.dim():
                return _become(PartValues, result, self)
            if name not in _SUMS:  # to print it does no harm
                result.register_hook(lambda _: _refuse(self, name))
        return result


class TablePart(_Guarded, nn.Parameter):
    """A parameter that is a part of a table."""

    @staticmethod
    def of(parameter: nn.Parameter, split: Split) -> None:
        """Let a parameter know which part it holds, and guard it; it stays the object that it is."""
        mark(parameter, split)
        guard(parameter)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A plain parameter of the same numbers."""
        return memo.setdefault(id(self), nn.Parameter(self.detach().clone(), self.requires_grad))


class PartValues(_Guarded):
    """What was computed from a part, number by number, and has a gradient."""


class PartData(_Part):
    """`parameter.data` of a part."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """A plain tensor of the same numbers."""
        return memo.setdefault(id(self), self.clone())

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A pickle of a plain tensor."""
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


_KNOWN = {TablePart, PartValues, PartData, ShardGradient, Tensor, nn.Parameter}


def guard(parameter: nn.Parameter) -> None:
    """Guard a plain parameter that is a part."""
    if type(parameter) is nn.Parameter:
        object.__setattr__(parameter, "__class__", TablePart)


def unguard(parameter: nn.Parameter) -> None:
    """Let a part be as plain as any parameter: fused kernels of optimizers look at the class."""
    if type(parameter) is TablePart:
        object.__setattr__(parameter, "__class__", nn.Parameter)


def _become(kind: type[_Part], result: Tensor, part: Tensor) -> Tensor:
    split = split_of(part)
    assert split is not None, "only parts of tables are guarded"
    object.__setattr__(result, "__class__", kind)
    mark(result, split)
    return result


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Those among arguments, and in lists of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _fits(tensor: Tensor, part: Tensor) -> bool:
    return not tensor.dim() or tensor.shape == part.shape


def _name_of(func: Callable[..., Any]) -> str:
    """Of a function, or of the property that it reads."""
    name = getattr(func, "__name__", "")
    return getattr(func, "__self__", func).__name__ if name == "__get__" else name


def _refuse(part: Tensor, name: str) -> NoReturn:
    split = split_of(part)
    assert split is not None, "only parts of tables are guarded"
    how = placement_of(split)
    raise ModelError(
        f"{name} was given the table {split.name!r} as if all of it were here, but it is split by {how} over "
        f"{split.axis.size} ranks: look rows up with its module, take tulle.ShardedSoftmax for an output layer, keep "
        f"the table whole (another scheme than {how!r} in the plan), or take its .detach(), which is this rank's part"
    )


def _refuse_grad(part: Tensor) -> NoReturn:
    split = split_of(part)
    assert split is not None, "only parts of tables are guarded"
    raise ModelError(
        f"torch.autograd.grad was asked for the gradient of the table {split.name!r}, which is split over "
        f"{split.axis.size} ranks: gradients of its rows go to their owners, so call backward() and take .grad, or "
        "keep the table whole in the plan"
    )
