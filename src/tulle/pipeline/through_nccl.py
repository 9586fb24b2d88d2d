"""`ThroughNccl`: tensors on GPUs go by nccl, from one GPU to the other, in the order in which messages announce them.

    rank 0                                                          rank 1
    copy of the tensor ── nccl, a process group of this direction ─▶ room, made when the announcement is read
    announcement ──────── another `Channel` ───────────────────────▶ what comes, and of which shape

nccl wants both ranks to name what goes in one order, and a receiver does not know what comes next: so it receives in
the order of the announcements, which keep theirs. Sends are begun before they are announced, so that all that a tensor
waits for on its GPU has been begun by then, too. Neither direction waits for the other, nor for what computes: a tensor
is waited for, by the stream that reads it, when it is taken.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tulle.comm import gather_values, traffic, used_here
from tulle.errors import CommunicationError
from tulle.mesh import Axis
from tulle.pipeline.channel import LABEL, Channel
from tulle.pipeline.messages import Header, Key, Message
from tulle.process_groups import backend_of, new_group

SWITCH = "TULLE_PIPELINE_NCCL"
"""A variable of the environment: 0 on any rank has what stages on GPUs send each other go through their hosts."""
_LABEL = "ways between stages"


@dataclass(frozen=True, slots=True)
class Arriving:
    """A tensor that nccl brings.

    Args:
        tensor: Where to.
        work: What ends when it is there.
    """

    tensor: Tensor
    work: dist.Work

    def taken(self) -> Tensor:
        """It, for the current stream, which waits for it."""
        self.work.wait()
        used_here(self.tensor)  # its memory is of the stream on which it came
        return self.tensor


class ThroughNccl(Channel):
    """Messages to one other rank of an axis, and from it: those about tensors on a GPU are mere announcements.

    Args:
        lane: The axis, whose device is a GPU.
        announcements: Brings these, and all that is on no GPU.
        outgoing: A process group of both ranks for what this one sends.
        incoming: And one for what it receives.
        peer: The other rank, within these.
        stream: Of this device, on which nothing is computed: room that is made on it waits for nobody.
    """

    def __init__(
        self,
        lane: Axis,
        announcements: Channel,
        outgoing: dist.ProcessGroup,
        incoming: dist.ProcessGroup,
        peer: int,
        stream: torch.cuda.Stream,
    ) -> None:
        super().__init__(lane)
        self._announcements, self._outgoing, self._incoming = announcements, outgoing, incoming
        self._peer, self._stream = peer, stream
        self._sent, self._begun_before = 0, 0

    @property
    def descriptor(self) -> int | None:
        """Of the announcements."""
        return self._announcements.descriptor

    def send(self, message: Message, *, is_expected: bool = True) -> None:
        """Send a message without waiting, neither here nor on the GPU."""
        body = message.on_device(self._lane.device)
        if body is not None:
            try:
                self._outgoing.send([body], self._peer, 0)  # the process group keeps it until it has gone
            except RuntimeError as error:
                raise self._told(error, "send", body.nbytes) from error
            traffic.sent(LABEL, body.nbytes, 1)
            message = message.announcement(self._sent)
            self._sent += 1
        self._announcements.send(message, is_expected=is_expected)

    def flush(self, *, but: int) -> None:
        """Wait until all but the latest `but` messages have been read; their tensors are received then, by the GPUs."""
        self._announcements.flush(but=but)

    def receive(self) -> tuple[Key, object]:
        """Wait for the next message; its key, and its content or an `Arriving`."""
        key, content = self._announcements.receive()
        return key, self._begun(content) if isinstance(content, Header) else content

    def _begun(self, header: Header) -> Arriving:
        if header.apart_before != self._begun_before:
            raise CommunicationError(
                f"rank {self._lane.rank} of axis {self._lane.name!r} was told of tensor {header.apart_before} of "
                f"another rank, after {self._begun_before}: a send was interrupted; begin anew from a checkpoint"
            )
        self._begun_before += 1
        with torch.inference_mode(mode=False), torch.no_grad(), torch.cuda.stream(self._stream):
            tensor, raw = header.room(self._lane.device)
            try:
                return Arriving(tensor, self._incoming.recv([raw], self._peer, 0))
            except RuntimeError as error:
                raise self._told(error, "recv", raw.nbytes) from error


def by_nccl(axis: Axis, channels: dict[int, Channel], lane: Axis) -> dict[int, Channel]:
    """The same channels; those to the stages before and after this one by nccl, if the axis has it.

    All ranks of the axis must call it. Other pairs stay as they are: they send each other few tensors, and
    communicators take memory of their GPUs.

    Args:
        axis: It.
        channels: To each other rank, by its place in the axis.
        lane: The axis on a process group that is not nccl's, for agreement.
    """
    if backend_of(axis.group, axis.device.type) != "nccl":
        return channels
    if not all(gather_values(_is_allowed(os.environ), lane, label=_LABEL)):
        return channels
    stream = torch.cuda.Stream(axis.device)
    groups = {pair: _group(axis, pair) for pair in _directions(axis.size) if axis.rank in pair}
    return channels | {
        peer: ThroughNccl(
            lane, channels[peer], groups[axis.rank, peer], groups[peer, axis.rank], int(peer > axis.rank), stream
        )
        for peer in {to for _, to in groups} - {axis.rank}
    }


def _is_allowed(environment: Mapping[str, str]) -> bool:
    """Whether nothing here is against it: with one queue for all streams a send that is not read yet holds up all."""
    return environment.get(SWITCH) != "0" and environment.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1"


def _directions(size: int) -> list[tuple[int, int]]:
    """From whom to whom, of stages that follow each other, the last by the first; in one order on all ranks.

    Example:
        >>> _directions(3)
        [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    """
    return sorted({(place, (place + way) % size) for place in range(size) for way in (1, -1)})


def _group(axis: Axis, pair: tuple[int, int]) -> dist.ProcessGroup:
    """A process group of nccl's for one direction, connected: the first send would wait until its rank receives."""
    source, target = (axis.ranks[place] for place in pair)
    purpose = f"{axis.name}, tensors from {source} to {target}"
    group = new_group(sorted((source, target)), axis.timeout_s, purpose=purpose, backend="nccl")
    byte, is_source = torch.zeros(1, dtype=torch.uint8, device=axis.device), axis.rank == pair[0]
    (group.send if is_source else group.recv)([byte], int((source < target) == is_source), 0).wait()
    return group
