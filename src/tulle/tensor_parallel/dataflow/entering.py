"""What is whole on every rank and meets heads where it is made: it enters there, as arguments do with their forward.

    scores + self.bias_of_positions()      a table's, with a dimension of heads
    queries * self.temperature             a parameter's, of each head or of all

The code is written anew there: each rank takes what belongs to its own heads, and gradients are those of all.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

from tulle.tensor_parallel.dataflow.flow import Flow
from tulle.tensor_parallel.dataflow.notes import At, Count, Site
from tulle.tensor_parallel.dataflow.values import Given, Heads, Own, Value, is_bare, is_split, layers_of

MASKS = ("attention_mask", "attn_mask", "position_bias")
"""By what names functions that attend are given masks, and biases of positions."""
ENTERED = Given(frozenset(), 0)
"""What it is from there on: nothing but what meets heads."""


def entered(flow: Flow, at: At, nodes: Sequence[ast.expr], values: Sequence[Value]) -> list[Value]:
    """Values that meet in an operation, of which those that are whole have entered.

    Args:
        flow: What is known.
        at: The operation.
        nodes: What it is of.
        values: The same, as far as they are known.
    """
    heads = [one for one in values if isinstance(one, Heads) and one.layers]
    dims = {one.dim for one in heads}
    if not heads and any(not is_bare(one) for one in values):
        flow.whole.add(at)
    if len(dims) != 1 or any(is_split(one) and one not in heads for one in values):
        return [*values]
    found = [*values]
    for place, one in enumerate(values):
        if _enters(flow, one, heads):
            flow.spoiled |= one.layers if isinstance(one, Own) else set()
            flow.note(Site(at, nodes[place]), Count("enter", None, layers_of(heads), place=min(dims)))
            found[place] = ENTERED
    return found


def enter_masks(
    flow: Flow, at: At, call: ast.Call, place: int, arguments: list[Value], keywords: dict[str, Value]
) -> None:
    """Have masks that are whole enter where a function is given them that attends: at a place, or by a name."""
    heads = [one for one in (*arguments, *keywords.values()) if isinstance(one, Heads)]
    named = {one.arg: one.value for one in call.keywords}
    for name in (name for name in MASKS if name in named):
        *_, keywords[name] = entered(flow, at, [call] * len(heads) + [named[name]], [*heads, keywords[name]])
    for node in call.args[place : place + 1]:
        *_, arguments[place] = entered(flow, at, [call] * len(heads) + [node], [*heads, arguments[place]])


def _enters(flow: Flow, value: Value, heads: Sequence[Heads]) -> bool:
    """Whether a value is whole, and made of more than arguments, or as long as there are heads."""
    if isinstance(value, Given):
        counts = {flow.columns[layer].heads for one in heads for layer in one.layers}
        return not value.names and not value.of_layers and not counts.isdisjoint(value.lengths)
    return isinstance(value, Own)
