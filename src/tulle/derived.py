"""`derived`: the class of a module with something put before it, made once, and gone with the class that it is of.

`put_before` has a module be of such a class, also if its forward was set on the object.
"""

from __future__ import annotations

import sys
from abc import ABCMeta
from collections.abc import Callable
from functools import cache
from inspect import CO_VARARGS, CO_VARKEYWORDS
from types import FunctionType
from typing import Any, NoReturn, SupportsIndex

from torch import nn

from tulle.errors import ModelError


class Copied:
    """Among what makes a copy of a module: a copy takes it along, a pickle, which would not find the class, refuses.

    Args:
        name: Of the module's class.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __deepcopy__(self, memo: object) -> Copied:
        """The same."""
        return self

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Say by name what to do instead."""
        raise ModelError(
            f"a {self._name} was to be pickled, as torch.save(model) does, but tulle has changed its class, and a rank "
            "may have parts only of its parameters: take tulle.save, or torch.save of tulle.full_state_dict(model)"
        )


def is_derived(kind: type) -> bool:
    """Whether `derived` has made a class."""
    return _MADE in vars(kind)


def kind_of_forward(module: nn.Module) -> type[nn.Module]:
    """The class that has the forward of a module's own class, past what tulle has put before it."""
    kinds = (kind for kind in type(module).__mro__ if not is_derived(kind) and not kind.__module__.startswith("tulle."))
    return next(kind for kind in kinds if "forward" in vars(kind))


class _Order(tuple[type, ...]):
    """Classes in the order in which attributes are looked for, of which one is found as `super()` finds it.

    That asks for the very class; `torch.compile`, which follows `super()` by `index`, for one that equals it.
    """

    def index(self, value: object, start: SupportsIndex = 0, stop: SupportsIndex = sys.maxsize, /) -> int:
        """The place of a class itself."""
        found = next((place for place in range(*slice(start, stop).indices(len(self))) if self[place] is value), None)
        if found is None:
            raise ValueError(f"{value!r} is not among {tuple(self)}")
        return found


class _Equal(ABCMeta):
    """The class of classes that `derived` makes: each equals the one it stands for, and other such ones of it.

    An `ABCMeta`, as libraries derive from a module's class and an abstract one of their own (`higher`).

    A penalty that goes over modules, or a forward, asks `type(module) == nn.Linear`, or `in (nn.Linear, nn.Conv2d)`.
    Their hash is their own: torch's `fully_shard` keeps the classes that it has made in a table by class, and would
    give a module the one that it made of the plain class, without what is put before it.
    """

    def __eq__(cls, other: object) -> bool:
        return isinstance(other, type) and _given(cls) is _given(other)

    __hash__ = type.__hash__

    @property
    def __mro__(cls) -> _Order:
        """The classes whose attributes it has, itself first."""
        return _Order(vars(type)["__mro__"].__get__(cls))

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """An object of the module's own class, of which nothing is put before: a slice of `nn.Sequential` makes one."""
        return _given(cls)(*args, **kwargs) if is_derived(cls) else super().__call__(*args, **kwargs)

    def __delattr__(cls, name: str) -> None:
        """As of any class; what is of the module's own class cannot be taken from there (torch's parametrizations)."""
        if is_derived(cls) and name not in vars(cls) and hasattr(cls, name):
            raise ModelError(
                f"{name!r} was to be taken from the class of a {cls.__name__}, as torch's remove_parametrizations "
                "does, but tulle has changed the module's class: do it before tulle.distribute, or to a plain model "
                "that has loaded tulle.full_state_dict(model)"
            )
        super().__delattr__(name)

    def mro(cls) -> list[type]:
        """What is put before a class is asked before it, also where it comes behind it among the bases."""
        if not is_derived(cls) or _is_laid_out_as_modules(cls):
            return super().mro()
        kind, before = cls.__bases__
        return [cls, *(one for one in before.__mro__ if one not in kind.__mro__), *kind.__mro__]


def _is_laid_out_as_modules(kind: type) -> bool:
    """Whether its objects may become ones of a class whose first base is another module's.

    Python allows it unless the class, or one that it derives from, has a base without attributes before the module's
    (`class Net(abc.ABC, nn.Module)`, `typing.Generic`): its objects' attributes are then of that class, not a module's.
    """
    base = kind.__base__
    while base is not None and base.__dictoffset__:
        kind, base = base, base.__base__
    return base is object


def _given(kind: type) -> type:
    """The class for which one that `derived` has made stands."""
    while is_derived(kind):
        kind = vars(kind)[_MADE]
    return kind


@cache
def _equal(kind: type[type]) -> type[type]:
    """`_Equal`, for classes whose own class is `kind`."""
    if issubclass(kind, _Equal):
        return kind
    return _Equal if issubclass(_Equal, kind) else type("_Equal", (_Equal, kind), {})


_MADE, _FORWARD = "_tulle_made", "_tulle_forward_of_object"


def derived(
    before: type, kind: type[nn.Module], *, name: str, module: str, given: type[nn.Module] | None = None
) -> type[nn.Module]:
    """The class that derives from both, the first first: the same for all modules of one class.

    A table of them would keep classes that a user makes in functions, with what their methods have seen there.
    A forward that takes whatever it is given, to pass it on, says that it takes what the class's own does. The class
    equals the one of the module (`type(module) == nn.Linear` goes on holding), though it is not the same.

    Args:
        before: What is put before the class.
        kind: The class of a module.
        name: That it gets.
        module: Where it is said to be defined.
        given: Which it equals; None for `kind`.

    Example:
        >>> class Doubled(nn.Module):
        ...     def forward(self, x): return 2 * super().forward(x)
        >>> kind = derived(Doubled, nn.Identity, name="Twice", module=__name__)
        >>> module = nn.Identity()
        >>> module.__class__ = kind
        >>> module(4), derived(Doubled, nn.Identity, name="Twice", module=__name__) is kind
        (8, True)
    """
    given = given or kind
    for one in type.__subclasses__(kind):  # which python holds weakly
        if vars(one).get(_MADE) is given and before in one.__bases__:
            return one
    bases = (before, kind) if _is_laid_out_as_modules(kind) else (kind, before)  # objects are laid out as the first's
    made = _equal(type(kind))(name, bases, {"__module__": module, _MADE: given, **_forward_of(before, kind)})
    if before.__reduce_ex__ is object.__reduce_ex__:  # else it says itself what is copied

        def reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
            make, arguments, *rest = super(made, self).__reduce_ex__(protocol)
            return _make, (Copied(name), make, *arguments), *rest

        setattr(made, "__reduce_ex__", reduce)  # noqa: B010 - of a class that was just made
    return made


def put_before(before: type, module: nn.Module, name: str | None = None) -> None:
    """Have a module be of its class with something put before it, in place.

    A forward that was set on the object, as tools do that wrap it (Accelerate's autocast), would hide what is put
    before the class's: it becomes what `super().forward` finds there.

    Args:
        before: What is put before the class.
        module: The module.
        name: Of the class that it gets; None for that of its own.

    Example:
        >>> class Doubled(nn.Module):
        ...     def forward(self, x): return 2 * super().forward(x)
        >>> module = nn.Identity()
        >>> module.forward = lambda x: x + 1
        >>> put_before(Doubled, module)
        >>> module(4)
        10
    """
    kind = type(module)
    own, where = kind.__name__, kind.__module__
    if (forward := module.__dict__.pop("forward", None)) is not None:
        assert _FORWARD not in module.__dict__, "nothing is set on an object between what is put before its class"
        module.__dict__[_FORWARD] = forward
        kind = derived(_OfObject, kind, name=own, module=where)
    object.__setattr__(module, "__class__", derived(before, kind, name=name or own, module=where))


class _OfObject(nn.Module):
    """What a module's class gains: its forward is the one that was set on the object."""

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """As it was set."""
        return self.__dict__[_FORWARD](*arguments, **keywords)


def _forward_of(before: type, kind: type[nn.Module]) -> dict[str, Any]:
    """What is put before a class's forward, for `inspect.signature` to see through.

    `transformers` generates from what a model says that it takes: without, masks of padded words are left out.
    """
    forward = vars(before).get("forward")
    if not isinstance(forward, FunctionType) or ~forward.__code__.co_flags & (CO_VARARGS | CO_VARKEYWORDS):
        return {}
    again = FunctionType(
        forward.__code__, forward.__globals__, forward.__name__, forward.__defaults__, forward.__closure__
    )
    vars(again)["__wrapped__"] = kind.forward
    return {"forward": again}


def _make(_: Copied, make: Callable[..., Any], *arguments: Any) -> Any:
    return make(*arguments)
