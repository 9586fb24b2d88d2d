"""`Message` and `decode`: what stages send each other, a header of fixed size that says what comes, and a body."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from copy import copy
from ctypes import memmove
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from struct import Struct, pack_into, unpack_from
from typing import Any

import torch
from torch import Tensor

from tulle.parts import local_of

HEADER_BYTES = 768


class Kind(IntEnum):
    """What a message is about."""

    VALUE = 0
    GRADIENT = 1
    OUTCOME = 2
    END = 3
    ERROR = 4


Key = tuple[Kind, int, int]
"""Kind, program, number within the program: what the receiver looks for, without being told of it.

Programs, steps and the placing of models are numbered as one, from 1 (`Runtime.programs`), so no two mean the same:

    VALUE     program p, n      the n-th thing that p moves (`Values`)
              step s, -1-n      the n-th group of what micro-batches returned
              step s, n         what was written in a buffer of no unit
              -model, n         a tensor that several ranks hold, when it is placed
    GRADIENT  program p, n      of a value of p, for its backward
              step s, n         of a tied parameter; outside of steps -p, n
    OUTCOME   program p, n      the n-th thing that p moves, if it depends on values
              0, digest         of a call of a unit: the same whenever such a one comes, so told once
    END       step s, 0         a rank is done with it
    ERROR     step s, 0         why it, or a program outside of steps, failed there
"""
_DTYPES = sorted({one for one in vars(torch).values() if isinstance(one, torch.dtype)}, key=str)
_NUMBERS = {dtype: number for number, dtype in enumerate(_DTYPES)}
_NOTHING, _PICKLED, _PICKLED_FOR_DEVICE = -1, -2, -3
"""Stand where else a dtype's number does; the last if tensors on a GPU are within."""
_APART, _OF_HOST = 1 << 16, 1 << 17
"""Are added to a dtype's number if the numbers do not come with the message, and if the tensor is on the CPU."""
_DTYPE = _APART - 1
_COUNT = 1 << 20
"""So many times is added, too, how many came apart before, on that way."""
_FIXED = Struct("=6q")
"""The key, what the body holds, its bytes and dimensions; lengths and strides of these follow."""


@dataclass(slots=True)
class Header:
    """What a message says of itself.

    Args:
        key: Whose it is.
        holds: Number of a dtype, or what else the body is.
        body_bytes: Its size.
        shape: Of a tensor.
        stride: Of a tensor.
    """

    key: Key
    holds: int
    body_bytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def message_bytes(self) -> int:
        """Of both."""
        return HEADER_BYTES + self.body_bytes

    @property
    def apart_before(self) -> int:
        """How many came apart before this one, on its way."""
        return self.holds // _COUNT

    def room(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """An empty tensor of which this announces the numbers, and its memory: bytes, each once."""
        empty = torch.empty_strided(self.shape, self.stride, dtype=_DTYPES[self.holds & _DTYPE], device=device)
        return empty, _raw(empty)


@dataclass(frozen=True, slots=True)
class OnHost:
    """What lies on the host and is for a GPU: whoever takes it brings it there, on the stream that reads it.

    Args:
        bring: What does.
    """

    bring: Callable[[], object]

    def taken(self) -> object:
        """It, on the GPU."""
        return self.bring()


# Between two messages a rank computes, so that each finds the caches of the processor cold, where an operation of torch
# takes 20 to 40 us: there are few of them here.
class Message:
    """A tensor, or something that pickles, on its way; it is to be written before the tensor changes.

    Args:
        key: What the receiver looks for.
        content: What it is to have.

    Example:
        >>> raw = Message((Kind.VALUE, 7, 1), torch.tensor([1.0, 2.0])).bytes()
        >>> header = decode_header(raw)
        >>> header.key, decode(header, raw[HEADER_BYTES:], torch.device("cpu"))
        ((0, 7, 1), tensor([1., 2.]))
    """

    __slots__ = ("_apart", "_body", "_fixed", "size_bytes")

    def __init__(self, key: Key, content: object) -> None:
        holds, shape, stride, self._body = _packed(content)
        self._fixed = (*key, holds, self._body.nbytes, len(shape), *shape, *stride)
        self.size_bytes = HEADER_BYTES + self._body.nbytes
        self._apart: Tensor | None = None

    def write(self, memory: Tensor) -> Tensor:
        """Write a copy into memory of the CPU: bytes `[HEADER_BYTES + size of the body]`."""
        pack_into(f"={len(self._fixed)}q", memory.numpy().data, 0, *self._fixed)
        if body_bytes := self.size_bytes - HEADER_BYTES:  # whatever the order of dimensions, a stretch of memory
            if not self._body.is_cpu:
                self._body = self._body.cpu()
            memmove(memory.data_ptr() + HEADER_BYTES, self._body.data_ptr(), body_bytes)
        return memory

    def on_device(self, device: torch.device) -> Tensor | None:
        """A copy of the numbers on this GPU: bytes, as they lie in memory; None if they are elsewhere."""
        if self._apart is None and self._body.device == device and self._body.numel():
            self._apart = _raw(local_of(self._body).clone())
        return self._apart

    def announcement(self, before: int) -> Message:
        """A message that says all but the numbers, which come by another way.

        Args:
            before: How many came so before, on that way.
        """
        told = copy(self)
        key, (holds, _, *form) = self._fixed[:3], self._fixed[3:]
        told._fixed = (*key, holds + _APART + before * _COUNT, 0, *form)
        told.size_bytes = HEADER_BYTES
        return told

    def bytes(self) -> Tensor:
        """A copy in memory of its own."""
        return self.write(torch.empty(self.size_bytes, dtype=torch.uint8))


def decode_header(message: Tensor) -> Header:
    """What a message says of itself."""
    raw = message.numpy().data
    kind, program, number, holds, body_bytes, dims = _FIXED.unpack_from(raw)
    sizes = unpack_from(f"={2 * dims}q", raw, _FIXED.size)
    return Header((kind, program, number), holds, body_bytes, sizes[:dims], sizes[dims:])


def decode(header: Header, body: Tensor, device: torch.device) -> object:
    """The content of a message, or the header, if it comes apart.

    What was on a GPU is `OnHost` until it comes to this device; a tensor of the CPU lies in the memory of its body.
    """
    if header.holds == _NOTHING:
        return None
    if header.holds in (_PICKLED, _PICKLED_FOR_DEVICE):
        load = _Unpickler(body, device).load
        return load() if header.holds == _PICKLED else OnHost(load)
    if header.holds & _APART:
        return header
    tensor = body.view(_DTYPES[header.holds & _DTYPE]).as_strided(header.shape, header.stride)
    if header.holds & _OF_HOST or device.type == "cpu":
        return tensor
    return OnHost(partial(tensor.to, device, non_blocking=True))


def _packed(content: object) -> tuple[int, tuple[int, ...], tuple[int, ...], Tensor]:
    """What a header says of some content, and a tensor whose memory holds it, without gaps."""
    if content is None:
        return _NOTHING, (), (), torch.empty(0, dtype=torch.uint8)
    if not isinstance(content, Tensor) or content.layout != torch.strided:  # a sparse one is several tensors
        return _pickled(local_of(content) if isinstance(content, Tensor) else content)
    content = _plain(content)
    holds = _NUMBERS[content.dtype] | (_OF_HOST if content.is_cpu else 0)
    return holds, content.shape, content.stride(), content


def _pickled(content: object) -> tuple[int, tuple[int, ...], tuple[int, ...], Tensor]:
    file = io.BytesIO()
    pickler = _Pickler(file, pickle.HIGHEST_PROTOCOL)
    pickler.dump(content)
    holds = _PICKLED_FOR_DEVICE if pickler.is_for_device else _PICKLED
    return holds, (), (), torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)


class _Pickler(pickle.Pickler):
    """Has tensors on a GPU come to the receiver's, not to that of this rank's number, which torch names."""

    is_for_device = False

    def persistent_id(self, obj: Any) -> Tensor | None:
        """What to write instead."""
        if not isinstance(obj, Tensor) or not obj.is_cuda:
            return None
        self.is_for_device = True
        return local_of(obj).cpu()


class _Unpickler(pickle.Unpickler):
    def __init__(self, body: Tensor, device: torch.device) -> None:
        super().__init__(io.BytesIO(body.numpy().data))
        self._device = device

    def persistent_load(self, pid: Tensor) -> Tensor:
        return pid.to(self._device)


def _plain(tensor: Tensor) -> Tensor:
    """The same numbers, as they lie in a stretch of memory."""
    if tensor.is_conj() or tensor.is_neg():  # its memory holds other numbers
        tensor = tensor.resolve_conj().resolve_neg()
    if not (tensor.is_cpu or tensor.is_cuda):
        tensor = local_of(tensor).cpu()
    return tensor if is_dense(tensor) else local_of(tensor).contiguous()


def _raw(tensor: Tensor) -> Tensor:
    """The stretch of memory that a tensor fills, as bytes."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill a stretch of memory, in whatever order of dimensions: then that order is kept."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length != 1:
            if stride != expected:
                return False
            expected *= length
    return True


def each_once(tensor: Tensor) -> Tensor:
    """A tensor's numbers, each once: of one that was expanded a number is seen in many places, and cannot be written.

    Example:
        >>> each_once(torch.arange(2).expand(3, 2))
        tensor([[0, 1]])
    """
    return local_of(tensor)[tuple(slice(None if stride else 1) for stride in tensor.stride())]
