"""`Resident`: what the run-time wants of a model that is placed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from tulle.pipeline.carried import Carried
from tulle.pipeline.tied import Tied


@dataclass(eq=False)
class Resident:
    """What the run-time wants of a model that is placed.

    Args:
        parameters: All of them.
        tied: Those that several ranks hold, and such tensors that are no parameters.
        stages: How many there are.
        carried: What its forward may leave for the next.
        modules: All of them.
    """

    parameters: Sequence[nn.Parameter]
    tied: Sequence[Tied]
    stages: int
    carried: Carried
    modules: Sequence[nn.Module]
