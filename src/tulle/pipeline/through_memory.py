"""`ThroughMemory`: messages to a rank of the same host: written where that one reads them."""

from __future__ import annotations

from tulle.comm import traffic
from tulle.mesh import Axis
from tulle.pipeline.channel import LABEL, Channel
from tulle.pipeline.messages import HEADER_BYTES, Key, Message, decode, decode_header
from tulle.shared_memory import Receiver, Sender, unseen


class ThroughMemory(Channel):
    """Messages to one other rank of an axis, and from it, through memory that both map.

    Args:
        lane: The axis.
        sender: To that rank.
        receiver: From it.
    """

    def __init__(self, lane: Axis, sender: Sender, receiver: Receiver) -> None:
        super().__init__(lane)
        self._sender, self._receiver = sender, receiver

    @property
    def descriptor(self) -> int:
        """By which one sees that something has come, to `receive` at once."""
        return self._receiver.descriptor

    def send(self, message: Message, *, is_expected: bool = True) -> None:
        """Send a message without waiting. What was sent is there for the other even when this process has ended."""
        try:
            self._sender.send(message.size_bytes, message.write)
        except RuntimeError as error:
            raise self._told(error, "send", message.size_bytes) from error
        traffic.sent(LABEL, message.size_bytes, 1)

    def flush(self, *, but: int) -> None:
        """Wait until all but the latest `but` messages in memory have been read."""
        try:
            self._sender.flush(but=but)
        except RuntimeError as error:
            raise self._told(error, "send", 0) from error

    def receive(self) -> tuple[Key, object]:
        """Wait for the next message; its key and its content, `OnHost` if it is for a GPU."""
        try:
            message = self._receiver.receive()
        except RuntimeError as error:
            raise self._told(error, "recv", 0) from error
        header = decode_header(message)
        with unseen():  # it may be read by who waits for another one
            return header.key, decode(header, message[HEADER_BYTES:], self._lane.device)
