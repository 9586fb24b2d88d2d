"""`Guarded`: what torch's functions do with parts, and with what becomes of these."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from tulle.errors import ModelError
from tulle.parts.asked import COUNTS, counted
from tulle.parts.extents import (
    ALIKE,
    ASKS_SIZES,
    JOINED,
    LAID_OUT,
    asked_here,
    cut_in,
    extent_of_joined,
    held_alone,
    made_of,
    picks,
)
from tulle.parts.present import SETS_DATA, can_gather, done_with_wholes, gathered, with_wholes
from tulle.parts.reductions import Together, has_gradient_of_parts, number_of_whole
from tulle.parts.stated import warn_of_pickle
from tulle.parts.torch_functions import (
    DRAWS,
    EACH_BY_ITSELF,
    LEAVES_TORCH,
    LIKE,
    OF_NO_VALUES,
    ONE_NUMBER_OF_EACH,
    PLAIN,
    PRODUCTS,
    REDUCED,
    fits,
    goes_by_place,
    is_number,
    mixes,
    name_of,
    tensors_in,
    writes,
)
from tulle.parts.wholes import (
    KINDS,
    OF_ROWS,
    OWNER,
    PART_OF,
    Became,
    Flat,
    PartError,
    Whole,
    answer_of_whole,
    became,
    called,
    check_gradients,
    check_no_whole,
    extent_of_whole,
    has_rows_for,
    is_of_each_row,
    lies,
    local_of,
    may_be_equal,
    note_write,
    refuse,
    shape_of_whole,
)

T = TypeVar("T", bound=Tensor)
Function = Callable[..., Any]
Keywords = Mapping[str, Any]
WHOSE = "tulle_part"
"""The key under which what `state_dict()` gives says whose parts it has, where it has parts."""


class _Part(Tensor):
    """What takes part in functions of torch as a part."""

    @property
    def _kind(self) -> type[_Part]:
        """What becomes of it."""
        return PartData

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Sequence[type], args: Sequence[Any] = (), kwargs: Keywords | None = None
    ) -> Any:
        """Let pass what treats every number by itself; and what backward does with a part that forward was let have.

        To what would take a part for the whole that is given, if all ranks can gather it.

        Raises:
            ModelError: Naming the parameter, what it was given to, and the mend.
        """
        keywords = kwargs or {}
        if func in OF_NO_VALUES:  # first, as it is asked several times a step
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **keywords)
        if (given := with_wholes(func, args, keywords)) is not None:
            return func(*given[0], **given[1])
        if func in COUNTS:
            return counted(args[0], lambda: _together(args[0]))
        if func in OF_ROWS and (answer := answer_of_whole(func, args, keywords)) is not NotImplemented:
            return answer
        is_asked = name_of(func) in LIKE and not isinstance(args[0], _Part)
        if is_asked or torch._C._current_graph_task_id() != -1:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **keywords)
        if not _KNOWN.issuperset(types):
            return NotImplemented  # what is still under way comes first
        name = name_of(func)
        if name in ONE_NUMBER_OF_EACH:
            return [ONE_NUMBER_OF_EACH[name](one, *args[1:], **keywords) for one in args[0]]
        with torch._C.DisableTorchFunctionSubclass():
            try:
                return _done_with_parts(func, name, args, keywords)
            except PartError as error:
                if (given := gathered(func, args, keywords)) is None:
                    raise ModelError(str(error)) from error.__context__
        return done_with_wholes(func, *given, instead_of=next(iter(args), None))

    def _check_given(self, name: str, given: Sequence[Tensor], args: Sequence[Any], keywords: Keywords) -> None:
        """Refuse what is not to see a part, alone or together with other tensors."""
        is_taken = goes_by_place(name, self, args) or name in DRAWS or name in LEAVES_TORCH
        is_mixed = is_taken or any(mixes(name, self, dim, args, keywords) for dim in getattr(self, PART_OF).dims)
        if is_mixed and given[0] is self:
            refuse(self, name)
        if name not in PRODUCTS | JOINED:
            check_no_whole(name, [one for one in given if type(one) not in KINDS], self, getattr(self, PART_OF))

    def _checked(self, func: Function, result: Any, args: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        """What a function gave, if nobody need look at it; one number of all is that of the whole."""
        whole: Whole = getattr(self, PART_OF)
        if isinstance(result, bool) and name_of(func) in ALIKE:
            return bool(whole.over(torch.tensor(float(result), device=self.device), "min"))
        for one in result if isinstance(result, tuple | list) else ():
            self._checked(func, one, args, keywords)
        if not isinstance(result, Tensor) or type(result) in KINDS or name_of(func) in PLAIN:
            return result
        if not result.dim():
            return self._number(func, result, args, keywords)
        is_given = any(result is one for one in tensors_in(args))
        if type(result) is not Tensor or (is_given and (result._base is not None or not writes(func))):
            return result  # another's, or a view of what others know, that was written in
        if name_of(func) in JOINED:
            return _become(self._kind, result, self._joined(func, args[0], result))
        if result.shape != self.shape or picks(func, args):
            given = (cast("Tensor", self), tuple(args), dict(keywords))
            result, extent = made_of(func, extent_of_whole(whole), given, result)
            whole = became(whole, extent, self, name_of(func))
        if getattr(self, OWNER, None) is not None and result._is_view():
            setattr(result, OWNER, getattr(self, OWNER))
        return _become(self._kind, result, whole)

    def _joined(self, func: Function, given: Sequence[Tensor], result: Tensor) -> Whole:
        """What several parts in one tensor are a part of."""
        parts = [(one, whole) for one in given if (whole := getattr(one, PART_OF, None)) is not None]
        extent = extent_of_joined(func, [(one, extent_of_whole(whole)) for one, whole in parts], result)
        first: Whole = getattr(self, PART_OF)
        is_alike = len(parts) == len(given) and all(whole.axes == first.axes for _, whole in parts)
        return Became(first, replace(extent, is_known=extent.is_known and is_alike))

    def _number(self, func: Function, result: Tensor, args: Sequence[Any], keywords: Mapping[str, Any]) -> Tensor:
        """One number of the whole, from that of this part, or of what lies in it where no place is empty."""
        name, whole = name_of(func), cast("Whole", getattr(self, PART_OF))
        extent = extent_of_whole(whole)
        given, result = held_alone(func, extent, (cast("Tensor", self), tuple(args), dict(keywords)), result)
        has_gradient = torch.is_grad_enabled() and has_gradient_of_parts(name, *given)
        with torch.set_grad_enabled(has_gradient):
            number, found = result if has_gradient else result.detach(), None
            if extent.is_known:
                found = number_of_whole(name, *given, number, Together(whole.over, whole.count))
        if found is None:
            refuse(self, name)
        if result.requires_grad and not found.requires_grad:
            result.data.copy_(found)  # for who only looks at it
            result.register_hook(lambda _: refuse(self, name))
            return result
        return found

    def detach(self) -> Tensor:
        """A part, too; no `nn.Parameter`, whose gradients nobody would bring together."""
        if sys._getframe(1).f_code is nn.Parameter.__new__.__code__:
            raise ModelError(getattr(self, PART_OF).refusal("nn.Parameter"))
        return super().detach()

    def to_local(self) -> Tensor:
        """The numbers that lie on this rank, in the same memory and without a graph, as of torch's DTensor."""
        return local_of(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Of the same, with numbers of its own."""
        return memo.setdefault(id(self), self.detach().clone())

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A pickle of a plain tensor, or parameter, of which the log says once that it is a part."""
        warn_of_pickle(getattr(self, PART_OF).refusal("pickle"))
        plain = self.to_local()
        is_parameter = isinstance(self, nn.Parameter)
        return (nn.Parameter(plain, self.requires_grad) if is_parameter else plain).__reduce_ex__(protocol)


class Guarded(_Part):
    """What must not meet tensors of other shapes, nor become one."""

    @property
    def _kind(self) -> type[_Part]:
        """Guarded, too."""
        return PartValues

    def _check_given(self, name: str, given: Sequence[Tensor], args: Sequence[Any], keywords: Keywords) -> None:
        super()._check_given(name, given, args, keywords)
        if name in JOINED and self.dim() == 1:
            return
        others = [one for one in given if not is_of_each_row(one, self) and not has_rows_for(one, self)]
        unfit = [one for one in others if not fits(one, self)]
        if name in PRODUCTS or any(type(one) in KINDS or not is_number(one) for one in unfit):
            refuse(self, name)
        place = lies(getattr(self, PART_OF))
        if any(isinstance(one, _Part) and lies(getattr(one, PART_OF)) != place for one in others):
            refuse(self, name)

    def _checked(self, func: Function, result: Any, args: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        name = name_of(func)
        if func == SETS_DATA:
            note_write(self)
        if not isinstance(result, Tensor):
            return super()._checked(func, result, args, keywords)
        whole = getattr(self, PART_OF)
        if isinstance(whole, Flat) and name in LAID_OUT and result.shape == whole.made_of:
            return _become(GuardedData, result, whole.of)
        if not fits(result, self) and not self._is_of_known_shape(name, result, args):
            refuse(self, name)
        if name in ("data", "detach") or (name == "cpu" and result is not self and not result.requires_grad):
            setattr(result, OWNER, self if name == "data" else None)
            kind = PartData if name == "data" and not can_gather(self) else GuardedData
            return _become(kind, result, whole)
        return super()._checked(func, result, args, keywords)

    def _is_of_known_shape(self, name: str, result: Tensor, args: Sequence[Any]) -> bool:
        """Whether a result of another shape is of what is known; what goes along what is cut was refused before."""
        if name in REDUCED or any(one.shape == result.shape and has_rows_for(one, self) for one in tensors_in(args)):
            return True
        if name in LAID_OUT:
            is_flat = result.dim() == 1 and (isinstance(self, PartData) or can_gather(self))
            return is_flat or cut_in(result, self, extent_of_whole(getattr(self, PART_OF))) is not None
        return name in JOINED and result.dim() == self.dim() == 1


def _done_with_parts(func: Function, name: str, args: Sequence[Any], keywords: Keywords) -> Any:
    """What a function gives of parts.

    Raises:
        PartError: If that would not be what it gives of wholes.
    """
    if func is torch.autograd.backward:
        return func(*args, **keywords)
    given = [*tensors_in(args[:1] if name in LIKE else args), *tensors_in(keywords.values())]
    parts = [one for one in given if isinstance(one, _Part)]
    if name.startswith(EACH_BY_ITSELF):
        return _each_checked(func, args, called(parts[0], func, args, keywords))
    part = min(parts, key=lambda one: (not isinstance(one, Guarded), -one.numel()))
    if func is torch.autograd.grad:
        check_gradients(given)
        return _of_parts(keywords.get("inputs", args[1] if len(args) > 1 else ()), func(*args, **keywords))
    if name == "equal" and not may_be_equal((one, getattr(one, PART_OF, None)) for one in given):
        return False
    part._check_given(name, given, args, keywords)
    if name in ASKS_SIZES and args[0] is part and part.requires_grad and torch.is_grad_enabled():
        args = _asked_here(part, args)
    result = called(part, func, args, keywords)
    try:
        return part._checked(func, result, args, keywords)
    except PartError as error:
        if writes(func):  # it has, by now
            raise ModelError(str(error)) from None
        raise


def _asked_here(part: Tensor, args: Sequence[Any]) -> Sequence[Any]:
    """Arguments of what lays a part out, whose sizes may be those of all of it; without a graph that is gathered."""
    whole, shape = cast("Whole", getattr(part, PART_OF)), shape_of_whole(part)
    if shape is None or len(whole.dims) != 1:
        return args
    sizes = asked_here(args[1:], part, shape, whole.dims[0])
    return args if sizes is None else (part, sizes)


class PartValues(Guarded):
    """What was computed from a part, number by number."""


class PartData(_Part):
    """`parameter.data` of a part, or what was made of its numbers, each by itself, to be counted or summed."""

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Sequence[type], args: Sequence[Any] = (), kwargs: Keywords | None = None
    ) -> Any:
        """As of any part; what is written by way of `parameter.data` is counted, as torch does not."""
        with torch._C.DisableTorchFunctionSubclass():
            before = [(one, one._version) for one in tensors_in(args[:1]) if getattr(one, OWNER, None) is not None]
        result = super().__torch_function__(func, types, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            for owner in (getattr(one, OWNER) for one, version in before if one._version != version):
                note_write(owner)
        return result


class GuardedData(PartData, Guarded):
    """`parameter.detach()`, and `.data` where all ranks can gather the whole."""

    @property
    def _kind(self) -> type[_Part]:
        """The same."""
        return GuardedData


KINDS.update({PartValues, PartData, GuardedData})
_KNOWN: set[type] = {*KINDS, Tensor, nn.Parameter}


def guards(kind: type[T]) -> type[T]:
    """Have a class that derives from `Guarded` be one of the kinds of parts."""
    KINDS.add(kind)
    _KNOWN.add(kind)
    return kind


def meets_parts(kind: type[T]) -> type[T]:
    """Have parts take a class of tensors for plain ones where both are given to a function."""
    _KNOWN.add(kind)
    return kind


def _together(part: Tensor) -> Together:
    """How ranks make one number of all of what they have such parts of."""
    whole: Whole = getattr(part, PART_OF)
    if not extent_of_whole(whole).is_known:
        raise ModelError(whole.refusal("numel"))
    return Together(whole.over, whole.count)


def _become(kind: type[_Part], result: Tensor, whole: Whole) -> Tensor:
    object.__setattr__(result, "__class__", kind)
    setattr(result, PART_OF, whole)
    return result


def _each_checked(func: Function, args: Sequence[Any], results: Any) -> Any:
    """What a function gave that treats many tensors, each by itself: what it made, or wrote, of parts as parts."""
    for t, result in enumerate(results if isinstance(results, tuple | list) else args[0] if results is None else ()):
        given = [one[t] if isinstance(one, list | tuple) and one else one for one in args]  # or an empty list
        part = next((one for one in given if isinstance(one, _Part)), None)
        if part is not None and isinstance(result, Tensor):
            check_no_whole(name_of(func), [result], part, getattr(part, PART_OF))
            if result.shape == part.shape:
                part._checked(func, result, given, {})
    return results


def _of_parts(inputs: Any, gradients: Any) -> Any:
    """What `torch.autograd.grad` gave, those of parts as parts."""
    for part, gradient in zip([inputs] if isinstance(inputs, Tensor) else inputs, gradients, strict=True):
        if isinstance(part, _Part) and type(gradient) is Tensor:
            _become(PartData, gradient, getattr(part, PART_OF))
    return gradients
