"""`Step`: one operation as the layout search sees it, by its dimensions alone."""

from __future__ import annotations

from typing import Literal, NamedTuple

from tulle.named.dims import Dim, Dims

Kind = Literal["product", "pointwise", "sum", "extremum", "lookup", "move", "kept"]
Role = Literal["parameter", "trained", "fixed"]
"""Of an input: a parameter's gradient is summed late, that of anything else at once, what is fixed has none."""
Moves = tuple[tuple[Dim | None, Dim | None], ...]
"""Of a rename or a reshape: each dimension before, and the one after that is split as it was."""


class Input(NamedTuple):
    """An operation's input."""

    dims: Dims
    role: Role
    value_bytes: int


class Step(NamedTuple):
    """One operation: its inputs, all dimensions that it walks through, and those of its result."""

    kind: Kind
    inputs: tuple[Input, ...]
    dims: Dims
    out: Dims
    moves: Moves
    is_recomputed: bool
    """Whether backward does it again, so that nothing is kept of it."""
