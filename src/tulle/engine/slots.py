"""`Slot`: one trained parameter, and what this backward has done for it; `Traveller`: what goes off in its turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from tulle.errors import GradientError


@dataclass(slots=True, eq=False)
class Slot:
    """One trained parameter, and what this step's backward has done for it."""

    name: str
    parameter: nn.Parameter
    is_fired: bool = False
    """Whether a gradient has come since the last synchronization."""
    is_arrived: bool = False
    """Whether it has come in this backward, so that it can travel."""
    hook: int | None = None
    """Number of our hook, which hears that the gradient is complete."""

    def has_none(self) -> bool:
        """Whether what came is none, as of a function that gives None; where there are other hooks they may have it."""
        return self.parameter.grad is None and len(self.parameter._post_accumulate_grad_hooks) == 1

    def lets_others_first(self) -> bool:
        """Whether hooks that came after ours have still to see the gradient; from now on ours is the last."""
        hooks = self.parameter._post_accumulate_grad_hooks
        if self.hook is None or next(reversed(hooks)) == self.hook:
            return False
        hooks[self.hook] = hooks.pop(self.hook)
        return True

    def arrive(self) -> None:
        """Note that the gradient has come.

        Raises:
            GradientError: If it had come already: what travels, or waits to, would be mixed with it.
        """
        if self.is_arrived:
            raise GradientError(
                f"the gradient of {self.name!r} came twice before the end of a backward: use torch.utils.checkpoint "
                "with use_reentrant=False, and start anew from a checkpoint after a backward that failed"
            )
        self.is_arrived = True

    def check_there(self) -> None:
        """Raise if the gradient that came is gone."""
        if self.parameter.grad is None:
            raise GradientError(
                f"the gradient of {self.name!r} was taken away by a hook within backward, when it was that of one "
                "rank: use gradients, and drop them, after loss.backward(), when they are means"
            )


class Traveller(Protocol):
    """What is submitted in its turn during a backward: a bucket, or the tables."""

    slots: Sequence[Slot]
    missing: int

    @property
    def writes(self) -> int:
        """How often something was written to any of the gradients."""
        ...

    def arrive(self, position: int) -> None:
        """Take in the gradient of one slot."""
        ...

    def start(self) -> None:
        """Submit what is there."""
        ...

    def finish(self) -> None:
        """Wait, and give the parameters their mean gradients."""
        ...
