"""`Stepped`: how an engine stood when an optimizer stepped, by which it is seen whose gradients are new."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stepped:
    """How an engine stood when an optimizer stepped.

    Args:
        steps: Its synchronized backward passes, and averages of gradients that were set by hand.
        averages: These.
        last_average: After how many steps the last of these was.
        writes: How often something was written to gradients that it gave.
    """

    steps: int = 0
    averages: int = 0
    last_average: int = 0
    writes: int = 0

    @property
    def backwards(self) -> int:
        """Its synchronized backward passes alone."""
        return self.steps - self.averages

    @property
    def is_by_hand(self) -> bool:
        """Whether the last gradients were set by hand, or none have come yet."""
        return self.last_average == self.steps
