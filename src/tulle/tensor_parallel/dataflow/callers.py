"""`callers`: which modules the code of a model may call otherwise than as the forward that has them does.

    for layer in self.net: x = layer(x).softmax(-1)      # of a sequence whose own forward is never called
    self.inner.up(x)                                     # past the module that has it
    self.helper = partial(run, self.up)                  # by an object of which nobody knows what it does

Layers that are split together give a rank's part to whoever calls them. The code is read, not run, and taken to come
to more than it does: a variable may be all that it is somewhere, and an item any of all.
"""

from __future__ import annotations

import ast
import builtins
import gc
import inspect
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, cached_property
from types import FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ref

from torch import Tensor, nn

from tulle.tensor_parallel.dataflow.attributes import is_computed
from tulle.tensor_parallel.dataflow.sources import looked_at, names_at, names_of, source_of, told_by, written
from tulle.tensor_parallel.readers import methods_of, names_in_forward

UNKNOWN = 0
"""Who calls, where that is no module."""
_BEFORE = ("init", "reset", "tie")
"""How the names of methods begin that set a module up, underscores left out."""
_ITEMS = frozenset({"children", "named_children", "values", "items", "pop", "__getitem__", "__iter__"})
"""Methods of modules that give what is in them, next to all that is (`modules`)."""
_ALL = frozenset({"modules", "named_modules", "get_submodule"})
_CONTAINERS = nn.Sequential | nn.ModuleList | nn.ModuleDict
_PAIRS = ("enumerate", "zip", "items", "named_children", "named_modules")
"""What gives modules beside other things."""
_CALLS = frozenset({"forward", "__call__"})
_OWN = frozenset(vars(nn.Module()))
"""Attributes that every module has."""
_DEPTH = 3
_NESTED = 8
"""So many lists and mappings within one another are looked into."""
_KEEPS = list | tuple | set | frozenset | deque | Mapping
_NOTHING = type | ModuleType | Tensor | str | bytes | int | float | None
"""What has no module in it that it calls."""
_MATTERS = ast.Call | ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr | ast.For | ast.AsyncFor
_MATTERS |= ast.comprehension | ast.Return | ast.Yield | ast.Match
Modules = dict[int, nn.Module]


def callers(model: nn.Module) -> dict[int, set[int]]:
    """By identity of a module, that of the modules whose code calls it past the one that has it."""
    found: dict[int, set[int]] = {}
    modules = [*model.modules()]
    slots = Counter(id(child) for module in modules for child in module._modules.values())
    for module in modules:
        if slots[id(module)] > 1:
            found.setdefault(id(module), set()).add(UNKNOWN)
        for name, value in vars(module).items():
            for one in _held(value) if name not in _OWN else ():
                found.setdefault(id(one), set()).add(UNKNOWN)
        reached = names_in_forward(type(module))
        for name, method in _methods(type(module)).items():
            for caller, called in _Method(module, method, is_reached=name in reached).called():
                found.setdefault(id(called), set()).add(caller)
    return found


@cache
def _methods(kind: type[nn.Module]) -> dict[str, FunctionType]:
    """Those that count, by name, and what properties ask."""
    found: dict[str, FunctionType] = {}
    for name, method in methods_of(kind):
        if not name.lstrip("_").startswith(_BEFORE):
            found.setdefault(name, method)
    return found


class _Method:
    """What a method of a module comes to.

    Args:
        module: Whose method it is.
        function: As it was written.
        is_reached: Whether forward comes to it. Others set modules up, all of them perhaps.
        depth: How many methods ask for what it returns.
    """

    def __init__(self, module: nn.Module, function: FunctionType, *, is_reached: bool, depth: int = 0) -> None:
        self._module = module
        self._is_reached = is_reached
        self._names = names_at(function)
        self._depth = depth
        self._variables: dict[str, Modules] = {}
        source = source_of(function)
        self._nodes = () if source is None else _nodes_of(function)
        if source is not None:
            self._variables[names_of(source.args)[0]] = {id(module): module}
        for _ in range(_DEPTH):  # what is a variable of variables
            for node in self._nodes:
                self._bind(node)

    def returned(self) -> Modules:
        """Modules that it may return."""
        return self._all(one.value for one in self._nodes if isinstance(one, ast.Return | ast.Yield) and one.value)

    def called(self) -> Iterator[tuple[int, nn.Module]]:
        """Who calls, and what, but for children of the module."""
        own = {id(child) for child in self._module._modules.values()}
        for node in self._nodes:
            if isinstance(node, ast.Assign) and any(isinstance(one, ast.Attribute) for one in node.targets):
                yield from ((UNKNOWN, one) for key, one in self._of(node.value).items() if key not in own)
            if not isinstance(node, ast.Call):
                continue
            target = node.func
            if isinstance(target, ast.Attribute) and target.attr in _CALLS:
                target = target.value
            elif isinstance(target, ast.Attribute) and target.attr.startswith("register_"):  # a hook
                yield from ((UNKNOWN, one) for one in self._of(target.value).values() if one is not self._module)
            for key, one in self._of(target).items():
                if key not in own and key != id(self._module):
                    yield id(self._module), one
            handed = self._all([*node.args, *(one.value for one in node.keywords)]) if self._is_reached else {}
            if handed and not self._is_harmless(node, handed):
                itself = handed.pop(id(self._module), None)  # whose forward tells of its own children
                yield from ((UNKNOWN, one) for one in _within(handed.values()))
                for child in () if itself is None else itself.children():
                    yield from ((UNKNOWN, one) for one in child.modules() if one is not child)

    def _is_harmless(self, node: ast.Call, handed: Modules) -> bool:
        """Whether a call only looks at modules that it is given, or calls them."""
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if _is_of_python(node) or name == "checkpoint" or name.endswith("_checkpointing_func"):
            return True
        function = written(self._names.get(name)) if isinstance(node.func, ast.Name) else None
        looked = looked_at(function) if function is not None else None
        return looked is not None and not any(hasattr(one, name) for one in handed.values() for name in looked)

    def _bind(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                self._store(target, self._of(node.value))
        elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension) and (both := _zipped(node)):
            for target, of in both:
                self._store(target, _items(self._of(of)))
        elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
            is_pairs = isinstance(node.iter, ast.Call) and ast.unparse(node.iter.func).endswith(_PAIRS)
            self._store(node.target, _items(self._of(node.iter)), is_pairs=is_pairs)
        elif isinstance(node, ast.Match):
            inside = {id(one): one for module in self._of(node.subject).values() for one in module.modules()}
            names = [name for case in node.cases for one in ast.walk(case.pattern) for name in told_by(one)]
            for name in names:
                self._variables.setdefault(name, {}).update(inside)

    def _store(self, target: ast.expr, found: Modules, *, is_pairs: bool = False) -> None:
        if isinstance(target, ast.Name):
            self._variables.setdefault(target.id, {}).update(found)
        elif isinstance(target, ast.Tuple | ast.List):
            for one in target.elts:
                self._store(one, found if is_pairs else _items(found))
        elif isinstance(target, ast.Starred | ast.Subscript):
            self._store(target.value, found)

    def _all(self, nodes: Iterable[ast.expr]) -> Modules:
        found: Modules = {}
        for node in nodes:
            found |= self._of(node)
        return found

    def _of(self, node: ast.expr) -> Modules:
        """Modules that an expression may be, or have in it."""
        find = _EXPRESSIONS.get(type(node))
        if find is not None:
            return find(self, node)
        if isinstance(node, ast.IfExp):
            return self._all([node.body, node.orelse])
        if isinstance(node, ast.BoolOp | ast.Tuple | ast.List | ast.Set | ast.Starred | ast.NamedExpr | ast.BinOp):
            return self._all(one for one in ast.iter_child_nodes(node) if isinstance(one, ast.expr))
        if isinstance(node, ast.Dict):
            return self._all(node.values)
        if isinstance(node, ast.DictComp):
            return self._of(node.value)
        if isinstance(node, ast.ListComp | ast.GeneratorExp | ast.SetComp):
            return self._of(node.elt)
        return {}

    def _name(self, node: ast.Name) -> Modules:
        found = self._variables.get(node.id)
        value = self._names.get(node.id) if found is None else None
        return {id(value): value} if isinstance(value, nn.Module) else found or {}

    def _attribute(self, node: ast.Attribute) -> Modules:
        found: Modules = {}
        for module in self._of(node.value).values():
            found |= self._member(module, node.attr)
        return found

    def _member(self, module: nn.Module, name: str) -> Modules:
        child = module if name in _CALLS else module._modules.get(name)  # what it is called by is as good
        if child is not None:
            return {id(child): child}
        if name == "_modules":
            return _children(module)
        if name in vars(module) and name not in _OWN:
            return {id(one): one for one, _ in _reached(vars(module)[name])}
        kind = type(module)
        own = inspect.getattr_static(kind, name, None)
        if isinstance(own, property | cached_property):
            return self._returned(module, own.func if isinstance(own, cached_property) else own.fget)
        if own is not None and is_computed(own):  # what it gives, nobody knows
            return {id(one): one for one in module.modules()}
        if kind.__getattr__ is not nn.Module.__getattr__ and not hasattr(kind, name):  # of one within, perhaps
            return {id(one): one for inner in module.modules() if (one := inner._modules.get(name)) is not None}
        return {}

    def _returned(self, module: nn.Module, method: object) -> Modules:
        function = written(method)
        if function is None or self._depth == _DEPTH:
            return {}
        return _Method(module, function, is_reached=self._is_reached, depth=self._depth + 1).returned()

    def _item(self, node: ast.Subscript) -> Modules:
        return _items(self._of(node.value))

    def _asked(self, node: ast.expr, name: ast.expr | None) -> Modules:
        """What `getattr` gives, and `vars`: an attribute, or any if its name is not written there."""
        found: Modules = {}
        for module in self._of(node).values():
            is_told = isinstance(name, ast.Constant)
            found |= self._member(module, str(name.value)) if is_told else _children(module)
        return found

    def _call(self, node: ast.Call) -> Modules:
        asks = node.func.id if isinstance(node.func, ast.Name) and node.args else ""
        if asks in ("getattr", "vars"):
            return self._asked(node.args[0], node.args[1] if len(node.args) > 1 else None)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "__getattr__" and node.args:
            return self._asked(node.func.value, node.args[0])
        if not isinstance(node.func, ast.Attribute):
            given = [*node.args, *(one.value for one in node.keywords)]
            return _items(self._all(given)) if _is_of_python(node) else {}
        bases, name = self._of(node.func.value), node.func.attr
        found: Modules = {}
        for base in bases.values():
            if name in _ALL and self._is_reached:
                found |= {id(one): one for one in base.modules()}
            else:
                returned = {id(base): base} | _children(base) if name in _ITEMS else None
                found |= self._returned(base, _methods(type(base)).get(name)) if returned is None else returned
        return found


_EXPRESSIONS: Mapping[type[ast.expr], Callable[[_Method, Any], Modules]] = {
    ast.Name: _Method._name,
    ast.Attribute: _Method._attribute,
    ast.Subscript: _Method._item,
    ast.Call: _Method._call,
}


@cache
def _nodes_of(function: FunctionType) -> tuple[ast.AST, ...]:
    """Those of a function's code that matter."""
    source = source_of(function)
    return () if source is None else tuple(one for one in ast.walk(source) if isinstance(one, _MATTERS))


def _zipped(node: ast.For | ast.AsyncFor | ast.comprehension) -> list[tuple[ast.expr, ast.expr]]:
    """What a loop goes through side by side, and by which names."""
    call, target = node.iter, node.target
    is_zip = isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "zip"
    if not isinstance(call, ast.Call) or not is_zip or not isinstance(target, ast.Tuple):
        return []
    is_each = len(call.args) == len(target.elts) and not any(isinstance(one, ast.Starred) for one in call.args)
    return [*zip(target.elts, call.args, strict=True)] if is_each else []


def _is_of_python(node: ast.Call) -> bool:
    """Whether a function is called that looks at what it is given, or gives it one by one."""
    return isinstance(node.func, ast.Name) and hasattr(builtins, node.func.id) and node.func.id != "map"


def _children(module: nn.Module) -> Modules:
    return {id(child): child for child in module._modules.values() if child is not None}


def _items(modules: Modules) -> Modules:
    """What some modules are one by one: they may be in a list, or be lists."""
    found = {**modules}
    for module in modules.values():
        found |= _children(module) if isinstance(module, _CONTAINERS) or hasattr(type(module), "__getitem__") else {}
    return found


def _within(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """What a function may call that is given modules: what is in them, and in sequences and lists that are."""
    for module in modules:
        children = [child for child in module._modules.values() if child is not None]
        yield from children or [module]
        yield from _within(one for one in children if isinstance(one, _CONTAINERS))


def _held(value: Any) -> Iterator[nn.Module]:
    """Layers that an object calls, perhaps, that is no module: those that it has, and all of whose method it is."""
    for one, is_kept in _reached(value):
        if not one._modules or not is_kept:
            yield from _within([one])


def _reached(
    value: Any, depth: int = _DEPTH, *, is_kept: bool = True, around: tuple[int, ...] = ()
) -> Iterator[tuple[nn.Module, bool]]:
    """Modules that an object has somewhere in it, and whether lists and mappings alone have them."""
    if isinstance(value, nn.Module):
        yield value, is_kept
    elif id(value) in around or len(around) > _NESTED:
        return
    elif isinstance(value, _KEEPS):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _reached(one, depth, is_kept=is_kept, around=(*around, id(value)))
    elif depth and not isinstance(value, _NOTHING):
        for one in _parts(value):
            yield from _reached(one, depth - 1, is_kept=False, around=(*around, id(value)))


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, MethodType):
        return [value.__self__]
    if isinstance(value, ref):
        return [value()]
    if isinstance(value, FunctionType):  # which may come to all that is in a module
        held = [*inspect.getclosurevars(value).nonlocals.values(), *(value.__defaults__ or ()), value.__kwdefaults__]
        return [inner for one in held for inner in (one.modules() if isinstance(one, nn.Module) else [one])]
    return gc.get_referents(value)  # of objects, partial functions, iterators, what keeps results
