"""Notes of which gradients this rank has what part, and which of them are its to count."""

from __future__ import annotations

from torch import nn

from tulle.clip import Spread, spread_over
from tulle.distribute.axes import Axes
from tulle.memory import shard_of
from tulle.pipeline import placement_of
from tulle.plan import Memory
from tulle.tables import split_of
from tulle.tensor_parallel import placements


def note_spread(model: nn.Module, memory: Memory, axes: Axes) -> None:
    """Let each parameter know over which axes its model's gradients are spread, if over any.

    Args:
        model: On its stages, its layers split and its parameters shared out.
        memory: Says whether they are.
        axes: Of the mesh.
    """
    spreading, sharing = axes.spreading(memory), axes.sharing(memory)
    stages = placement_of(model)
    split = {id(model.get_parameter(name)) for name in placements(model)}
    for name, parameter in model.named_parameters() if spreading else ():
        is_first = stages is None or axes.pipe is None or axes.pipe.rank == min(stages.owners[name])
        is_first_part = id(parameter) in split or axes.model is None or axes.model.rank == 0
        table = split_of(parameter)
        has_part = shard_of(parameter) is not None or table is not None
        is_summed = has_part and (table is None or sharing is axes.data)
        is_first_replica = is_summed or sharing is None or sharing.rank == 0
        counts = is_first and is_first_part and is_first_replica
        is_part = has_part or id(parameter) in split
        spread_over(parameter, Spread(tuple(spreading), counts=counts, is_part=is_part))
