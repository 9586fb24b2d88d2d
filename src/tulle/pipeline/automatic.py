"""`deal`: chooses the stage of every module of a model, by a profile of one micro-batch."""

from __future__ import annotations

import gc
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median

from torch import Tensor, nn

from tulle.comm import barrier, gather_values
from tulle.errors import PlanError, TulleError, raised_in
from tulle.mesh import Axis
from tulle.pipeline.calls import Calls, coarsened
from tulle.pipeline.homes import outward
from tulle.pipeline.partition import Limits, Partition, partition
from tulle.pipeline.pins import pins_of
from tulle.pipeline.profile import profile
from tulle.pipeline.structure import flatten

logger = logging.getLogger("tulle")
_LABEL = "the partition"
NOMINAL_BYTES_PER_S = 1e9
"""What a stage is taken to receive; it settles where to cut when times do not."""


@dataclass(frozen=True, slots=True)
class Dealt:
    """Modules dealt to stages.

    Args:
        partition: Piece by piece, with what was measured.
        assignment: The stage of each module to be placed: the largest that hold pieces of one stage only.
    """

    partition: Partition
    assignment: Mapping[str, int]


def deal(
    model: nn.Module,
    sample: object,
    axis: Axis,
    *,
    stages: int | None = None,
    memory_bytes: int | None = None,
    pins: Mapping[str, int] | None = None,
) -> Dealt:
    """Choose the stage of every module so that the slowest stage is as fast as can be. Every rank must call it.

    All ranks measure at once, for they may share a machine, as they will when they train. Rank 0's stages are taken,
    with the time of the rank in the middle.

    Args:
        model: Not placed yet; built in `deferred_init` if it does not fit: each module is lent memory while it runs.
        sample: One micro-batch as the model is called with it: a mapping is passed as keywords, a tuple as positional
            arguments, anything else as the one argument. Rank 0's is what counts.
        axis: Whose ranks will hold the stages.
        stages: How many; default one a rank. A multiple of the ranks gives each rank several, which are interleaved.
            Where pins name later ones there are as many as they say.
        memory_bytes: What parameters, gradients, two optimizer states and activations of a stage may take.
        pins: Stage of modules by name; those pinned by `stage` need not be named.

    Raises:
        PlanError: If pins do not fit, no partition fits into memory, or the model cannot be profiled (naming why).

    Example:
        >>> import torch, tulle
        >>> from tulle import pipeline
        >>> mesh = tulle.init(pipe=1)
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        >>> pipeline.deal(model, torch.ones(4, 2), mesh["pipe"]).assignment
        {'': 0}
    """
    count = stages or axis.size
    cause: Exception | None = None
    barrier(axis)
    try:
        chosen = _deal(model, sample, axis, count, memory_bytes, {**pins_of(model), **(pins or {})})
        gc.collect()  # graphs of the profile refer to parameters, which can then not be let go
    except TulleError as error:
        chosen = error
    except Exception as error:
        cause = error
        chosen = PlanError(
            f"the model could not be profiled on the sample, because {type(error).__name__}: {error}{raised_in(error)}"
            ". Give a sample as the model is called with it, or an assignment of modules to stages"
        )
    took_s = chosen.partition.time_s if isinstance(chosen, Dealt) else None
    told = gather_values((chosen if axis.rank == 0 else None, took_s), axis, label=_LABEL)
    heard = told[0][0]
    if isinstance(heard, TulleError):
        raise heard from cause
    assert heard is not None, "rank 0 has chosen"
    # Ranks of one machine are not alike at every moment: what a micro-batch takes is what it takes on the middle one.
    middle_s = median(time_s for _, time_s in told if time_s is not None)
    heard = replace(heard, partition=heard.partition.scaled(middle_s / max(heard.partition.time_s, 1e-9)))
    if axis.rank == 0:
        logger.info("stages by profile:\n%s", heard.partition.table())
    return heard


def _deal(
    model: nn.Module, sample: object, axis: Axis, stages: int, memory_bytes: int | None, pins: Mapping[str, int]
) -> Dealt:
    tensors = [leaf for leaf in flatten(sample)[0] if isinstance(leaf, Tensor)]
    if tensors and not any(tensor.numel() for tensor in tensors):
        shapes = ", ".join(f"{list(tensor.shape)}" for tensor in tensors)
        raise PlanError(f"sample= holds no samples (of shape {shapes}): give a micro-batch of one or more")
    stages = max(stages, 1 + max(pins.values(), default=0))
    pieces, calls = profile(model, sample, axis, stages)
    names = [piece.name for piece in pieces]
    limits = Limits(memory_bytes, NOMINAL_BYTES_PER_S, _pins_of_pieces(pins, names, calls))
    found = partition(pieces, stages, limits)
    return Dealt(found, coarsened(found.assignment, calls))


def _pins_of_pieces(pins: Mapping[str, int], names: list[str], calls: Calls) -> dict[str, int]:
    """Pins of modules that are made of several pieces, or are parts of one, as pins of pieces."""
    found: dict[str, int] = {}
    pieces: dict[str, list[str]] = {}
    whole = set(names)
    for piece in names:
        for outer in outward(piece):
            pieces.setdefault(outer, []).append(piece)
    for name, stage in sorted(pins.items(), key=lambda pin: pin[0].count(".")):
        within = pieces.get(name, [])
        around = [outer for outer in outward(name) if outer in whole]
        if not within and not around and name in calls.chains:
            raise PlanError(f"the module {name!r}, which is pinned to stage {stage}, did not run on the sample")
        found.update(dict.fromkeys(within or around, stage))
    return found
