"""`Pieces`: the modules that a profile leaves whole, what they read of each other, and which parameters are whose."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from tulle.mesh import Axis
from tulle.pipeline import Piece
from tulle.pipeline.calls import Calls, around, pieces_of, watch
from tulle.pipeline.homes import outward
from tulle.pipeline.profile import PIECES_PER_STAGE, as_call
from tulle.pipeline.profile import profile as profile_pieces
from tulle.profiling.steps import Twin

STAGES = 8
"""Pieces are small enough for so many stages of a pipeline."""
logger = logging.getLogger("tulle")


@dataclass(frozen=True, slots=True)
class Pieces:
    """Modules that stay whole, in the order in which they run.

    Args:
        names: Of them.
        reads: Bytes that each reads of what others made, by their name.
        around: Who calls each.
        between: How many operations modules have that call them, by name.
    """

    names: Sequence[str]
    reads: Sequence[Mapping[str, int]]
    around: Mapping[str, tuple[str, ...]]
    between: Mapping[str, int]

    @staticmethod
    def of(pieces: Sequence[Piece], calls: Calls) -> Pieces:
        """From the pieces that the pipeline has found, and the calls that it has seen."""
        names = [piece.name for piece in pieces]
        reads = [{names[at]: size for at, size in (piece.incoming or {}).items()} for piece in pieces]
        return Pieces(names, reads, _around(names, calls), _between(names, calls))


def cut(twin: Twin, alone: Axis) -> Pieces:
    """Cut a model into pieces, and see what each reads of the others, if the pipeline can tell.

    Args:
        twin: Whose model.
        alone: An axis of this process only, on the device of the model.
    """
    try:
        return Pieces.of(*profile_pieces(twin.model, twin.samples[0], alone, STAGES))
    except Exception as problem:  # whatever a model does with a placeholder
        logger.info("what pieces read of each other is not known: %s", str(problem).split("\n", 1)[0])
    args, kwargs = as_call(twin.samples[0], twin.device)
    calls = watch(twin.model, args, kwargs)
    largest = (calls.time_s.get("") or sum(calls.time_s.values())) / (STAGES * PIECES_PER_STAGE)
    names = pieces_of(twin.model, calls, calls.time_s, largest)
    return Pieces(names, [{} for _ in names], _around(names, calls), _between(names, calls))


def _around(names: Sequence[str], calls: Calls) -> dict[str, tuple[str, ...]]:
    """Of each piece the modules that could be placed in its stead; none that calls what by its name is elsewhere."""
    callers = around(names, calls)
    elsewhere = {one for name in names for one in callers[name] if one and not name.startswith(f"{one}.")}
    return {name: tuple(one for one in callers[name] if one not in elsewhere) for name in names}


def _between(names: Sequence[str], calls: Calls) -> dict[str, int]:
    """Operations that run between pieces, by the module of whose forward they are."""
    pieces = set(names)
    return {name: count for name, count in calls.operations.items() if pieces.isdisjoint(outward(name))}


def owners_of(model: nn.Module, names: Sequence[str]) -> dict[str, str]:
    """The piece that each parameter belongs to: that which it is in, or else the first within the module it is of."""
    first: dict[str, str] = {}
    for piece in names:
        for outer in outward(piece):
            first.setdefault(outer, piece)
    return {
        name: next(first[outer] for outer in outward(name) if outer in first) for name, _ in model.named_parameters()
    }


def bytes_of(
    model: nn.Module, owners: Mapping[str, str], *, leave: Collection[str]
) -> tuple[Counter[str], Counter[str]]:
    """Bytes of each piece's parameters, those that are trained and those that are frozen; each parameter counts once.

    Args:
        model: Whose pieces.
        owners: The piece that each parameter belongs to, by the parameter's name.
        leave: Names of parameters that do not count: tables, of which a profile tells by themselves.
    """
    trained, frozen = Counter[str](), Counter[str]()
    for name, parameter in model.named_parameters():
        if name not in leave:
            (trained if parameter.requires_grad else frozen)[owners[name]] += parameter.nbytes
    return trained, frozen
