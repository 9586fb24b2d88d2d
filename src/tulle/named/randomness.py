"""Random numbers by global index: a number depends on the seed, on the draw, and on its place in the whole tensor.

So every layout draws the same numbers, and no rank draws any but its own. The generator is a counter through the
finalizer of SplitMix64 (Steele, Lea and Flood, *Fast splittable pseudorandom number generators*, OOPSLA'14), in the
wrapping 64-bit arithmetic of torch.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from tulle.errors import ModelError
from tulle.named.dims import Dims
from tulle.named.placed import Local
from tulle.named.scope import Scope

_GOLDEN = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as a signed number, as the two that follow
_FIRST = -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
_SECOND = -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB
_MASK = (1 << 64) - 1


@dataclass(slots=True)
class Stream:
    """The draws of this process: the same sequence on every rank."""

    seed: int = 0
    draw: int = 0

    def next_key(self) -> int:
        """The key of one more draw."""
        self.draw += 1
        return key_of(self.seed, self.draw)


_stream = Stream()


def manual_seed(seed: int) -> None:
    """Begin the draws of dropout and sampling anew. Every rank must call it, with the same seed.

    Raises:
        ModelError: If it is no integer.
    """
    _stream.seed, _stream.draw = as_seed(seed, "manual_seed"), 0


def as_seed(given: int, what: str) -> int:
    """A seed as Python's own integer, which does not overflow as numpy's do.

    Raises:
        ModelError: If it is none.
    """
    try:
        return operator.index(given)
    except TypeError:
        raise ModelError(f"{what} was given the seed {given!r}, expected an integer") from None


def next_key() -> int:
    """The key of the next draw of this process."""
    return _stream.next_key()


def mark() -> tuple[int, int]:
    """Where the draws of this process stand."""
    return _stream.seed, _stream.draw


@contextmanager
def drawn_again(since: tuple[int, int]) -> Iterator[None]:
    """Repeat draws since a mark within the block, as a recomputation must; afterwards go on as before it."""
    now = mark()
    _stream.seed, _stream.draw = since
    try:
        yield
    finally:
        _stream.seed, _stream.draw = now


@contextmanager
def torch_drawn_by(key: int, device: torch.device) -> Iterator[None]:
    """Let torch's own generators draw by a key within the block; afterwards they go on as before it."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(key)
        yield


def key_of(seed: int, *path: int | str) -> int:
    """A key for a seed and a place, such as a parameter's name: equal places have equal keys."""
    key = _scrambled(seed)
    for step in path:
        for number in step.encode() if isinstance(step, str) else (step,):
            key = _scrambled(key ^ (number & _MASK))
    return key


def uniform(
    scope: Scope, dims: Dims, key: int, *, device: torch.device | None, dtype: torch.dtype = torch.float64
) -> Local:
    """This rank's part of a tensor of numbers from 0 (included) to 1, of 53 random bits each."""
    bits = _bits(scope, dims, key, device).bitwise_right_shift_(11).bitwise_and_((1 << 53) - 1)
    return bits.double().mul_(2.0**-53).to(dtype)


def normal(scope: Scope, dims: Dims, key: int, *, device: torch.device | None) -> Local:
    """This rank's part of a tensor of standard normal numbers, by Box and Muller, in float64."""
    first, second = (uniform(scope, dims, key_of(key, number), device=device) for number in (1, 2))
    radius = first.neg_().log1p_().mul_(-2).sqrt_()
    return radius.mul_(second.mul_(2 * math.pi).cos_())


def _bits(scope: Scope, dims: Dims, key: int, device: torch.device | None) -> Local:
    """64 bits for each entry, by its index in the whole tensor."""
    index = torch.zeros((1,) * len(dims), dtype=torch.int64, device=device)
    stride = 1
    for place, dim in reversed(list(enumerate(dims))):
        begin, length = scope.offset(dim), scope.local_size(dim)
        along = torch.arange(begin, begin + length, device=device) * stride
        index = index + along.view([-1 if other == place else 1 for other in range(len(dims))])
        stride *= dim.size
    bits = index.mul_(_GOLDEN).add_(_signed(key))  # in place: these are as large as what they are drawn for, or twice
    for by, factor in ((30, _FIRST), (27, _SECOND)):
        bits.bitwise_xor_(_shifted(bits, by)).mul_(factor)
    return bits.bitwise_xor_(_shifted(bits, 31))


def _shifted(bits: Local, by: int) -> Local:
    """A logical shift to the right: torch's takes the sign along."""
    return (bits >> by).bitwise_and_((1 << (64 - by)) - 1)


def _scrambled(number: int) -> int:
    number = (number + (_GOLDEN & _MASK)) & _MASK
    number = ((number ^ (number >> 30)) * (_FIRST & _MASK)) & _MASK
    number = ((number ^ (number >> 27)) * (_SECOND & _MASK)) & _MASK
    return number ^ (number >> 31)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number
