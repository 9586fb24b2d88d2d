"""`Ledger`: counts, line by line of the program, what each operation computes and what it keeps for backward.

A line is where the user's program calls the library. What backward does belongs to the line whose forward it undoes:
autograd numbers its nodes in the order in which forward makes them.

    forward     line 12 makes nodes 40 to 43     line 13 makes nodes 44 to 46     ...
    backward    node 45 runs: line 13
"""

from __future__ import annotations

import linecache
import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from tulle.live import looking_at_saved

Place = tuple[str, int]
_LIBRARIES = str(Path(torch.__file__).parent) + "/", str(Path(__file__).parents[1]) + "/"
_LAYERS = str(Path(__file__).parent / "layers")
GRADIENTS: Place = ("parameter gradients", 0)
"""The line of what is put off to the end of backward."""


@dataclass(slots=True)
class Line:
    """What one line of a program costs on each rank, forward and backward.

    Args:
        place: File and number.
        flops: Multiplications and additions of its products, as torch counts them.
        bytes_sent: Payload that a rank sends.
        messages: Messages that it sends.
        kept_bytes: Memory that it keeps from forward to backward.
        written_bytes: Memory that its operations fill, views not counted.
    """

    place: Place
    flops: int = 0
    bytes_sent: int = 0
    messages: int = 0
    kept_bytes: int = 0
    written_bytes: int = 0
    collectives: dict[str, int] = field(default_factory=dict)
    """How often each kind of collective happens."""

    @property
    def code(self) -> str:
        """The line's text."""
        return linecache.getline(*self.place).strip() if self.place != GRADIENTS else GRADIENTS[0]

    @property
    def where(self) -> str:
        """The line's file and number, short."""
        return f"{Path(self.place[0]).name}:{self.place[1]}" if self.place != GRADIENTS else ""


class Ledger(TorchDispatchMode):
    """Counts while its block runs; of one step, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[Place, Line] = {}
        self._first_nodes: list[int] = []
        self._places: list[Place] = []
        self._kept: set[int] = set()

    def line(self) -> Line:
        """The line whose forward runs, or whose forward's undoing does."""
        place = self._undone() if _is_backward() else self._current()
        return self.lines.setdefault(place, Line(place))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        line = self.line()
        out = func(*args, **(kwargs or {}))
        line.written_bytes += _written_bytes(out, args)
        flops = flop_registry.get(func._overloadpacket)
        if flops is not None:
            line.flops += flops(*args, **(kwargs or {}), out_val=out)
        return out

    @contextmanager
    def keeping(self, but: set[int]) -> Iterator[None]:
        """Count what is kept for backward within the block, each memory once, but for parameters' own.

        Args:
            but: Memory that is there anyway, by `memory_of`.
        """

        def note(tensor: torch.Tensor) -> None:
            memory = memory_of(tensor)
            if memory not in but and memory not in self._kept:
                self._kept.add(memory)
                self.line().kept_bytes += tensor.untyped_storage().nbytes()

        with looking_at_saved(note):
            yield

    def _current(self) -> Place:
        place = _calling_line()
        if not self._places or self._places[-1] != place:
            # The node of what runs was numbered just before it.
            self._first_nodes.append(vars(torch.autograd)["_get_sequence_nr"]() - 1)
            self._places.append(place)
        return place

    def _undone(self) -> Place:
        node = torch._C._current_autograd_node()
        number = -1 if node is None else node._sequence_nr()
        known = bisect_right(self._first_nodes, number) - 1
        # Nodes that accumulate gradients come with the largest number of all, the end of backward without any.
        is_numbered = 0 <= number < 2**62 and known >= 0
        return self._places[known] if is_numbered else GRADIENTS


def memory_of(tensor: torch.Tensor) -> int:
    """What two tensors have in common that share their memory."""
    return tensor.untyped_storage()._cdata


def _written_bytes(out: object, args: Iterable[object]) -> int:
    given = {memory_of(one) for one in args if isinstance(one, torch.Tensor)}
    results = out if isinstance(out, tuple | list) else (out,)
    return sum(
        one.numel() * one.element_size()
        for one in results
        if isinstance(one, torch.Tensor) and memory_of(one) not in given
    )


def _is_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _calling_line() -> Place:
    """The innermost line that is neither torch's nor tulle's; the layers of this room count as programs."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_LAYERS) or not name.startswith(_LIBRARIES):
            return name, frame.f_lineno
        frame = frame.f_back
    return "", 0
