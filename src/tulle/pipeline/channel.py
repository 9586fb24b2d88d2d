"""`Channel`: how messages travel between two ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod

from tulle.comm.pending import Exchange, translated
from tulle.errors import CommunicationError
from tulle.mesh import Axis
from tulle.pipeline.messages import Key, Message

LABEL = "pipeline"


class Channel(ABC):
    """Messages to one other rank of an axis, and from it.

    The two directions share nothing: while a thread sends, another may receive. What fails is raised as
    `CommunicationError`.

    Args:
        lane: The axis.
    """

    def __init__(self, lane: Axis) -> None:
        self._lane = lane

    @property
    def descriptor(self) -> int | None:
        """By which one sees that something has come, to `receive` at once; None if somebody has to wait for it."""
        return None

    @abstractmethod
    def send(self, message: Message, *, is_expected: bool = True) -> None:
        """Send a message without waiting.

        Args:
            message: It.
            is_expected: Whether the other rank will read it for sure, so that this one must not end before.
        """

    @abstractmethod
    def flush(self, *, but: int) -> None:
        """Wait until all but the latest `but` of those that take memory here have been read."""

    @abstractmethod
    def receive(self) -> tuple[Key, object]:
        """Wait for the next message; its key and its content, `OnHost` if it is for a GPU."""

    def _told(self, error: RuntimeError, operation: str, size_bytes: int) -> CommunicationError:
        """What is raised for what gloo, or a channel of memory, raised."""
        try:
            with translated(Exchange(operation, self._lane, LABEL, size_bytes, 1)):
                raise error
        except CommunicationError as told:
            return told
