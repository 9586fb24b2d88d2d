"""`Bundle`: tables of one group that travel as one: what is known of their rows, and the scheme that this led to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tulle.sync import Choice, Chooser, Room


@dataclass(slots=True, eq=False)
class Bundle:
    """Tables that travel as one, if they travel by rows at all, and so have one scheme.

    Args:
        given: The scheme that was given, or `"auto"`.
        chooser: Chooses it; None where one was given.
    """

    given: str
    chooser: Chooser | None
    choices: dict[str, Choice] = field(default_factory=dict)
    """The last of each table."""
    room: Room = field(default_factory=Room)
    """For rows of all its tables in a packet, which may hold those of other bundles too."""
    packet_s: float = 0.0
    """Predicted of the packets in which all its tables travel, with all that is in them; 0 where they do not."""

    @property
    def scheme(self) -> str:
        """In force: given, chosen, or `"auto"` before the first choice; rows in packets are gathered."""
        if self.packet_s:
            return "allgather"
        return (self.chooser.scheme if self.chooser else None) or self.given

    def choice(self, name: str) -> Choice | None:
        """That in force for a table, None where there is none yet."""
        choice = self.choices.get(name)
        if choice is None or self.chooser is None or choice.scheme != self.chooser.scheme:
            return None
        if not self.packet_s:
            return choice
        # What is gathered in packets is gathered at their price, not at that of three exchanges.
        candidates = tuple(
            (name, replace(cost, seconds=self.packet_s) if name == self.scheme else cost)
            for name, cost in choice.candidates
        )
        reason = f"{choice.reason}; in one message with row numbers and counts {self.packet_s * 1e3:.3g} ms"
        return replace(choice, scheme=self.scheme, reason=reason, candidates=candidates)

    def is_due(self, held: Mapping[str, Sequence[int]]) -> bool:
        """Take note of the rows that each rank holds, by table; whether a scheme is to be chosen now."""
        if self.chooser is None:
            return False
        is_drifted = self.chooser.is_due([sum(rows) for rows in zip(*held.values(), strict=True)])
        return is_drifted or not held.keys() <= self.choices.keys()
