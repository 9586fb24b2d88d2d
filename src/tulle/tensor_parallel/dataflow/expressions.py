"""`Expressions`: what the expressions of a function's body are, and its variables."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from tulle.tensor_parallel.dataflow.calls import call, iterated, member
from tulle.tensor_parallel.dataflow.flow import Frame
from tulle.tensor_parallel.dataflow.methods import call_of, multiplied
from tulle.tensor_parallel.dataflow.values import (
    Attend,
    Given,
    Heads,
    Known,
    Number,
    Own,
    Plain,
    Product,
    Several,
    Spread,
    Value,
    is_bare,
    is_split,
)

_ABOUT = frozenset({"shape", "dtype", "device", "ndim", "requires_grad", "is_cuda", "layout", "itemsize"})
"""Attributes of tensors that tell nothing of their values."""
_ALL = slice(None)
_SOME = object()
"""A slice whose bounds are not known."""
_SIMPLE = int | float | str | type(None)


class Expressions:
    """The variables of a function, and what its expressions are.

    Args:
        frame: In which it is called.
        names: Of what it finds in its module.
        variables: Its arguments.
    """

    def __init__(self, frame: Frame, names: Mapping[str, Any], variables: dict[str, Value]) -> None:
        self._frame = frame
        self._flow = frame.flow
        self._names = names
        self._variables = variables

    def value(self, node: ast.expr | None) -> Value:
        """What an expression is."""
        if node is None:
            return Known(None)
        find = _EXPRESSIONS.get(type(node))
        if find is None:
            self.give_up(node)
            return Own()
        return find(self, node)

    def give_up(self, node: ast.AST) -> None:
        """All values that are named somewhere are needed there, and nothing is known of what it stores."""
        names = [one for one in ast.walk(node) if isinstance(one, ast.Name)]
        found = [self._variables[one.id] for one in names if one.id in self._variables]
        module = self._frame.module
        for attribute in (one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)):
            found.append(Known(module._modules.get(attribute)))
            self._flow.reads[id(module), attribute] += 1
        self._flow.calls += 1
        self._flow.escape(*found)
        for one in names:
            is_changed = isinstance(self._variables.get(one.id), Several)  # as a list may be
            if isinstance(one.ctx, ast.Store) or is_changed:
                self._variables[one.id] = Own()

    def bind(self, target: ast.expr, value: Value) -> None:
        """Have what is assigned to be a value."""
        if isinstance(target, ast.Name):
            self._variables[target.id] = value
        elif isinstance(target, ast.Tuple | ast.List) and not any(isinstance(one, ast.Starred) for one in target.elts):
            for one, item in zip(target.elts, self._unpacked(value, len(target.elts)), strict=True):
                self.bind(one, item)
        elif not is_bare(value):  # an attribute, an item
            self._flow.escape(value)
            self.give_up(target)

    def _unpacked(self, value: Value, count: int) -> Sequence[Value]:
        if isinstance(value, Several) and len(value.items) == count:
            return value.items
        if is_split(value):
            self._flow.escape(value)
            return [Own()] * count
        return [Plain() if isinstance(value, Known) else value] * count

    def _constant(self, node: ast.Constant) -> Value:
        return Known(node.value)

    def _name(self, node: ast.Name) -> Value:
        if node.id in self._variables:
            return self._variables[node.id]
        found = self._names.get(node.id, getattr(builtins, node.id, None))
        return Plain() if found is None else Known(found)

    def _attribute(self, node: ast.Attribute) -> Value:
        return self._attribute_of(self.value(node.value), node.attr)

    def _attribute_of(self, base: Value, name: str) -> Value:
        if isinstance(base, Known):
            found = member(base.value, name)
            if isinstance(found, Number):
                self._flow.reads[found.owner, found.name] += 1
                return replace(found, read=self._flow.reads[found.owner, found.name])
            return found
        if name in _ABOUT or isinstance(base, Plain):
            return Plain()
        if isinstance(base, Given):
            if base.of_layers and name in ("keys", "values"):
                return Heads(frozenset(), -3)
            return Given(base.names, base.frame, name == "layers")
        return self._flow.opaque(base)

    def _call(self, node: ast.Call) -> Value:
        arguments = [self.value(one) for one in node.args]
        keywords = {one.arg or "**": self.value(one.value) for one in node.keywords}
        if isinstance(node.func, ast.Attribute):
            base = self.value(node.func.value)
            if isinstance(base, Several) and isinstance(node.func.value, ast.Name):  # append, and the like
                self._variables[node.func.value.id] = Own()
            if not isinstance(base, Known):
                return call_of(self._frame, base, node.func.attr, arguments, keywords)
            return call(self._frame, self._attribute_of(base, node.func.attr), arguments, keywords)
        return call(self._frame, self.value(node.func), arguments, keywords)

    def _several(self, node: ast.Tuple | ast.List) -> Value:
        return Several(tuple(self.value(one) for one in node.elts))

    def _spread(self, node: ast.Starred) -> Value:
        return Spread(self.value(node.value))

    def _binary_operation(self, node: ast.BinOp) -> Value:
        return self._binary(node.op, self.value(node.left), self.value(node.right))

    def _binary(self, operator: ast.operator, left: Value, right: Value) -> Value:
        both = left, right
        is_of_tuples = any(isinstance(one, Several) for one in both)
        if isinstance(operator, ast.Add) and is_of_tuples and all(isinstance(one, Several | Plain) for one in both):
            return Several(tuple(item for one in both for item in _items(one)))
        if isinstance(operator, ast.MatMult):
            return multiplied(self._frame, left, right)
        if isinstance(operator, ast.Mult) and all(isinstance(one, Known | Number) for one in both):
            return _product(left, right)
        return self._flow.elementwise(left, right)

    def _unary(self, node: ast.UnaryOp) -> Value:
        value = self.value(node.operand)
        if isinstance(value, Known) and isinstance(value.value, int | float):
            if isinstance(node.op, ast.USub):
                return Known(-value.value)
            return Known(not value.value) if isinstance(node.op, ast.Not) else Plain()
        return Plain() if isinstance(node.op, ast.Not) else self._flow.elementwise(value)

    def _boolean(self, node: ast.BoolOp) -> Value:
        values = [self.value(one) for one in node.values]
        truths = [truth(value) for value in values]
        decided = isinstance(node.op, ast.Or)
        if decided in truths:
            return Known(decided)
        if None not in truths:
            return Known(not decided)
        if not all(map(is_bare, values)) and decided:  # one of them
            result = values[0]
            for other in values[1:]:
                result = self._flow.joined(result, other)
            return result
        return Plain()

    def _compare(self, node: ast.Compare) -> Value:
        values = [self.value(one) for one in (node.left, *node.comparators)]
        if all(isinstance(one, ast.Is | ast.IsNot) for one in node.ops):
            return _compared(values, node.ops)
        if all(isinstance(one, Known) and isinstance(one.value, _SIMPLE) for one in values) and len(values) == 2:
            return _equal(values, node.ops[0])
        return self._flow.pure(*values)

    def _either(self, node: ast.IfExp) -> Value:
        is_true = truth(self.value(node.test))
        if is_true is not None:
            return self.value(node.body if is_true else node.orelse)
        return self._flow.joined(self.value(node.body), self.value(node.orelse))

    def _item(self, node: ast.Subscript) -> Value:
        base, place = self.value(node.value), self.value(node.slice)
        if isinstance(place, Known) and isinstance(place.value, int):
            items = iterated(base)
            if items is not None and -len(items) <= place.value < len(items):
                return items[place.value]
        if isinstance(base, Several) and isinstance(place, Known) and isinstance(place.value, slice):
            return Several(base.items[place.value])
        if isinstance(base, Given) and is_bare(place):
            return base
        if isinstance(base, Known) and type(base.value).__name__ == "AttentionInterface":
            return Attend(takes_module=True)
        if isinstance(base, Heads) and _is_within_heads(place):
            return base
        return Plain() if is_bare(base) and is_bare(place) else self._flow.opaque(base, place)

    def _slice(self, node: ast.Slice) -> Value:
        bounds = [self.value(one) for one in (node.lower, node.upper, node.step)]
        if not all(map(is_bare, bounds)):
            return self._flow.opaque(*bounds)
        found = [one.value for one in bounds if isinstance(one, Known | Number)]
        return Known(slice(*found) if len(found) == 3 else _SOME)

    def _text(self, _: ast.JoinedStr) -> Value:
        return Plain()

    def _named(self, node: ast.NamedExpr) -> Value:
        value = self.value(node.value)
        self.bind(node.target, value)
        return value


_EXPRESSIONS: dict[type[ast.expr], Callable[[Expressions, Any], Value]] = {
    ast.Constant: Expressions._constant,
    ast.Name: Expressions._name,
    ast.Attribute: Expressions._attribute,
    ast.Call: Expressions._call,
    ast.Tuple: Expressions._several,
    ast.List: Expressions._several,
    ast.Starred: Expressions._spread,
    ast.BinOp: Expressions._binary_operation,
    ast.UnaryOp: Expressions._unary,
    ast.BoolOp: Expressions._boolean,
    ast.Compare: Expressions._compare,
    ast.IfExp: Expressions._either,
    ast.Subscript: Expressions._item,
    ast.Slice: Expressions._slice,
    ast.JoinedStr: Expressions._text,
    ast.NamedExpr: Expressions._named,
}


def truth(value: Value) -> bool | None:
    """Whether a test holds, if the code and the module's attributes say so."""
    if isinstance(value, Known) and isinstance(
        value.value, _SIMPLE | nn.Module | FunctionType | MethodType | ModuleType
    ):
        return bool(value.value) if isinstance(value.value, _SIMPLE) else True
    return None


def _compared(values: Sequence[Value], operators: Sequence[ast.cmpop]) -> Value:
    if len(values) == 2 and all(isinstance(one, Known) for one in values):
        first, second = (one.value for one in values if isinstance(one, Known))
        return Known((first is second) == isinstance(operators[0], ast.Is))
    return Plain()


def _items(value: Value) -> Sequence[Value]:
    return value.items if isinstance(value, Several) else [Spread(value)]


def _product(left: Value, right: Value) -> Value:
    if isinstance(left, Number) and isinstance(right, Number):
        return Product((left, right))
    factors = [one.value for one in (left, right) if isinstance(one, Known | Number)]
    return Known(factors[0] * factors[1]) if all(isinstance(one, int) for one in factors) else Plain()


def _is_within_heads(place: Value) -> bool:
    """Whether what is taken of four dimensions is a stretch of the last, of all of the others."""
    if not isinstance(place, Several) or not all(isinstance(one, Known) for one in place.items):
        return False
    *outer, last = [one.value for one in place.items if isinstance(one, Known)]
    return (last is _SOME or isinstance(last, slice)) and outer in ([...], [_ALL] * 3)


def _equal(values: Sequence[Value], operator: ast.cmpop) -> Value:
    first, second = (one.value for one in values if isinstance(one, Known))
    if isinstance(operator, ast.Eq | ast.NotEq):
        return Known((first == second) == isinstance(operator, ast.Eq))
    return Plain()
