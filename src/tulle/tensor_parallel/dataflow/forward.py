"""`follow`: goes through the code of a module's forward, statement by statement, and says where its values flow.

The code is read as it was written (`inspect.getsource`), and not run: of `if`, both branches are followed where an
attribute of the module does not decide, and what is not understood is taken to need all of every value in it.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

from torch import nn

from tulle.tensor_parallel.dataflow.calls import call, filled, iterated
from tulle.tensor_parallel.dataflow.entering import entered
from tulle.tensor_parallel.dataflow.expressions import Expressions
from tulle.tensor_parallel.dataflow.flow import Flow
from tulle.tensor_parallel.dataflow.sources import (
    by_name,
    forward_of,
    imported_names,
    loaded,
    names_of,
    source_of,
    written,
)
from tulle.tensor_parallel.dataflow.values import (
    Given,
    Heads,
    Known,
    Own,
    Several,
    Value,
    is_split,
)

_DEPTH = 1
"""So many modules within one another are followed from one on: there, a layer may follow one of another module."""
_METHODS = 4
"""So many methods of one module that call each other."""


def follow(module: nn.Module) -> Flow:
    """Where the values of a module's forward flow, of those that come from its linear layers, or from others near."""
    flow = Flow()
    result = Frame(module, flow, 0).run({})
    items = iterated(result) if isinstance(result, Several) else None
    for place, one in enumerate([result] if items is None else items):
        if isinstance(one, Heads) and one.is_weights:
            flow.given_out[None if items is None else place] = one
        else:
            flow.escape(one)
    return flow


class Frame:
    """One module whose forward is followed.

    Args:
        module: The module.
        flow: What is found.
        depth: How many modules it is in that are followed too.
    """

    def __init__(self, module: nn.Module, flow: Flow, depth: int) -> None:
        self.module = module
        self.flow = flow
        self._depth = depth
        self._methods = 0

    def run(self, arguments: Mapping[str, Value]) -> Value:
        """What forward gives.

        Args:
            arguments: Of which a rank has parts; all others are whole.
        """
        if isinstance(self.module, nn.Sequential) and type(self.module).forward is nn.Sequential.forward:
            self.flow.frames[id(self.module)] = self.module
            value = arguments.get("input", Given(frozenset(["input"]), id(self.module), is_aligned=True))
            for name, child in self.module._modules.items():
                value = call(self, Known(child, (id(self.module), name)), [value], {})
            return value
        forward = forward_of(self.module)
        if forward is None or source_of(forward) is None:
            return self.flow.opaque(Known(self.module), *arguments.values())
        self.flow.frames[id(self.module)] = self.module
        return self.method(forward, arguments)

    def method(self, function: FunctionType, arguments: Mapping[str, Value]) -> Value:
        """What a function gives whose first argument is the module; arguments that are not told are the module's."""
        source = source_of(function)
        if source is None or self._methods >= _METHODS or _is_generator(source):
            return self.flow.opaque(Known(self.module), *arguments.values())
        first, *names = names_of(source.args)
        variables: dict[str, Value] = {
            name: Given(frozenset([name]), id(self.module), is_aligned=True) for name in names
        }
        return self._followed(function, source, variables | {first: Known(self.module)} | dict(arguments))

    def function(self, function: Any, given: Sequence[Value], keywords: Mapping[str, Value]) -> Value | None:
        """What a function gives that is no method, of which the code is there, or None if it is not looked into."""
        found = written(function) if isinstance(function, FunctionType) else None
        source = None if found is None else source_of(found)
        is_list = any(isinstance(one, Several) for one in (*given, *keywords.values()))  # which it may change
        if found is None or source is None or is_list or _is_generator(source) or self._methods >= _METHODS:
            return None
        parameters = [*inspect.signature(found).parameters.values()]
        variables = filled(parameters, given, keywords)
        is_fit = {*keywords} <= {*by_name(parameters)}
        if variables is None or not is_fit or found.__module__.startswith(("torch.", "einops")):
            return None
        return self._followed(found, source, variables)

    def _followed(self, function: FunctionType, source: ast.FunctionDef, variables: dict[str, Value]) -> Value:
        self._methods += 1
        body = _Body(self, function, variables)
        body.block(source.body)
        self._methods -= 1
        result: Value = body.returned[0] if body.returned else Known(None)
        for other in body.returned[1:]:
            result = self.flow.joined(result, other)
        return result

    def within(self, child: nn.Module, arguments: Mapping[str, Value], *, is_bare: bool = False) -> Value | None:
        """What the forward of a module gives that this one calls, or None if it is not looked into."""
        is_near = self._depth < _DEPTH and (holds_linear(child) or (is_bare and not child._modules))
        is_plain = self._depth < 2 * _DEPTH and arguments and next(child.parameters(), None) is None
        if not is_near and not is_plain:
            return None
        return Frame(child, self.flow, self._depth + 1).run(arguments)


class _Body(Expressions):
    """The body of a function, and what it returns."""

    def __init__(self, frame: Frame, function: FunctionType, variables: dict[str, Value]) -> None:
        super().__init__(frame, function, variables)
        self.returned: list[Value] = []

    def block(self, statements: Sequence[ast.stmt]) -> bool:
        """Follow statements; whether they end the function."""
        for statement in statements:
            follow_it = _STATEMENTS.get(type(statement))
            if follow_it is None:
                self.give_up(statement)
            elif follow_it(self, statement):
                return True
        return False

    # Statements: each says whether it ends the function.

    def _assign(self, node: ast.Assign | ast.AnnAssign) -> bool:
        if node.value is not None:
            value = self.value(node.value)
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                self.bind(target, value)
        return False

    def _augmented(self, node: ast.AugAssign) -> bool:
        before = self.value(ast.copy_location(loaded(node.target), node))
        if isinstance(before, Given):
            self._flow.escape(before)  # who gave it sees it changed
        values = [before, self.value(node.value)]
        if isinstance(before, Heads) and not isinstance(node.op, ast.MatMult):
            values = entered(self._flow, self._at(node), [node.value, node.value], values)
        after = self._binary(node.op, *values)
        if is_split(before):  # by other names too
            self._variables |= {name: after for name, one in self._variables.items() if one == before}
        self.bind(node.target, after)
        return False

    def _expression(self, node: ast.Expr) -> bool:
        self.value(node.value)
        return False

    def _return(self, node: ast.Return) -> bool:
        self.returned.append(self.value(node.value))
        return True

    def _raise(self, _: ast.Raise) -> bool:
        return True

    def _nothing(self, _: ast.stmt) -> bool:
        return False

    def _if(self, node: ast.If) -> bool:
        is_true = self.truth(self.value(node.test))
        if is_true is not None:
            return self.block(node.body if is_true else node.orelse)
        before = dict(self._variables)
        ends_first, first = self.block(node.body), self._variables
        self._variables = before
        ends_second = self.block(node.orelse)
        if ends_first or ends_second:
            self._variables = self._variables if ends_first else first
            return ends_first and ends_second
        self._join(first)
        return False

    def _join(self, other: dict[str, Value]) -> None:
        for name in {*self._variables, *other}:
            one, another = self._variables.get(name), other.get(name)
            if one is None or another is None:
                self._variables[name] = one or another or Own()
            else:
                self._variables[name] = self._flow.joined(one, another)

    def _for(self, node: ast.For) -> bool:
        items = None if node.orelse or _leaves_loop(node) else iterated(self.value(node.iter))
        if items is None:
            self.give_up(node)
            return False
        for item in items:
            self.bind(node.target, item)
            if self.block(node.body):
                return True
        return False

    def _assert(self, node: ast.Assert) -> bool:
        self.value(node.test)
        return False

    def _declare(self, node: ast.Global | ast.Nonlocal) -> bool:
        self._outside |= {*node.names}
        self._variables |= {name: Own() for name in node.names}
        return False

    def _delete(self, node: ast.Delete) -> bool:
        for target in node.targets:
            if isinstance(target, ast.Name):
                self._variables.pop(target.id, None)
            else:
                self.give_up(target)
        return False

    def _import(self, node: ast.Import | ast.ImportFrom) -> bool:
        for one, name in zip(node.names, imported_names(node), strict=True):
            path = one.name if one.asname else name
            if isinstance(node, ast.ImportFrom):
                found = getattr(sys.modules.get(node.module or ""), one.name, None) if not node.level else None
            else:
                found = sys.modules.get(path)
            self._variables[name] = Own() if found is None else Known(found)
        return False

    def _with(self, node: ast.With) -> bool:
        for item in node.items:
            self._flow.escape(self.value(item.context_expr))
            if item.optional_vars is not None:
                self.bind(item.optional_vars, Own())
        before = {name: one for name, one in self._variables.items() if is_split(one)}
        if self.block(node.body):
            return True
        after = {name: one for name, one in self._variables.items() if name in before and is_split(one)}
        for name, one in after.items():  # it may end early
            self._variables[name] = self._flow.joined(before[name], one)
        return False


_STATEMENTS: dict[type[ast.stmt], Callable[[_Body, Any], bool]] = {
    ast.Assign: _Body._assign,
    ast.AnnAssign: _Body._assign,
    ast.AugAssign: _Body._augmented,
    ast.Expr: _Body._expression,
    ast.Return: _Body._return,
    ast.Raise: _Body._raise,
    ast.Assert: _Body._assert,
    ast.Delete: _Body._delete,
    ast.Global: _Body._declare,
    ast.Nonlocal: _Body._declare,
    ast.Pass: _Body._nothing,
    ast.Import: _Body._import,
    ast.ImportFrom: _Body._import,
    ast.If: _Body._if,
    ast.For: _Body._for,
    ast.With: _Body._with,
}


def holds_linear(module: nn.Module) -> bool:
    """Whether a module has a linear layer of its own."""
    return any(isinstance(child, nn.Linear) or type(child).__name__ == "Conv1D" for child in module.children())


def _is_generator(source: ast.FunctionDef) -> bool:
    return any(isinstance(one, ast.Yield | ast.YieldFrom) for one in ast.walk(source))


def _leaves_loop(node: ast.For) -> bool:
    return any(isinstance(one, ast.Break | ast.Continue) for one in ast.walk(node))
