"""`Chooser`: holds to a scheme while gradients stay as they are, and chooses again when they drift."""

from __future__ import annotations

from collections.abc import Sequence

from tulle.cost import Characteristics, Network
from tulle.sync.schemes import Choice, choose_together

DRIFT = 1.5
"""The scheme is chosen again when the mean number of rows has moved by this factor since the last choice."""
_MEMORY = 0.9
"""Weight of the past in the running mean of rows."""


class Chooser:
    """Chooses the scheme of a table, or of tables that travel as one.

    Ranks that hear the same counts choose the same, without a word more.

    Args:
        network: What the axis gives, the same numbers on all ranks.
        ranks: Number of ranks.
    """

    def __init__(self, network: Network, ranks: int) -> None:
        self.scheme: str | None = None
        """In force, None before the first choice."""
        self.predicted_s = 0.0
        """Of it, all tables together, as they were when it was chosen; 0 before the first choice."""
        self._network = network
        self._ranks = ranks
        self._rows_at_choice = 0.0
        self._mean_rows = 0.0

    def is_due(self, held: Sequence[int]) -> bool:
        """Take note of the rows that each rank holds in this step; whether a scheme is to be chosen now.

        Args:
            held: Distinct rows by rank, of all tables together.
        """
        mean_rows = sum(held) / len(held)
        self._mean_rows = _MEMORY * self._mean_rows + (1 - _MEMORY) * mean_rows if self.scheme else mean_rows
        low, high = sorted((self._mean_rows + 1, self._rows_at_choice + 1))
        return self.scheme is None or high >= DRIFT * low

    def choose(self, looks: Sequence[Characteristics]) -> list[Choice]:
        """Choose for gradients that look like this, one a table; the scheme that all get is in force then."""
        choices = choose_together(looks, self._network, self._ranks)
        self.scheme = choices[0].scheme
        self.predicted_s = dict(choices[0].candidates)[self.scheme].seconds
        held = [sum(rows) for rows in zip(*(look.rows_per_rank for look in looks), strict=True)]
        self._rows_at_choice = self._mean_rows = sum(held) / len(held)
        return choices
