"""Random numbers that do not depend on which rank draws them.

Every rank runs the program, but only a module's owner runs the module. So each program (one micro-batch) has a stream
of its own, which all ranks draw from alike between modules, and each call of a placed module, or of an operation on a
placeholder, draws from a stream that is seeded by step, micro-batch and the number of the call.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np
import torch

from tulle.generators import GENERATORS, begin_anew, put_back, standing


def seed_of(*parts: object) -> int:
    """A seed that is the same on all ranks for the same parts.

    Example:
        >>> seed_of(0, "h.3", 1) == seed_of(0, "h.3", 1) != seed_of(0, "h.3", 2)
        True
    """
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=4).digest(), "little")


def seed_of_numbers(*parts: int) -> int:
    """A seed that is the same on all ranks for the same numbers, of which Python has the same hash everywhere.

    Example:
        >>> seed_of_numbers(1, 2, 3)
        3877358827
    """
    return hash(parts) & 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class State:
    """Where the three generators of a process stand: torch's (of the CPU and of this device), Python's and numpy's."""

    torch_cpu: torch.Tensor
    torch_cuda: torch.Tensor | None
    python: Any
    numpy: Any

    @staticmethod
    def now() -> State:
        """Where they stand."""
        cuda = torch.cuda.get_rng_state() if _has_cuda() else None
        return State(torch.default_generator.get_state(), cuda, random.getstate(), np.random.get_state())

    def restore(self) -> None:
        """Put them back there."""
        torch.default_generator.set_state(self.torch_cpu)
        if self.torch_cuda is not None:
            torch.cuda.set_rng_state(self.torch_cuda)
        random.setstate(self.python)
        np.random.set_state(self.numpy)


def seed_all(seed: int) -> None:
    """Seed the three generators."""
    _seed_torch(seed)
    random.seed(seed)
    np.random.seed(seed)


@contextmanager
def forked(seed: int) -> Iterator[None]:
    """Draw from a stream of its own within this context, and go on with the former after it."""
    state = State.now()
    seed_all(seed)
    try:
        yield
    finally:
        state.restore()


class forked_torch:  # noqa: N801 - used like a function; a class costs half as much as a generator
    """The same for torch's generators alone, which costs some microseconds on a CPU."""

    __slots__ = ("_cpu", "_cuda", "_seed")

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __enter__(self) -> None:
        self._cpu, self._cuda = torch.default_generator.get_state(), torch.cuda.get_rng_state() if _has_cuda() else None
        _seed_torch(self._seed)

    def __exit__(self, *_: object) -> None:
        torch.default_generator.set_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)


def forked_generators(values: Iterable[object], seed: int) -> AbstractContextManager[object]:
    """The same for generators of the user's own, of which other ranks do not see that something was drawn."""
    given = [value for value in values if isinstance(value, GENERATORS)]
    return _forked_generators(given, seed) if given else _NOTHING_FORKED


_NOTHING_FORKED = nullcontext()


@contextmanager
def _forked_generators(given: Sequence[Any], seed: int) -> Iterator[None]:
    before = list(map(standing, given))
    for number, generator in enumerate(given):
        own = generator.initial_seed() if isinstance(generator, torch.Generator) else number
        begin_anew(generator, seed_of(seed, own))
    try:
        yield
    finally:
        for generator, where in zip(given, before, strict=True):
            put_back(generator, where)


class Drawing(Protocol):
    """Knows whether calls draw from Python's or numpy's generator; None until one was seen."""

    draws: bool | None


class forked_python:  # noqa: N801 - used like a function
    """The same for Python's and numpy's generators, if a call may draw from them.

    These cost ten times as much, and few modules use them: whether one does is seen at its first call.

    Args:
        known: Of calls such as this one; what is found out is put in.
        seed: Of the stream.
    """

    __slots__ = ("_begin", "_known", "_numpy", "_python", "_seed")

    def __init__(self, known: Drawing, seed: int) -> None:
        self._known, self._seed = known, seed

    def __enter__(self) -> None:
        if self._known.draws is not False:
            self._python, self._numpy = random.getstate(), np.random.get_state()
            random.seed(self._seed)
            np.random.seed(self._seed)
            self._begin = None if self._known.draws else (random.getstate(), np.random.get_state())

    def __exit__(self, *_: object) -> None:
        if self._known.draws is False:
            return
        if self._begin is not None:
            python, numpy = self._begin
            self._known.draws = random.getstate() != python or not _is_same(np.random.get_state(), numpy)
        random.setstate(self._python)
        np.random.set_state(self._numpy)


def _is_same(state: Any, other: Any) -> bool:
    """Whether two states of numpy's generator are; compared as text, they take 10 ms."""
    return all(map(np.array_equal, state, other))


def _has_cuda() -> bool:
    return torch.cuda.is_initialized()


def _seed_torch(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    if _has_cuda():
        torch.cuda.manual_seed(seed)
