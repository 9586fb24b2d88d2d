"""`Expressions`: what the expressions of a function's body are, and its variables."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import FunctionType
from typing import Any

from torch import Tensor

from tulle.tensor_parallel.dataflow.attributes import attribute_of
from tulle.tensor_parallel.dataflow.calls import PEEKING, attends, call, items_of, iterated
from tulle.tensor_parallel.dataflow.entering import enter_masks, entered
from tulle.tensor_parallel.dataflow.flow import Frame
from tulle.tensor_parallel.dataflow.folds import asks_shape, compares
from tulle.tensor_parallel.dataflow.methods import call_of
from tulle.tensor_parallel.dataflow.notes import At, Said, Site
from tulle.tensor_parallel.dataflow.operators import (
    SIMPLE,
    SOME,
    calculated,
    compared,
    equal,
    has_in_it,
    is_stretches,
    is_told,
    item_of_object,
    lengths_taken,
    pieces,
    truth,
)
from tulle.tensor_parallel.dataflow.products import multiplied
from tulle.tensor_parallel.dataflow.shapes import stretch, taken, unpacked
from tulle.tensor_parallel.dataflow.sources import asked, home_of, names_at, names_of, names_within, told_by
from tulle.tensor_parallel.dataflow.stretches import stretch_of
from tulle.tensor_parallel.dataflow.values import (
    Attend,
    Fused,
    Given,
    Heads,
    Known,
    Number,
    Own,
    Parts,
    Plain,
    Several,
    Spread,
    Value,
    is_bare,
    is_split,
)

_WITH_TENSORS = Tensor | list | dict | tuple | set


class Expressions:
    """The variables of a function, and what its expressions are.

    Args:
        frame: In which it is called.
        function: The function.
        variables: Its arguments.
    """

    def __init__(self, frame: Frame, function: FunctionType, variables: dict[str, Value]) -> None:
        self._frame = frame
        self._function = function
        self._flow = frame.flow
        self._names = names_at(function)
        self._variables = variables
        self._outside: set[str] = {*names_within(function)}
        """Variables that other code sees too."""

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
            if not isinstance(one.ctx, ast.Load) or is_changed:
                self._variables[one.id] = Own()
        for one in ast.walk(node):
            for name in told_by(one):
                self._variables[name] = Own()

    def bind(self, target: ast.expr, value: Value) -> None:
        """Have what is assigned to be a value."""
        if isinstance(target, ast.Name):
            self._flow.escape(*([value] if target.id in self._outside else []))
            self._variables[target.id] = value
        elif isinstance(target, ast.Tuple | ast.List) and not any(isinstance(one, ast.Starred) for one in target.elts):
            for one, item in zip(target.elts, self._unpacked(value, len(target.elts)), strict=True):
                self.bind(one, item)
        elif isinstance(target, ast.Attribute) and (is_bare(value) or self._is_of_buffers(target, value)):
            self._flow.escape(value)
        elif isinstance(target, ast.Attribute) and self._keeps(target, value):
            pass
        elif isinstance(target, ast.Subscript):
            base = self.value(target.value)
            self._flow.escape(value, base, self.value(target.slice))  # who gave what has the item sees it changed
            self._change(base)
        else:
            self._flow.escape(value)
            self.give_up(target)

    def _is_own(self, target: ast.Attribute) -> bool:
        return self.value(target.value) == Known(self._frame.module)

    def _keeps(self, target: ast.Attribute, value: Value) -> bool:
        """Whether what is attended to is kept as an attribute of the module, which no code of its class asks for."""
        module = self._frame.module
        if not isinstance(value, Heads) or not value.is_weights or target.attr in asked(type(module)):
            return False
        if is_own := self._is_own(target):
            self._flow.kept[id(module), target.attr] = value
        return is_own

    def _is_of_buffers(self, target: ast.Attribute, value: Value) -> bool:
        """Whether what is stored is made of buffers, as an attribute of the module that is none of its layers."""
        is_made = isinstance(value, Given) and not value.names and not value.of_layers
        return is_made and self._is_own(target) and target.attr not in self._frame.module._modules

    def _change(self, value: Value) -> None:
        """A list may be another one from now on, by whatever name."""
        if isinstance(value, Several):
            self._variables |= {name: Own() for name, one in self._variables.items() if has_in_it(one, value)}

    def _unpacked(self, value: Value, count: int) -> Sequence[Value]:
        if isinstance(value, Several) and value.items:
            first, *others = value.items
            if isinstance(first, Spread) and count >= len(others) and not is_split(first):
                return [*[first.value] * (count - len(others)), *others]
            if len(value.items) == count:
                return value.items
        if isinstance(value, Fused) and (several := unpacked(value)) and len(several.items) == count:
            return several.items
        if is_split(value):
            self._flow.escape(value)
            return [Own()] * count
        if isinstance(value, Known) and (items := iterated(value)) and len(items) == count:
            return items
        return [self._flow.plain(value) if isinstance(value, Known) else value] * count

    def _constant(self, node: ast.Constant) -> Value:
        return Known(node.value)

    def _name(self, node: ast.Name) -> Value:
        if node.id in self._variables:
            return self._variables[node.id]
        found = self._names.get(node.id, getattr(builtins, node.id, None))
        if found is None or isinstance(found, _WITH_TENSORS):
            return Own()
        return self._flow.watched(home_of(self._function, node.id, found), node.id, Known(found))

    def _attribute(self, node: ast.Attribute) -> Value:
        return attribute_of(self._frame, self.value(node.value), node.attr)

    def truth(self, value: Value) -> bool | None:
        """Whether a test holds, if the code and the module's attributes say so."""
        self._flow.decide(value)
        return truth(value)

    def _at(self, node: ast.AST) -> At:
        return At(id(self._frame.module), self._function, node)

    def _be_at(self, node: ast.Call | ast.Subscript, *values: Value) -> None:
        """Note where in the code this is, and if nothing in these is split: a number there is that of wholes, too."""
        self._flow.at = self._at(node)
        self._flow.whole |= set() if any(map(is_split, values)) else {self._flow.at}

    def _call(self, node: ast.Call) -> Value:
        if (several := self._mapped(node)) is not None:
            return several
        arguments = [self.value(one) for one in node.args]
        keywords = {one.arg or "**": self.value(one.value) for one in node.keywords}
        if isinstance(node.func, ast.Attribute):
            base = self.value(node.func.value)
            if isinstance(base, Several):  # append, and the like
                self._change(base)
            if not isinstance(base, Known):
                self._be_at(node, base)
                return call_of(self._frame, base, node.func.attr, arguments, keywords)
            function = attribute_of(self._frame, base, node.func.attr)
        else:
            function = self.value(node.func)
        if isinstance(function, Known) and function.value in PEEKING and not arguments[1:]:
            self._flow.escape(*self._variables.values())
        self._be_at(node, *arguments, *keywords.values())
        if attends(function) and not any(isinstance(one, ast.Starred) for one in node.args):
            enter_masks(self._flow, self._at(node), node, 4 if isinstance(function, Attend) else 3, arguments, keywords)
        return call(self._frame, function, arguments, keywords)

    def _mapped(self, node: ast.Call) -> Value | None:
        """What `map` gives of a lambda and some things that are known one by one; None for other calls."""
        is_map = isinstance(node.func, ast.Name) and self._name(node.func) == Known(map)
        if not is_map or len(node.args) != 2 or not isinstance(node.args[0], ast.Lambda):
            return None
        names = node.args[0].args
        items = iterated(self.value(node.args[1]))
        if items is None or [one.arg for one in names.args] != names_of(names) or len(names.args) != 1:
            self.give_up(node)
            return Own()
        return self._each(ast.Name(names.args[0].arg, ast.Store()), items, node.args[0].body)

    def _comprehension(self, node: ast.ListComp | ast.GeneratorExp) -> Value:
        over = node.generators[0]
        items = iterated(self.value(over.iter))
        if len(node.generators) > 1 or over.ifs or over.is_async or items is None:
            self.give_up(node)
            return Own()
        if isinstance(node, ast.GeneratorExp):  # which asks for its variables when it is gone through
            self._outside |= {one.id for one in ast.walk(node.elt) if isinstance(one, ast.Name)}
            self._outside -= {one.id for one in ast.walk(over.target) if isinstance(one, ast.Name)}
        return self._each(over.target, items, node.elt)

    def _each(self, target: ast.expr, items: Sequence[Value], node: ast.expr) -> Value:
        """What an expression is for each of some things, by a name that is its own."""
        before, found = dict(self._variables), []
        for item in items:
            self.bind(target, item)
            found.append(self.value(node))
        stored = {one.id for one in ast.walk(target) if isinstance(one, ast.Name)}
        self._variables = {name: one for name, one in self._variables.items() if name not in stored}
        self._variables |= {name: one for name, one in before.items() if name in stored}
        return Several(tuple(found))

    def _several(self, node: ast.Tuple | ast.List) -> Value:
        return Several(tuple(self.value(one) for one in node.elts))

    def _spread(self, node: ast.Starred) -> Value:
        return Spread(self.value(node.value))

    def _binary_operation(self, node: ast.BinOp) -> Value:
        nodes = (node.left, node.right)
        values = [self.value(one) for one in nodes]
        if not isinstance(node.op, ast.MatMult):
            values = entered(self._flow, self._at(node), nodes, values)
        return self._binary(node.op, *values)

    def _binary(self, operator: ast.operator, left: Value, right: Value) -> Value:
        both = left, right
        is_of_tuples = any(isinstance(one, Several) for one in both)
        if isinstance(operator, ast.Add) and is_of_tuples and all(isinstance(one, Several | Plain) for one in both):
            return Several(tuple(item for one in both for item in pieces(one)))
        if isinstance(operator, ast.MatMult):
            return multiplied(self._frame, left, right)
        if all(isinstance(one, Known | Number | Plain) for one in both):
            return calculated(operator, left, right)
        return self._flow.elementwise(left, right)

    def _unary(self, node: ast.UnaryOp) -> Value:
        value = self.value(node.operand)
        if isinstance(value, Known) and isinstance(value.value, int | float):
            if isinstance(node.op, ast.USub):
                return Known(-value.value)
            self._flow.decide(value)
            return Known(not value.value) if isinstance(node.op, ast.Not) else Plain()
        return Plain() if isinstance(node.op, ast.Not) else self._flow.elementwise(value)

    def _boolean(self, node: ast.BoolOp) -> Value:
        values = [self.value(one) for one in node.values]
        truths = [self.truth(value) for value in values]
        decided = isinstance(node.op, ast.Or)
        if decided in truths:
            return values[truths.index(decided)] if None not in truths[: truths.index(decided)] else Known(decided)
        if None not in truths:
            return values[-1]
        if not all(map(is_bare, values)) and decided:  # one of them
            result = values[0]
            for other in values[1:]:
                result = self._flow.joined(result, other)
            return result
        return Plain()

    def _compare(self, node: ast.Compare) -> Value:
        values = [self.value(one) for one in (node.left, *node.comparators)]
        if len(values) == 2 and isinstance(node.ops[0], ast.Eq | ast.NotEq) and asks_shape(node.left):
            at = self._at(node.left)
            self._flow.whole |= set() if is_split(values[0]) else {at}
            if compares(self._flow, Site(at, node.left), *values):
                return Plain()
        if all(isinstance(one, ast.Is | ast.IsNot) for one in node.ops):
            self._flow.decide(*values)
            return compared(values, node.ops)
        if all(isinstance(one, Known) and isinstance(one.value, SIMPLE) for one in values) and len(values) == 2:
            self._flow.decide(*values)
            return equal(values, node.ops[0])
        return self._flow.plain(*values) if all(map(is_bare, values)) else self._flow.pure(*values, may_draw=False)

    def _either(self, node: ast.IfExp) -> Value:
        is_true = self.truth(self.value(node.test))
        if is_true is not None:
            return self.value(node.body if is_true else node.orelse)
        return self._flow.joined(self.value(node.body), self.value(node.orelse))

    def _item(self, node: ast.Subscript) -> Value:
        base, place = self.value(node.value), self.value(node.slice)
        self._be_at(node, base)
        if isinstance(base, Known) and (found := item_of_object(base, place)) is not None:
            self._flow.decide(place)
            return found
        if isinstance(place, Known) and isinstance(place.value, int):
            items = items_of(self._flow, base, place.value)
            if items is not None and -len(items) <= place.value < len(items):
                return items[place.value]
        if isinstance(base, Several) and isinstance(place, Known) and isinstance(place.value, slice):
            items = base.items if is_told(base, place.value) else items_of(self._flow, base, place.value)
            return self._flow.opaque(base) if items is None else Several(tuple(items[place.value]))
        if isinstance(base, Given) and isinstance(place, Known) and isinstance(place.value, str):
            return replace(base, is_within=True)
        if isinstance(base, Given) and is_bare(place):
            is_aligned, lengths = base.is_aligned and is_stretches(place), base.lengths | lengths_taken(place)
            return replace(base, is_aligned=is_aligned, lengths=lengths)
        if (found := self._of_parts(node, base, place)) is not None:
            return found
        return self._flow.plain(base) if is_bare(base) and is_bare(place) else self._flow.opaque(base, place)

    def _of_parts(self, node: ast.Subscript, base: Value, place: Value) -> Value | None:
        """What is taken of split work, if it is known."""
        if isinstance(base, Fused):
            return taken(base, place)
        if isinstance(base, Heads | Parts) and (found := stretch_of(self._flow, base, place)) is not None:
            return found
        return self._stretch(node, base) if isinstance(base, Parts) else None

    def _stretch(self, node: ast.Subscript, base: Parts) -> Value | None:
        """Some of the features that a layer gives: `[..., first:last]`."""
        if not isinstance(node.slice, ast.Tuple) or len(node.slice.elts) != 2:
            return None
        outer, inner = node.slice.elts
        if self.value(outer) != Known(...) or not isinstance(inner, ast.Slice) or inner.step is not None:
            return None
        at = self._at(node)
        bounds = [Said(self.value(one), Site(at, one) if one else None) for one in (inner.lower, inner.upper)]
        return stretch(self._flow, base, (bounds[0], bounds[1]))

    def _slice(self, node: ast.Slice) -> Value:
        bounds = [self.value(one) for one in (node.lower, node.upper, node.step)]
        if not all(map(is_bare, bounds)):
            return self._flow.opaque(*bounds)
        found = [one.value for one in bounds if isinstance(one, Known | Number)]
        return Known(slice(*found) if len(found) == 3 else SOME)

    def _text(self, node: ast.JoinedStr) -> Value:
        for one in (one for one in node.values if isinstance(one, ast.FormattedValue)):
            told = [self.value(one.value), *([] if one.format_spec is None else [self.value(one.format_spec)])]
            self._flow.escape(*(value for value in told if not is_bare(value)))
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
    ast.ListComp: Expressions._comprehension,
    ast.GeneratorExp: Expressions._comprehension,
}
