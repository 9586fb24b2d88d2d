"""What a step function is given, or refers to: models that it calls, and generators that it draws from."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from tulle.generators import GENERATORS
from tulle.pipeline.place import is_any_placed, placement_of
from tulle.pipeline.structure import flatten


def models_of(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[nn.Module]:
    """Models among a step's arguments; the others are looked for if none of these is placed, but some model is.

    Args:
        function: The user's: a function of a model, a closure, or a method of what has one.
        args: It is called with.
        kwargs: It is called with.
    """
    given = [*args, *kwargs.values()]
    models = [value for value in given if isinstance(value, nn.Module)]
    if not is_any_placed() or any(map(placement_of, models)):
        return models
    found = [*models, *(value for value in _named(function, given) if isinstance(value, nn.Module))]
    within = [module for model in found for module in model.modules() if placement_of(module)]
    return list(dict.fromkeys((*found, *within)))


def generators_of(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Random generators among a step's arguments, and in what these keep, or the function closes over or names.

    Args:
        function: The user's.
        args: It is called with.
        kwargs: It is called with.
    """
    given = [*args, *kwargs.values()]
    found = [*flatten(given)[0], *_named(function, given)]
    return list({id(one): one for one in found if isinstance(one, GENERATORS)}.values())


def _named(function: Callable[..., Any], given: Sequence[Any]) -> Iterator[Any]:
    """What a trainer keeps that the function is given, what it closes over, and what it calls by a global name."""
    for value in given:
        yield from vars(value).values() if hasattr(value, "__dict__") else ()
    plain = inspect.unwrap(function)
    for cell in getattr(plain, "__closure__", None) or ():
        if (kept := _content(cell)) is not None:
            yield kept
            yield from vars(kept).values() if hasattr(kept, "__dict__") else ()
    names = plain.__code__.co_names if inspect.isfunction(plain) else ()
    yield from (plain.__globals__[name] for name in names if name in plain.__globals__)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None
