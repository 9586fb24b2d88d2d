"""`Replay`: a record's operations once more, for real, in their order, with the random numbers of one process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from tulle.deferred.by_rows import ByRows, by_rows
from tulle.deferred.needs import draw_in_vain, needed_calls
from tulle.deferred.record import Call, Record, View

logger = logging.getLogger("tulle")
CHUNK_BYTES = 16 * 1024 * 1024

Taker = Callable[[int, Tensor], None]
"""Takes rows of a parameter: the number of the first, and their values."""
Giver = Callable[[torch.UntypedStorage], None]
"""Gives a memory's values to the tensors of the model that are views of it."""


class Replay:
    """One replay of a record, of what is needed. A memory is there from the first operation on it to the last.

    Args:
        record: What is replayed.
        givers: What to do with memories that are wanted, by number.
        takers: Of those that are not to be whole anywhere: each with its parameter's view.
        has_all_draws: Whether to draw the random numbers of what is not wanted, too.
    """

    def __init__(
        self,
        record: Record,
        givers: Mapping[int, Giver],
        takers: Mapping[int, tuple[str, View, Taker]],
        *,
        has_all_draws: bool,
    ) -> None:
        self._record = record
        self._has_all_draws = has_all_draws
        self._givers = dict(givers)
        self._takers = dict(takers)
        self._memories: dict[int, torch.UntypedStorage] = {}
        self._needed = needed_calls(record, [*givers, *takers], has_all_draws=has_all_draws)
        self._last = {memory: number for number in sorted(self._needed) for memory in record.calls[number].touched}
        self._ways = dict(self._find_ways())

    @torch.no_grad()
    def run(self) -> None:
        """Do the operations, in the order in which they were recorded."""
        for number, call in enumerate(self._record.calls):
            if number not in self._needed:
                if call.is_random and self._has_all_draws:
                    draw_in_vain(call, CHUNK_BYTES)
                continue
            by_rows = [way for memory, way in self._ways.items() if memory in call.touched]
            if by_rows:
                self._draw(number, by_rows[0])
            else:
                self._call(call)
            for memory in [memory for memory in call.touched if self._last[memory] == number]:
                self._finish(memory)
        for memory in [*self._givers, *self._takers]:  # what no operation has touched
            if memory not in self._last:
                self._finish(memory)

    def _find_ways(self) -> Iterator[tuple[int, ByRows]]:
        for memory, (name, view, _) in self._takers.items():
            way = by_rows(self._record, view)
            if isinstance(way, ByRows):
                yield memory, way
            else:
                logger.warning("%r is made whole for a moment: %s cannot be done for some rows at a time", name, way)

    def _call(self, call: Call) -> None:
        arguments, keywords = tree_map(self._real, (call.arguments, call.keywords))
        given = tree_leaves(call.function(*arguments, **keywords))
        for view, real in zip(call.results, given, strict=False):
            if view is not None and view.memory not in self._memories:
                if real.stride() != view.stride:
                    real = torch.empty_strided(view.shape, view.stride, dtype=view.dtype).copy_(real)
                self._memories[view.memory] = real.untyped_storage()

    def _draw(self, number: int, way: ByRows) -> None:
        """A call of which a memory is made by rows: the numbers that it draws are all that it leaves."""
        if number == way.source:
            self._take(way)
        elif number in way.draws:
            draw_in_vain(self._record.calls[number], CHUNK_BYTES)

    def _take(self, way: ByRows) -> None:
        _, _, taker = self._takers.pop(way.view.memory)
        for first, chunk in way.chunks(CHUNK_BYTES):
            taker(first, chunk)

    def _real(self, value: Any) -> Any:
        if isinstance(value, View):
            return value.of(self._memory(value.memory))
        return value.clone() if isinstance(value, Tensor) else value

    def _memory(self, number: int) -> torch.UntypedStorage:
        if number not in self._memories:
            initial = self._record.initial.get(number)
            size_bytes = self._record.sizes_bytes[number]
            made = torch.empty(size_bytes, dtype=torch.uint8) if initial is None else initial.clone()
            self._memories[number] = made.untyped_storage()
        return self._memories[number]

    def _finish(self, memory: int) -> None:
        """Nothing more happens to a memory: give it away."""
        if memory in self._ways:
            if memory in self._takers:  # no random number is in it
                self._take(self._ways[memory])
            return
        if memory in self._takers:
            _, view, taker = self._takers.pop(memory)
            whole = view.of(self._memory(memory))
            rows = max(1, CHUNK_BYTES // max(1, whole.nbytes // max(1, len(whole))))
            for first in range(0, len(whole), rows):
                taker(first, whole[first : first + rows])
        elif memory in self._givers:
            self._givers.pop(memory)(self._memory(memory))
        self._memories.pop(memory, None)
