"""`Laps`: times the pieces of a model within real training steps, so that what they take adds up to the step.

Forward and backward are cut where one piece hands over to the next. What a model computes between two pieces counts for
the later one, and what comes after the last, a loss say, for the last:

    forward     |  first piece  | between, second piece | between, third piece, loss |
    backward    |  first piece  |     second piece      |        third piece         |   read from right to left

An operation's backward belongs to the piece in whose stretch of the forward it ran: autograd numbers its nodes as they
are made, and runs them by falling number, so a few hooks at the ends of stretches see it all.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from tulle.comm import now_s

_OF_A_LEAF = 2**63
"""Nodes that add a gradient up have the largest numbers: they run as soon as there is one, with whoever made it."""


@dataclass(slots=True)
class Laps:
    """A watch for one model, cut at the ends of some of its modules' calls.

    Args:
        model: Which runs whole steps.
        names: Of modules none of which is within another.
        device: Where it runs.
    """

    model: nn.Module
    names: Sequence[str]
    device: torch.device
    forward_s: list[float] = field(init=False)
    """Of each piece in the last step."""
    backward_s: list[float] = field(init=False)
    _ends: list[tuple[int, int]] = field(init=False)
    """The number that autograd's next node has when a piece ends, and the piece."""
    _last_s: float = field(default=0.0, init=False)
    _is_forward: bool = field(default=False, init=False)
    _running: int = field(default=0, init=False)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within this context calls of the pieces are seen."""
        handles = [
            self.model.get_submodule(name).register_forward_hook(self._cutter(number))
            for number, name in enumerate(self.names)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def begin_forward(self) -> None:
        """Start a step."""
        self.forward_s, self.backward_s = [0.0] * len(self.names), [0.0] * len(self.names)
        self._ends = []
        self._is_forward = True
        self._last_s = now_on(self.device)

    def end_forward(self, loss: Tensor) -> None:
        """The loss is there; its backward begins next."""
        tail_s = now_on(self.device) - self._last_s
        self._is_forward = False
        last = self._ends[-1][1] if self._ends else 0
        self.forward_s[last] += tail_s
        self._mark_backward(loss, last)
        self._last_s, self._running = now_on(self.device), last

    def end_backward(self) -> None:
        """All gradients are there."""
        self._lap(self._running)

    def owner_of(self, node: Node) -> int:
        """The piece in whose stretch of the last forward a node was made."""
        at = bisect_left(self._ends, (node._sequence_nr() + 1, -1))
        return self._ends[min(at, len(self._ends) - 1)][1] if self._ends else 0

    def _cutter(self, number: int) -> Any:
        def cut(*_: object) -> None:
            if self._is_forward:  # else a module that recomputes its activations
                now_s = now_on(self.device)
                self.forward_s[number] += now_s - self._last_s
                self._last_s = now_s
                self._ends.append((torch.autograd._get_sequence_nr(), number))  # pyright: ignore[reportPrivateImportUsage]

        return cut

    def _mark_backward(self, loss: Tensor, last: int) -> None:
        """Have the first node of each stretch, in the order of backward, say that the stretch begins."""
        previous = last
        for node in sorted(_nodes(loss), key=lambda node: -node._sequence_nr()):
            owner = self.owner_of(node)
            if owner != previous:
                node.register_prehook(self._handover(owner))
                previous = owner

    def _handover(self, owner: int) -> Any:
        def begin(_: object) -> None:
            self._lap(self._running)
            self._running = owner

        return begin

    def _lap(self, piece: int) -> None:
        now_s = now_on(self.device)
        self.backward_s[piece] += now_s - self._last_s
        self._last_s = now_s


def now_on(device: torch.device) -> float:
    """The time, when all that a device was given has ended."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return now_s()


def _nodes(loss: Tensor) -> set[Node]:
    """Those of a graph that have a number of their own."""
    assert loss.grad_fn is not None, "a loss that depends on parameters"
    found, waiting = {loss.grad_fn}, [loss.grad_fn]
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if node is not None and node not in found and node._sequence_nr() < _OF_A_LEAF:
                found.add(node)
                waiting.append(node)
    return found
