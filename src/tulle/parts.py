"""`Part`: a parameter that holds a part of what it stands for, and is not to be taken for the whole.

A rank holds some rows of a split table, in an order of their own, or some columns, or its share of a weight that is
shared out. What treats every number by itself (an optimizer, weight decay, a penalty, a moving average) does to the
part what it would do to the whole. A product with it, a row read by its number, or numbers drawn anew would be others
than one process has, without a word:

    hidden @ words.weight.T,  F.linear(hidden, words.weight),  words.weight[3],  nn.init.normal_(words.weight)

These raise. Of `parameter.data` only rows read or written by number and numbers drawn are refused, of
`parameter.detach()` nothing: it is for who knows that only a part lies here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tulle.errors import ModelError

T = TypeVar("T", bound=Tensor)

_BY_NUMBER = {"__getitem__", "__setitem__"}
_DRAWN = {"uniform_", "normal_", "kaiming_uniform_", "bernoulli_", "exponential_", "log_normal_", "random_"}
"""Names of what writes random numbers, methods of tensors or functions of `torch.nn.init`."""
_SUMS = {"sum", "nansum"}
"""Names of what gives one number whose gradient is right for each part; its value is this rank's share."""
_AS_THEY_ARE = ("_foreach_", "_fused_", "_amp_", "new_")
"""How the names of functions begin that treat every number of many tensors by itself, or ask for dtype and device."""
OF_NO_VALUES = frozenset(
    accessor
    for name in ("grad", "requires_grad", "is_leaf", "_version", "dtype", "device")
    for accessor in (getattr(vars(torch._C.TensorBase)[name], kind) for kind in ("__get__", "__set__", "__delete__"))
)
"""What may be asked of any tensor as it is: all that `zero_grad` asks, and that who fetches rows asks."""
_AS_IT_IS = OF_NO_VALUES | {Tensor.detach}
"""What may be asked of a part as it is."""
_WHOLE = "_tulle_part_of"
"""The attribute by which a part knows what it is a part of."""


class Whole(Protocol):
    """What a parameter holds a part of."""

    def refusal(self, taker: str) -> str:
        """What an error says of a function that took the part for all of it, from the function's name on."""
        ...

    def refusal_of_gradient(self) -> str | None:
        """What an error says of `torch.autograd.grad` for it; None if that gives the part's."""
        ...


class _Part(Tensor):
    """What takes part in functions of torch as a part."""

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
            ModelError: Naming the parameter, what it was given to, and the mend.
        """
        keywords = kwargs or {}
        if func in _AS_IT_IS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **keywords)
        if not _KNOWN.issuperset(types):
            return NotImplemented  # what is still under way comes first
        name = _name_of(func)
        with torch._C.DisableTorchFunctionSubclass():
            if func is torch.autograd.backward or name.startswith(_AS_THEY_ARE):
                return func(*args, **keywords)
            given = [*_tensors(args), *_tensors(keywords.values())]
            part = next(one for one in given if isinstance(one, _Part))
            if func is torch.autograd.grad:
                _check_gradients(given)
                return func(*args, **keywords)
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


class Part(_Guarded, nn.Parameter):
    """A parameter that holds a part of what it stands for."""

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A plain parameter of the same numbers."""
        return memo.setdefault(id(self), nn.Parameter(self.detach().clone(), self.requires_grad))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A pickle of a plain parameter."""
        return nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)


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


_KNOWN = {Part, PartValues, PartData, Tensor, nn.Parameter}


def meets_parts(kind: type[T]) -> type[T]:
    """Have parts take a class of tensors for plain ones where both are given to a function."""
    _KNOWN.add(kind)
    return kind


def guard(parameter: nn.Parameter, whole: Whole) -> None:
    """Guard a plain parameter that holds a part; it stays the object that it is.

    Example:
        >>> class Halves:
        ...     def refusal(self, taker): return f"{taker} was given half of it"
        ...     def refusal_of_gradient(self): return None
        >>> weight = nn.Parameter(torch.ones(2, 4))
        >>> guard(weight, Halves())
        >>> (2 * weight).sum().backward()
        >>> torch.ones(1, 4) @ weight.T
        Traceback (most recent call last):
            ...
        tulle.errors.ModelError: T was given half of it
    """
    setattr(parameter, _WHOLE, whole)
    _guard_again([parameter])


def step_plainly(optimizer: Optimizer) -> None:
    """Have parts be plain parameters while an optimizer steps, as torch has fused kernels for these alone."""
    parts = [p for group in optimizer.param_groups for p in group["params"] if isinstance(p, Part)]
    if parts:
        optimizer.register_step_pre_hook(partial(_unguard, parts))
        optimizer.register_step_post_hook(partial(_guard_again, parts))


def _unguard(parts: Sequence[nn.Parameter], _: Optimizer, arguments: tuple[object, ...], keywords: object) -> None:
    if len(arguments) == 1 and not keywords:  # else a closure may call the model
        for part in parts:
            if type(part) is Part:
                object.__setattr__(part, "__class__", nn.Parameter)


def _guard_again(parts: Sequence[nn.Parameter], *_: object) -> None:
    for part in parts:
        if type(part) is nn.Parameter:
            object.__setattr__(part, "__class__", Part)


def _become(kind: type[_Part], result: Tensor, part: Tensor) -> Tensor:
    object.__setattr__(result, "__class__", kind)
    setattr(result, _WHOLE, getattr(part, _WHOLE))
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
    whole: Whole = getattr(part, _WHOLE)
    raise ModelError(whole.refusal(name))


def _check_gradients(given: Iterable[Tensor]) -> None:
    for part in given:
        whole: Whole | None = getattr(part, _WHOLE, None)
        if whole is not None and (refusal := whole.refusal_of_gradient()) is not None:
            raise ModelError(refusal)
