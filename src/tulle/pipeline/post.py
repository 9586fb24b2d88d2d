"""`Post`: letters between the ranks of the axis `pipe`, read as they come and kept until somebody asks for them.

    rank 0                              rank 1
    send(value, to=1) ── head, body ──▶ listener of rank 0 ──▶ mailbox ──▶ the program that waits for this key

A letter is a head of fixed size, which says what comes, and a body if that does not fit into the head. Letters from one
rank to another keep their order; a receiver needs no knowledge of it, because each has a key. During a step a listener
for each rank reads all that comes, so that values travel while this rank computes; outside of steps one listens only to
ranks that somebody waits for, so that nothing is under way when training pauses.
"""

from __future__ import annotations

import pickle
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tulle.board import read as read_first_failure
from tulle.comm import Pending, now_s, receive, send, traffic
from tulle.errors import CommunicationError
from tulle.mesh import Axis

HEAD_BYTES = 768
LABEL = "pipeline"
_PATIENT = timedelta(days=7)
"""gloo's own time-out: a rank from which nothing comes for long is not late until a program waits for it."""
_GRACE_S = 5.0


class Kind(IntEnum):
    """What a letter is about."""

    VALUE = 0
    GRADIENT = 1
    OUTCOME = 2
    END = 3
    ERROR = 4


Key = tuple[Kind, int, int]
"""Kind, program, number within the program."""


class Post:
    """The letters of one process.

    Args:
        axis: Whose ranks write to each other. Every rank of it must make one.
    """

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self.failure: str | None = None
        self._lane = _lane(axis)
        self._mailbox: dict[Key, Any] = {}
        self._arrival = threading.Condition()
        self._wanted: Mapping[int, Collection[Key]] = {}
        self._listening: dict[int, threading.Thread] = {}
        self._ended: set[int] = set()
        self._is_open = False
        self._under_way: deque[Pending[Tensor]] = deque()

    def send(self, key: Key, content: object, *, to: int) -> None:
        """Send a tensor, which must not change until `flush`, or something that pickles, to a rank of the axis."""
        body, about = _packed(content)
        head = torch.zeros(HEAD_BYTES, dtype=torch.uint8)
        is_inline = body.numel() <= HEAD_BYTES // 2
        packed = pickle.dumps((key, about, body.numel(), is_inline))
        text = len(packed).to_bytes(4, "little") + packed
        if is_inline:
            text += body.numpy().tobytes()
        head[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._under_way.append(send(head, self._lane, to=to, label=LABEL))
        if not is_inline:
            self._under_way.append(send(body, self._lane, to=to, label=LABEL))

    def has(self, key: Key) -> bool:
        """Whether the letter is there."""
        return key in self._mailbox

    def take(self, key: Key) -> Any:
        """The content of a letter that is there."""
        with self._arrival:
            return self._mailbox.pop(key)

    def look(self, key: Key) -> Any:
        """The content of a letter that is there, and stays for others to read."""
        return self._mailbox[key]

    def await_any(self, wanted: Mapping[int, Collection[Key]], what: Callable[[], str]) -> None:
        """Wait until one of the letters is there.

        Args:
            wanted: Keys by the rank that sends them.
            what: Says what the letters are for, for the error.

        Raises:
            CommunicationError: If a rank failed, or none came within the axis' time-out.
        """
        begin_s = now_s()
        deadline_s = begin_s + self.axis.timeout_s
        with self._arrival:
            self._wanted = wanted
            self._listen(wanted)
            while self.failure is None and not self._is_any_there():
                if not self._arrival.wait(timeout=max(0.0, deadline_s - now_s())):
                    self.failure = f"nothing came within {self.axis.timeout_s:g} s. {self._first_word()}"
            self._wanted = {}
        traffic.waited(now_s() - begin_s)
        traffic.span("waiting", f"wait: {what()}", begin_s, now_s())
        if self.failure is not None:
            raise CommunicationError(
                f"rank {self.axis.rank} of axis {self.axis.name!r} waits for {what()} from rank "
                f"{', '.join(map(str, wanted))}: {self.failure}"
            )

    def open(self) -> None:
        """A step begins: listen to all."""
        self.failure = None
        with self._arrival:
            self._is_open = True
            self._listen(self._others())

    def close(self, error: BaseException | None = None) -> None:
        """A step ends, here with an error or not: tell the others, and wait until they have come here too.

        Raises:
            CommunicationError: If another rank failed.
        """
        self.tell(error)
        deadline_s = now_s() + (self.axis.timeout_s if error is None else _GRACE_S)
        with self._arrival:
            while len(self._ended) < self.axis.size - 1 and (self.failure is None or error is not None):
                if not self._arrival.wait(timeout=max(0.0, deadline_s - now_s())):
                    self.failure = self.failure or (
                        f"not all ranks came to the end of the step within {self.axis.timeout_s:g} s. "
                        f"{self._first_word()}"
                    )
                    break
            self._is_open = False
            self._ended.clear()
            self._mailbox.clear()
        if error is None and self.failure is not None:
            raise CommunicationError(f"rank {self.axis.rank} of axis {self.axis.name!r} ends its step: {self.failure}")
        if self.failure is None:
            self.flush()

    def tell(self, error: BaseException | None) -> None:
        """Tell all ranks that this one is done with the step, or that it failed."""
        text = (
            ""
            if error is None
            else f"{type(error).__name__}: {error}" + "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        )
        for rank in self._others():
            self.send((Kind.END if error is None else Kind.ERROR, 0, 0), text, to=rank)

    def flush(self) -> None:
        """Wait until all that was sent has been read. All ranks must come to where they read it."""
        while self._under_way:
            self._under_way.popleft().wait()

    @property
    def sent(self) -> int:
        """How many messages are under way, or were not yet waited for."""
        return len(self._under_way)

    def flush_first(self, count: int) -> None:
        """Wait for the oldest messages, to give their memory back."""
        for _ in range(min(count, len(self._under_way))):
            self._under_way.popleft().wait()

    def _others(self) -> list[int]:
        return [rank for rank in range(self.axis.size) if rank != self.axis.rank]

    def _is_any_there(self) -> bool:
        return any(key in self._mailbox for keys in self._wanted.values() for key in keys)

    def _first_word(self) -> str:
        return read_first_failure() or "No rank has said why: see the log of each; all ranks must run the same program"

    def _listen(self, sources: Collection[int]) -> None:
        """Have a thread for each of these ranks; the lock is held."""
        for source in sources:
            if source not in self._listening and source not in self._ended:
                thread = threading.Thread(target=self._read, args=(source,), daemon=True, name=f"post from {source}")
                self._listening[source] = thread
                thread.start()

    def _goes_on(self, source: int) -> bool:
        if self._is_open:
            return source not in self._ended
        return source in self._wanted and not self._is_any_there() and self.failure is None

    def _read(self, source: int) -> None:
        traffic.is_background.flag = True  # its waiting holds nobody up
        while True:
            with self._arrival:
                if not self._goes_on(source):
                    del self._listening[source]
                    return
            try:
                key, content = self._receive(source)
            except Exception as error:  # whatever it is, the program must hear of it
                key, content = (Kind.ERROR, 0, 0), f"{error}"
                with self._arrival:
                    self._ended.update(self._others())
            with self._arrival:
                if key[0] in (Kind.END, Kind.ERROR):
                    self._ended.add(source)
                    if key[0] == Kind.ERROR and self.failure is None:
                        self.failure = f"rank {source} failed with {content}"
                else:
                    self._mailbox[key] = content
                self._arrival.notify_all()

    def _receive(self, source: int) -> tuple[Key, object]:
        head = torch.empty(HEAD_BYTES, dtype=torch.uint8)
        receive(head, self._lane, source=source, label=LABEL).wait()
        raw = head.numpy().tobytes()
        length = int.from_bytes(raw[:4], "little")
        key, about, size, is_inline = pickle.loads(raw[4 : 4 + length])
        if is_inline:
            body = torch.frombuffer(bytearray(raw[4 + length : 4 + length + size]), dtype=torch.uint8) if size else None
        else:
            body = torch.empty(size, dtype=torch.uint8)
            receive(body, self._lane, source=source, label=LABEL).wait()
        return key, _unpacked(body, about, self.axis.device)


def post_of(axis: Axis) -> Post:
    """The post of an axis, made once. Every rank of the axis must call it."""
    if Post not in axis.kept:
        axis.kept[Post] = Post(axis)
    return axis.kept[Post]


def _lane(axis: Axis) -> Axis:
    if axis.size == 1:
        return axis
    # Always gloo: a receiver does not know what comes next, which nccl wants it to. Bodies go through the CPU.
    group = dist.new_group(list(axis.ranks), timeout=_PATIENT, backend="gloo", use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup), "this rank is one of the group's"
    return replace(axis, group=group, lanes={}, measured=[], kept={})


_About = tuple[tuple[int, ...], tuple[int, ...], torch.dtype] | bool
"""Of a tensor shape, strides and dtype; True for something pickled; False for None."""


def _packed(content: object) -> tuple[Tensor, _About]:
    if content is None:
        return torch.empty(0, dtype=torch.uint8), False
    if not isinstance(content, Tensor):
        return torch.frombuffer(bytearray(pickle.dumps(content)), dtype=torch.uint8), True
    content = content.detach().cpu()
    if not _is_dense(content):
        content = content.contiguous()
    flat = content.as_strided((content.numel(),), (1,))
    return flat.view(torch.uint8), (tuple(content.shape), content.stride(), content.dtype)


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill a stretch of memory, in whatever order of dimensions: then that order is kept."""
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length != 1:
            if stride != expected:
                return False
            expected *= length
    return True


def _unpacked(body: Tensor | None, about: _About, device: torch.device) -> object:
    if about is False:
        return None
    if about is True:
        return pickle.loads(body.numpy().tobytes()) if body is not None else None
    assert isinstance(about, tuple)
    shape, stride, dtype = about
    if body is None:
        return torch.empty(shape, dtype=dtype, device=device)
    return body.view(dtype).as_strided(shape, stride).to(device)
