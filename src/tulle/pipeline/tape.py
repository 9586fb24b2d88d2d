"""`Tape`: what one rank did of one micro-batch's forward, cut where gradients must come or go.

On its own rank a stretch of operations is ordinary autograd. It is cut into *phases*, so that each phase can run
backward as one, once the gradients of all that left it are there:

    phase 0   a = f(x)      send a ─▶ rank 1                  backward: 4. gradients of a from rank 1 and from the cut
    phase 1   ◀─ receive b (which rank 1 made of a)                     3. send the gradient of b
              c = h(a, b)   a was made in phase 0: cut                  2. run backward: gradients of b and of the cut
              send c ─▶ rank 2                                          1. gradient of c from rank 2

A phase ends when something is received after something was sent, because that may depend on it. Gradients come for
everything that leaves a phase ("none" is a gradient too), and all ranks walk their phases in the reverse order of one
program, so no rank waits for one that waits for it. What no gradient came through a later backward may come to yet, as
in one process: both ranks of a value keep it then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from tulle.errors import GradientError
from tulle.pipeline.split_backward import Split, Work, splits_of

PutOff = Callable[[Sequence[Work]], None]


class Walk:
    """Whether the backward of a tape runs, or of one of those that take turns outside of steps."""

    __slots__ = ("is_on",)

    def __init__(self) -> None:
        self.is_on = False


class Entry:
    """Where a tensor enters a phase, and the gradient that comes back to it.

    Args:
        tensor: That enters.
        walk: Of the tape, if it is on one.
        is_leaf: Whether it is a parameter, to which any number of backwards may come.
    """

    __slots__ = ("_given", "_is_leaf", "anchor", "gradient", "is_awaited", "is_over", "walk")

    def __init__(self, tensor: Tensor, walk: Walk | None = None, *, is_leaf: bool = False) -> None:
        self.walk = walk or Walk()
        self._is_leaf = is_leaf
        self.is_awaited = False
        """Whether the backward that runs takes its gradient."""
        self._given: Tensor | None = tensor.detach()
        self.anchor = torch.empty(0, requires_grad=True)
        """The leaf where autograd's graph of the phase ends."""
        self.gradient: Tensor | None = None
        self.is_over = False

    def tensor(self) -> Tensor:
        """The same memory as a tensor of this phase: no leaf, so that it may be written in, as in one process."""
        return _enter(self.anchor, self)

    def take_given(self) -> Tensor:
        """Hand the tensor over, once."""
        given, self._given = self._given, None
        assert given is not None, "an entry is entered once"
        return given

    def take_gradient(self, *, retain_graph: bool) -> Tensor | None:
        """Hand the gradient over; no other comes, unless it is a leaf's or the graph is retained."""
        gradient, self.gradient = self.gradient, None
        self.is_over |= not (gradient is None or self._is_leaf or retain_graph)
        return gradient


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, entry: Entry) -> Tensor:
        ctx.entry = entry
        return entry.take_given()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.entry.is_over:
            raise GradientError(
                "backward came to a tensor of a pipeline whose own backward is over: detach what is carried on from "
                "one backward to the next, or keep the graph with retain_graph=True"
            )
        if ctx.entry.walk.is_on and not ctx.entry.is_awaited:
            raise GradientError(
                "backward came to an earlier call of the model, outside of steps, of which other stages do not know, "
                "by a tensor that a module read past its arguments (a cache, an attribute), or across another "
                "backward: do these calls and the backward in one tulle.step, pass the tensor as an argument, or "
                "detach it"
            )
        had = ctx.entry.gradient
        ctx.entry.gradient = gradient if had is None else had + gradient
        return None, None


_enter = _Enter.apply
"""Taken before `intercept_functions`, which would look at each."""


class _Sent(NamedTuple):
    """What has left a phase for another rank.

    Args:
        number: Of the value.
        to: The rank it went to.
        edge: Where its gradient goes in, if anywhere.
        is_leaf: Whether it is a parameter, to which any number of backwards may come.
    """

    number: int
    to: int
    edge: GradientEdge | None
    is_leaf: bool


@dataclass(slots=True, eq=False)
class Phase:
    """A stretch of one rank's forward that runs backward as one."""

    call: int = 0
    """The number of the call of the model, outside of steps, in or after which it ran."""
    begins: int = 0
    """autograd's number for the first node that it could make; 0 for what began before the thread of the program."""
    is_over: bool = False
    """Whether no gradient can come to it any more, or go from it."""
    received: list[tuple[int, int, Entry]] = field(default_factory=list)
    """Number of the value, the rank it came from, and where it entered."""
    sent: list[_Sent] = field(default_factory=list)
    cuts: list[tuple[GradientEdge, Entry]] = field(default_factory=list)
    """Values that a later phase went on with."""
    seeds: list[tuple[GradientEdge, Tensor]] = field(default_factory=list)
    """Where backward begins."""
    entered: list[Tensor] = field(default_factory=list)
    """The anchors of what entered, from other ranks or earlier phases; none once backward has come by."""

    def let_go(self, gradients: Sequence[Tensor | None]) -> None:
        """Forget what gradients have come through, behind a backward that does not retain the graph.

        Args:
            gradients: Of what was sent.
        """
        self.received = [(number, source, entry) for number, source, entry in self.received if not entry.is_over]
        self.sent = [one for one, gradient in zip(self.sent, gradients, strict=True) if gradient is None or one.is_leaf]
        self.cuts = [(edge, entry) for edge, entry in self.cuts if not entry.is_over]
        self.entered = []
        self.is_over = not (self.received or self.sent or self.cuts)

    def clear(self) -> None:
        """Let go of the graph."""
        self.is_over = True
        for entry in (*(entry for _, _, entry in self.received), *(entry for _, entry in self.cuts)):
            entry.is_over = True
        self.received, self.sent, self.cuts, self.entered = [], [], [], []

    def await_gradients(self, *, is_awaited: bool) -> None:
        """Note whether a backward that runs takes the gradients of what entered."""
        for entry in (*(entry for _, _, entry in self.received), *(entry for _, entry in self.cuts)):
            entry.is_awaited = is_awaited

    @property
    def edges(self) -> list[GradientEdge]:
        """Where gradients may go in."""
        of_sent = [one.edge for one in self.sent if one.edge is not None]
        return [edge for edge, _ in self.seeds] + of_sent + [edge for edge, _ in self.cuts]


class Graph:
    """The phases of one call of a model; it lives as long as a placeholder that was made since, or the program runs on.

    So outside of steps a call of which nothing is left leaves nothing behind.

    Args:
        phases: Of the tape; they grow.
    """

    def __init__(self, phases: list[Phase]) -> None:
        self.phases = phases
        self.needs = set[Graph]()
        """Those of earlier calls of which something was read that gradients go back to; the same on all ranks."""

    def clear(self) -> None:
        """Let go of the graph."""
        for phase in self.phases:
            phase.clear()
        self.phases[:] = [Phase(phase.call) for phase in self.phases[-1:]]

    def needed_phases(self) -> list[Phase]:
        """Its phases and those of all that it needs, in the order in which they ran."""
        found: set[Graph] = {self}
        ahead: list[Graph] = [self]
        while ahead:
            new = ahead.pop().needs - found
            found |= new
            ahead.extend(new)
        return sorted((phase for one in found for phase in one.phases if not phase.is_over), key=lambda one: one.call)


class Tape:
    """The phases of one micro-batch on one rank.

    Args:
        walk: Of all tapes that follow one another outside of steps; default one of its own.
    """

    def __init__(self, walk: Walk | None = None) -> None:
        self.phases: list[Phase] = [Phase()]
        """Of the call of the model at hand, outside of steps."""
        self.call = 0
        """Its number."""
        self.left: int | None = None
        """While backward runs, how many phases have not come to their end."""
        self._walk = walk or Walk()

    @property
    def phase(self) -> Phase:
        """The one that is being recorded."""
        return self.phases[-1]

    def receive(self, number: int, source: int, value: Tensor, *, is_leaf: bool) -> Tensor:
        """Enter a value that came from another rank."""
        if self.phase.sent:
            self.phases.append(Phase(self.call, _count_nodes()))
        entry = self._enter(value, is_leaf=is_leaf)
        self.phase.received.append((number, source, entry))
        return entry.tensor()

    def phase_of(self, tensor: Tensor) -> Phase:
        """In which of the call at hand a tensor was made that needs a gradient, by this rank; of a leaf the last."""
        if tensor.grad_fn is None:
            return self.phase
        made = tensor.grad_fn._sequence_nr()
        return next((phase for phase in reversed(self.phases) if phase.begins <= made), self.phases[0])

    def send(self, number: int, to: int, value: Tensor, *, is_leaf: bool) -> None:
        """Note that a value leaves for another rank."""
        self.phase.sent.append(_Sent(number, to, get_gradient_edge(value) if value.requires_grad else None, is_leaf))

    def cut_off(self) -> None:
        """Go on in a new phase, and leave those so far to who has them."""
        self.call += 1
        self.phases = [Phase(self.call)]

    def cut(self, value: Tensor, phase: Phase, *, is_leaf: bool) -> Tensor:
        """Go on with a value of an earlier phase in this one."""
        entry = self._enter(value, is_leaf=is_leaf)
        phase.cuts.append((get_gradient_edge(value), entry))
        return entry.tensor()

    def backward(
        self,
        phases: Sequence[Phase],
        gradient_of: Callable[[int, int], Tensor | None],
        give: Callable[[int, int, Tensor | None], None],
        *,
        retain_graph: bool,
        put_off: PutOff | None = None,
    ) -> None:
        """Run backward through phases.

        Args:
            phases: In the order in which they ran, those of this tape the last.
            gradient_of: Called with a value's number and the rank it went to: waits for its gradient.
            give: Called with a value's number, the rank it came from, and its gradient.
            retain_graph: Whether there will be another backward.
            put_off: Called, behind `give`, with what can be computed later; None for all at once.
        """
        splits: list[Split | None] = [None] * len(phases)
        if put_off is not None:
            splits = splits_of([(phase.edges, phase.entered) for phase in phases])
        with self._walking(phases):
            for left, (phase, split) in reversed(list(enumerate(zip(phases, splits, strict=True), start=1))):
                self.left = left
                later: list[Work] = []
                ends = [*phase.seeds]
                phase.seeds.clear()
                of_sent = [gradient_of(one.number, one.to) for one in phase.sent]
                arrived = [(one.edge, gradient) for one, gradient in zip(phase.sent, of_sent, strict=True)]
                arrived += [(edge, entry.take_gradient(retain_graph=retain_graph)) for edge, entry in phase.cuts]
                ends += [(edge, gradient) for edge, gradient in arrived if edge is not None and gradient is not None]
                if ends:
                    edges, gradients = zip(*ends, strict=True)
                    if split is None:
                        torch.autograd.backward(edges, gradients, retain_graph=retain_graph)
                    else:
                        later = split.backward(edges, gradients)
                for number, source, entry in phase.received:
                    give(number, source, entry.take_gradient(retain_graph=retain_graph))
                if not retain_graph:
                    phase.let_go(of_sent)
                if put_off is not None:
                    put_off(later)
        if not retain_graph:
            kept = [phase for phase in self.phases if not phase.is_over]
            self.phases[:] = [*kept, Phase(self.call, _count_nodes() if kept else 0)]

    @contextmanager
    def _walking(self, phases: Sequence[Phase]) -> Iterator[None]:
        """While backward goes through phases, an entry of any other one that it comes to is told."""
        self._walk.is_on = True
        for phase in phases:
            phase.await_gradients(is_awaited=True)
        try:
            yield
        finally:
            self._walk.is_on, self.left = False, None
            for phase in phases:
                phase.await_gradients(is_awaited=False)

    def _enter(self, value: Tensor, *, is_leaf: bool) -> Entry:
        entry = Entry(value, self._walk, is_leaf=is_leaf)
        self.phase.entered.append(entry.anchor)
        return entry


def _count_nodes() -> int:
    """How many nodes autograd has made in this thread."""
    return vars(torch._C)["_autograd"]._get_sequence_nr()
