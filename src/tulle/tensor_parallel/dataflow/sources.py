"""The code of forwards, as it was written."""

from __future__ import annotations

import ast
import dis
import inspect
import sys
import textwrap
from collections import ChainMap
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from types import CellType, FunctionType, ModuleType
from typing import Any

from torch import nn

from tulle.derived import kind_of_forward

_KNOWN = ("torch.", "transformers.", "contextlib")
"""Whose decorators call what they are around and no more."""


def forward_of(module: nn.Module) -> FunctionType | None:
    """The forward of a module's own class, past what tulle has put before it; None if it is not to be read.

    One of torch's classes may read another way than is written; one that a module itself has may be anything.
    """
    if "forward" in vars(module):
        return None
    kind = kind_of_forward(module)
    forward = written(vars(kind)["forward"])
    is_readable = forward is not None and not kind.__module__.startswith("torch.")
    return forward if is_readable and is_called_plainly(kind) else None


def is_called_plainly(kind: type[nn.Module]) -> bool:
    """Whether a call of a module is one of its forward, as of `transformers`' layers that may be recomputed."""
    return kind.__call__ is nn.Module.__call__ or kind.__call__.__module__.startswith(_KNOWN)


def written(function: object) -> FunctionType | None:
    """A function as it was written, or None if a decorator, but for one that is known, may do more than call it."""
    while (inner := getattr(function, "__wrapped__", None)) is not None:
        home = getattr(function, "__globals__", {}).get("__name__", "")
        if not home.startswith(_KNOWN):
            return None
        function = inner
    return function if isinstance(function, FunctionType) else None


def names_at(function: FunctionType) -> Mapping[str, Any]:
    """What a function finds by name that is none of its variables: what is around it, and what its module has."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return ChainMap({name: _content(cell) for name, cell in cells}, function.__globals__)


def home_of(function: FunctionType, name: str, value: object) -> ModuleType | None:
    """The module of Python in which a function finds a value by a name, where another may be later."""
    home = sys.modules.get(function.__globals__.get("__name__", ""))
    return home if home is not None and vars(home).get(name) is value else None


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


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


def positional(parameters: Iterable[inspect.Parameter]) -> list[str]:
    """Names of those that may be given by their place."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [one.name for one in parameters if one.kind in kinds]


def by_name(parameters: Iterable[inspect.Parameter]) -> list[str]:
    """Names of those that may be given by these."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [one.name for one in parameters if one.kind in kinds]


def imported_names(node: ast.Import | ast.ImportFrom) -> list[str]:
    """What an import stores, in order."""
    return [(one.asname or one.name).partition(".")[0] for one in node.names]


def told_by(node: ast.AST) -> Sequence[str]:
    """Names that a node of the code stores but by a name's own node: of functions, classes, what is caught."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return imported_names(node)
    if isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
        return [node.name]
    if isinstance(node, ast.MatchMapping) and node.rest:
        return [node.rest]
    return [*node.names] if isinstance(node, ast.Global | ast.Nonlocal) else []


def loaded(target: ast.expr) -> ast.expr:
    """What a target is before it is stored to."""
    return ast.parse(ast.unparse(target), mode="eval").body


_LOOKS = ("isinstance", "hasattr", "getattr")
"""Functions of Python that look at an object, and call nothing in it."""


@cache
def looked_at(function: FunctionType) -> frozenset[str] | None:
    """Names of what a function asks its arguments for; None if it does more than to ask, or to see of which class."""
    source = source_of(function)
    if source is None or not {*_LOOKS}.isdisjoint(names_at(function)):
        return None
    calls = [one for one in ast.walk(source) if isinstance(one, ast.Call) and ast.unparse(one.func) in _LOOKS]
    asked = [name for one in calls if ast.unparse(one.func) != "isinstance" for name in one.args[1:2]]
    names = [one.value for one in asked if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    arguments, seen = {*names_of(source.args)}, {id(one.args[0]) for one in calls if one.args}
    uses = [one for one in ast.walk(source) if isinstance(one, ast.Name) and one.id in arguments]
    return frozenset(names) if len(names) == len(asked) and all(id(one) in seen for one in uses) else None


_OF_SEVERAL = frozenset(
    {"mean", "var", "std", "sum", "norm", "amax", "amin", "max", "min", "softmax", "cumsum", "flip"}
)
"""Methods and functions of tensors that look at more than one number."""
_MOVES = frozenset(["cat", "chunk", "concat", "roll", "sort", "split", "stack", "tensor_split", "topk", "unbind"])
"""Those that take tensors to pieces, or put them together, along a dimension."""
LAST = ("-1", "(-1,)", "[-1]")
"""How code says the last dimension alone."""


@cache
def looks_at_last(function: FunctionType, names: frozenset[str] = frozenset()) -> bool:
    """Whether a function, as it is written, looks at several numbers along the last dimension only.

    Args:
        function: The function.
        names: Of its arguments, whose dimensions are to stay where they are, but for the last.
    """
    source = source_of(function)
    if source is None:
        return False
    nodes = [*ast.walk(source)]
    made = _made_of(names, nodes)
    calls = [(one, one.func.attr) for one in nodes if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute)]
    several = [one for one, name in calls if name in _OF_SEVERAL or (name in _MOVES and made & _named(one))]
    items = [one for one in nodes if isinstance(one, ast.Subscript) and made & _named(one.value)]
    return all(
        any(ast.unparse(value) in LAST for value in (*one.args, *(own.value for own in one.keywords)))
        for one in several
    ) and all(map(_is_of_last, items))


def _named(node: ast.AST) -> frozenset[str]:
    """Names in an expression, but for those whose shape alone is asked for."""
    if isinstance(node, ast.Attribute) and node.attr in ("shape", "dtype", "device", "ndim"):
        return frozenset()
    own = frozenset([node.id]) if isinstance(node, ast.Name) else frozenset[str]()
    return own.union(*map(_named, ast.iter_child_nodes(node)))


def _made_of(names: frozenset[str], nodes: Sequence[ast.AST]) -> frozenset[str]:
    """Names, and those of what is made of them."""
    assigned = [one for one in nodes if isinstance(one, ast.Assign)]
    while more := {name for one in assigned if names & _named(one.value) for to in one.targets for name in _named(to)}:
        if more <= names:
            break
        names = names.union(more)
    return names


def _is_of_last(item: ast.Subscript) -> bool:
    """Whether an index takes some of the last dimension, of four, and all of the others."""
    places = item.slice.elts if isinstance(item.slice, ast.Tuple) else [item.slice]
    *outer, _ = [ast.unparse(one) for one in places]
    return outer == ["..."] or (len(outer) == 3 and {*outer} == {":"})


_DEFINES = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef


@cache
def names_within(function: FunctionType) -> frozenset[str]:
    """Names in the functions that a function defines, which may ask for its variables after these are others.

    Those of their arguments are left out.
    """
    source = source_of(function)
    nodes = [] if source is None else [one for part in source.body for one in ast.walk(part)]
    found: set[str] = set()
    for node in (one for one in nodes if isinstance(one, _DEFINES)):
        own = {*names_of(node.args)} if not isinstance(node, ast.ClassDef) else set[str]()
        inner = [*ast.walk(node)]
        found |= {one.id for one in inner if isinstance(one, ast.Name)} - own
        found = found.union(*(one.names for one in inner if isinstance(one, ast.Nonlocal)))
    return frozenset(found)


@cache
def stored(kind: type[nn.Module]) -> frozenset[str]:
    """Names of attributes that methods of a class store, but for the one that makes it."""
    return _names_in(kind, ("STORE_ATTR",))


@cache
def asked(kind: type[nn.Module]) -> frozenset[str]:
    """Names of attributes that methods of a class ask for."""
    return _names_in(kind, ("LOAD_ATTR", "LOAD_METHOD"))


def _names_in(kind: type[nn.Module], operations: Collection[str]) -> frozenset[str]:
    methods = [one for base in kind.__mro__ if not base.__module__.startswith("torch.") for one in vars(base).items()]
    codes = [method.__code__ for name, method in methods if isinstance(method, FunctionType) and name != "__init__"]
    return frozenset(one.argval for code in codes for one in dis.get_instructions(code) if one.opname in operations)
