"""The code of forwards, as it was written."""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import cache
from types import FunctionType

from torch import nn

from tulle.derived import is_derived


def forward_of(module: nn.Module) -> FunctionType | None:
    """The forward of a module's own class, past what tulle has put before it; None if it is not to be read.

    One of torch's classes may read another way than is written; one that a module itself has may be anything.
    """
    if "forward" in vars(module):
        return None
    kinds = (kind for kind in type(module).__mro__ if not is_derived(kind))
    kind = next(kind for kind in kinds if "forward" in vars(kind))
    forward = inspect.unwrap(vars(kind)["forward"])
    is_readable = isinstance(forward, FunctionType) and not kind.__module__.startswith(("torch.", "tulle."))
    return forward if is_readable else None


@cache
def source_of(function: FunctionType) -> ast.FunctionDef | None:
    """The code of a function as it was written, or None if nobody has it."""
    try:
        lines = inspect.getsource(function)
    except (OSError, TypeError):
        return None
    try:
        (found, *_) = ast.parse(textwrap.dedent(lines)).body
    except (SyntaxError, ValueError):
        return None
    return found if isinstance(found, ast.FunctionDef) and found.args.args else None


def names_of(arguments: ast.arguments) -> list[str]:
    """All names of arguments, in order."""
    others = [one for one in (arguments.vararg, arguments.kwarg) if one]
    return [one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *others)]


def loaded(target: ast.expr) -> ast.expr:
    """What a target is before it is stored to."""
    return ast.parse(ast.unparse(target), mode="eval").body
