"""`Rewriting`: has the code of a module's forward say a rank's number where it said how many heads or features it has.

    y = attend(q.view(b, t, self.heads, c // self.heads), ...)
    y = attend(q.view(b, t, self._tulle_counts[0](self.heads), c // self.heads), ...)

An attribute may be read for other things too, and a length may be one of the input: so it is said where a shape is
made, and nowhere else. The code is compiled anew as it was written, with its file and lines, globals and closure.
"""

from __future__ import annotations
import __future__

import ast
import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import CellType, CodeType, FunctionType
from typing import Any

from torch import nn

from tulle.derived import is_derived, put_before
from tulle.errors import ModelError
from tulle.tensor_parallel.dataflow.notes import Reached, Site
from tulle.tensor_parallel.dataflow.sources import forward_of, source_of

_COUNTS = "_tulle_counts"
"""The attribute by which a module holds what numbers in its code become."""
_KEY = "_tulle_rewritten"
"""The attribute by which a class says what is otherwise in it."""
_OWN = "_tulle_own_"
"""How names begin of methods that say a rank's numbers, next to those as they were, which others may call."""
_FUTURE = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
Places = tuple[tuple[ast.expr, tuple[int, ...]], ...]
Names = tuple[tuple[ast.expr, str], ...]


@dataclass(frozen=True, slots=True)
class Counted:
    """What a number becomes that says how much there is.

    Args:
        label: Whose forward says it.
        own: Numbers, and what each is for this rank.
        place: Where it is, from the end, in the shape that is said; None if the number is.
    """

    label: str
    own: tuple[tuple[int, int], ...]
    place: int | None = None

    def __call__(self, said: Any) -> Any:
        """The rank's number, or a shape with it.

        Raises:
            ModelError: If it is another one than when the layers were split.
        """
        number = said if self.place is None else said[self.place]
        for whole, own in self.own:
            if number == whole:
                return own if self.place is None else _with_length(said, self.place, own)
        raise ModelError(
            f"{self.label} says {number} where its layers, split together, give "
            f"{' or '.join(str(whole) for whole, _ in self.own)}: it was understood otherwise; leave it out with select"
        )


@dataclass(frozen=True, slots=True)
class AsWhole:
    """What a shape becomes that is compared with the whole's.

    Args:
        place: The dimension of which a rank has a part, from the end.
        whole: How long it is.
        own: How much of it this rank has.
    """

    place: int
    whole: int
    own: int

    def __call__(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The whole's."""
        return _with_length(shape, self.place, shape[self.place] // self.own * self.whole)


def _with_length(shape: Sequence[int], place: int, length: int) -> tuple[int, ...]:
    """A shape with another length at a place, from the end."""
    return (*shape[:place], length, *shape[len(shape) + place + 1 :])


@dataclass(slots=True)
class _Method:
    """A method that is written anew.

    Args:
        function: As it was written.
        raw: As its class has it, which may be decorated.
        name: By which it is called.
        places: What says numbers in it, and which these are.
        names: What calls other such methods in it, and by which names.
    """

    function: Any  # a FunctionType, which the checker of types would bind
    raw: Any
    name: str
    places: dict[ast.expr, tuple[int, ...]] = field(default_factory=dict)
    names: dict[ast.expr, str] = field(default_factory=dict)

    @property
    def key(self) -> tuple[Any, ...]:
        """What it is made of."""
        return self.name, self.raw, tuple(self.places.items()), frozenset(self.names.items())

    def made(self) -> Any:
        """Written anew."""
        function = self.function
        code = _code(function, tuple(self.places.items()), tuple(self.names.items()))
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        made = _again(function, code, tuple(cells[name] for name in code.co_freevars))
        return _decorated(self.raw, function, made)


class Rewriting:
    """A module's code, with other numbers.

    Args:
        module: The module.
        sites: Where numbers are said.
        reached: From where methods are called, by the module's identity; none if forward alone says numbers.
    """

    def __init__(self, module: nn.Module, sites: Sequence[Site], reached: Reached | None = None) -> None:
        self._module = module
        self._reached = reached or {}
        self._forward = forward_of(module)
        self._sites = sites
        self._methods: dict[FunctionType, _Method] = {}

    def is_possible(self) -> bool:
        """Whether all methods that say a number, and all by which forward comes to them, can be written anew."""
        return not is_derived(type(self._module)) and all(self._find(one.at.function) for one in self._sites)

    def apply(self, counts: Sequence[Callable[[Any], Any]]) -> None:
        """Have the module be of a class with the code written anew.

        Args:
            counts: What each number becomes, or what else is said there.
        """
        is_possible = self.is_possible()
        assert is_possible, "else what says the numbers is left as it is"
        self._module.__dict__[_COUNTS] = tuple(counts)
        put_before(self._kind(), self._module)

    def _find(self, function: FunctionType) -> bool:
        if function in self._methods:
            return True
        calls = self._reached.get((id(self._module), function), set())
        is_reached = function is self._forward or bool(calls)
        if not is_reached or None in calls or not is_writable(function):
            return False
        targets = [(at.function, at.node.func) for at in calls if at and isinstance(at.node, ast.Call)]
        name = "forward" if function is self._forward else ast.unparse(targets[0][1]).rpartition(".")[2]
        raw = inspect.getattr_static(type(self._module), name)
        own = self._methods[function] = _Method(function, raw, name if function is self._forward else _OWN + name)
        for place, site in enumerate(self._sites):
            if site.at.function is function:
                own.places[site.node] = (*own.places.get(site.node, ()), place)
        if not all(self._find(caller) for caller, _ in targets):
            return False
        for caller, target in targets:
            self._methods[caller].names[target] = own.name
        return _decorated(raw, function, function) is not None

    def _kind(self) -> type[nn.Module]:
        """What is put before the module's class: the same for all modules of that class of which it is so."""
        key = frozenset(one.key for one in self._methods.values())
        for one in type.__subclasses__(type(self._module)):
            for base in one.__bases__:
                if vars(base).get(_KEY) == key:
                    return base
        methods = {one.name: one.made() for one in self._methods.values()}
        return type("_Rewritten", (nn.Module,), {"__module__": __name__, _KEY: key, **methods})


@cache
def is_writable(function: FunctionType) -> bool:
    """Whether a method's code can be compiled anew: its module has one name in it, and no name is private."""
    source = source_of(function)
    if source is None:
        return False
    itself, nodes = source.args.args[0].arg, [*ast.walk(source)]
    names = {one.id for one in nodes if isinstance(one, ast.Name)} | {
        one.arg for one in nodes if isinstance(one, ast.arg)
    }
    names |= {one.attr for one in nodes if isinstance(one, ast.Attribute)}
    stored = [
        one for one in nodes if isinstance(one, ast.Name) and one.id == itself and not isinstance(one.ctx, ast.Load)
    ]
    arguments = [one for one in nodes if isinstance(one, ast.arg) and one.arg == itself]
    is_private = any(name.startswith("__") and not name.endswith("__") for name in names)
    return not stored and len(arguments) == 1 and not is_private


class _Wrapping(ast.NodeTransformer):
    """Has what says a number be called with what it becomes.

    Args:
        itself: The name of the module.
        places: By identity of what says one, which numbers it says.
    """

    def __init__(self, itself: str, places: dict[int, tuple[int, ...]]) -> None:
        self._itself = itself
        self._places = places

    def visit(self, node: ast.AST) -> ast.AST:
        """What becomes of a node."""
        found = self.generic_visit(node)
        for place in self._places.get(id(node), ()):
            assert isinstance(found, ast.expr), "a number is said by an expression"
            counts = ast.Attribute(ast.Name(self._itself, ast.Load()), _COUNTS, ast.Load())
            becomes = ast.Subscript(counts, ast.Constant(place), ast.Load())
            found = ast.copy_location(ast.Call(becomes, [found], []), node)
        return found


@cache
def _code(function: FunctionType, places: Places, names: Names) -> CodeType:
    """The code of a function in which numbers, and the names of methods, are others."""
    source, copies = source_of(function), dict[int, Any]()
    assert source is not None, "its code was read"
    tree = copy.deepcopy(source, copies)
    for node, name in names:
        copies[id(node)].attr = name
    tree = _Wrapping(source.args.args[0].arg, {id(copies[id(node)]): found for node, found in places}).visit(tree)
    assert isinstance(tree, ast.FunctionDef), "a function stays one"
    tree.decorator_list, tree.returns = [], None
    tree.args.defaults, tree.args.kw_defaults = [], [None] * len(tree.args.kwonlyargs)
    for one in ast.walk(tree.args):
        if isinstance(one, ast.arg):
            one.annotation = None
    around = ast.parse(f"def around({', '.join(function.__code__.co_freevars)}): pass")
    (outer,) = around.body
    assert isinstance(outer, ast.FunctionDef), "it is written above"
    outer.body = [tree]
    ast.increment_lineno(ast.fix_missing_locations(tree), function.__code__.co_firstlineno - 1)
    flags = function.__code__.co_flags & _FUTURE
    compiled = compile(around, function.__code__.co_filename, "exec", flags=flags, dont_inherit=True)
    return _inner(_inner(compiled)).replace(co_qualname=function.__code__.co_qualname)


def _inner(code: CodeType) -> CodeType:
    return next(one for one in code.co_consts if isinstance(one, CodeType))


def _again(function: FunctionType, code: CodeType, closure: tuple[CellType, ...]) -> FunctionType:
    """A function with another code, or closure."""
    made = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
    made.__kwdefaults__, made.__annotations__ = function.__kwdefaults__, function.__annotations__
    made.__module__, made.__qualname__, made.__doc__ = function.__module__, function.__qualname__, function.__doc__
    vars(made).update(vars(function))
    return made


def _decorated(raw: Any, function: FunctionType, made: FunctionType) -> FunctionType | None:
    """A function in the place of one that decorators are around; None if these do not hold it where it can be."""
    if raw is function:
        return made
    inner = getattr(raw, "__wrapped__", None)
    new = None if inner is None or not isinstance(raw, FunctionType) else _decorated(inner, function, made)
    if new is None:
        return None
    held = raw.__closure__ or ()
    cells = tuple(CellType(new) if _holds(cell, inner) else cell for cell in held)
    if all(one is cell for one, cell in zip(cells, held, strict=True)):
        return None
    again = _again(raw, raw.__code__, cells)
    vars(again)["__wrapped__"] = new
    return again


def _holds(cell: CellType, value: Any) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError:  # it is empty
        return False
