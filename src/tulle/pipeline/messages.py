"""`encode` and `decode`: a message between stages as bytes, a header of fixed size that says what comes, and a body."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

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
              step s, n         what was written in a buffer of no unit
              -model, n         a tensor that several ranks hold, when it is placed
    GRADIENT  program p, n      of a value of p, for its backward
              step s, n         of a tied parameter; outside of steps -p, n
    OUTCOME   program p, n      the n-th thing that p moves, if it depends on values
              0, digest         of a call of a unit: the same whenever such a one comes, so told once
    END       step s, 0         a rank is done with it
    ERROR     step s, 0         why it, or a program outside of steps, failed there
"""
_About = tuple[tuple[int, ...], tuple[int, ...], torch.dtype] | bool
"""Of a tensor shape, strides and dtype; True for something pickled; False for None."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a message says of itself.

    Args:
        key: Whose it is.
        about: What the body is.
        body_bytes: Its size.
    """

    key: Key
    about: _About
    body_bytes: int

    @property
    def message_bytes(self) -> int:
        """Of both."""
        return HEADER_BYTES + self.body_bytes


def encode(key: Key, content: object) -> Tensor:
    """A message with a copy of a tensor, or something that pickles: bytes `[HEADER_BYTES + size of the body]`.

    Example:
        >>> message = encode((Kind.VALUE, 7, 1), torch.tensor([1.0, 2.0]))
        >>> header = decode_header(message)
        >>> header.key, decode(header, message[HEADER_BYTES:], torch.device("cpu"))
        ((0, 7, 1), tensor([1., 2.]))
    """
    body, about = _packed(content)
    kind, program, number = key
    packed = pickle.dumps((int(kind), program, number, about, body.numel()))
    message = torch.empty(HEADER_BYTES + body.numel(), dtype=torch.uint8)
    text = torch.frombuffer(bytearray(len(packed).to_bytes(4, "little") + packed), dtype=torch.uint8)
    message[: len(text)] = text
    message[HEADER_BYTES:] = body
    return message


def decode_header(message: Tensor) -> Header:
    """What a message says of itself."""
    raw = message[:HEADER_BYTES].numpy().data
    kind, program, number, about, body_bytes = pickle.loads(raw[4 : 4 + int.from_bytes(raw[:4], "little")])
    return Header((kind, program, number), about, body_bytes)


def decode(header: Header, body: Tensor, device: torch.device) -> object:
    """The content of a message; a tensor lies in the memory of its body, if it is to be on the CPU."""
    if header.about is False:
        return None
    if header.about is True:
        return pickle.loads(body.numpy().data)
    assert isinstance(header.about, tuple)
    shape, stride, dtype = header.about
    return body.view(dtype).as_strided(shape, stride).to(device)


def _packed(content: object) -> tuple[Tensor, _About]:
    if content is None:
        return torch.empty(0, dtype=torch.uint8), False
    if not isinstance(content, Tensor):
        return torch.frombuffer(bytearray(pickle.dumps(content)), dtype=torch.uint8), True
    content = content.detach().resolve_conj().resolve_neg().cpu()  # else its memory holds other numbers
    if not is_dense(content):
        content = content.contiguous()
    flat = content.as_strided((content.numel(),), (1,))
    return flat.view(torch.uint8), (tuple(content.shape), content.stride(), content.dtype)


def is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill a stretch of memory, in whatever order of dimensions: then that order is kept."""
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length != 1:
            if stride != expected:
                return False
            expected *= length
    return True
