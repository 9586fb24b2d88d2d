"""`Graphs`: what gradients of a program may go back through, a graph a call of the model, and which needs which.

Within a step there is one. Outside of steps each call of a model begins another; a loss of this call may need what an
earlier one has made, and then its backward goes through both. All ranks note alike which graph needs which.
"""

from __future__ import annotations

from weakref import WeakSet, ref

import torch

from tulle.pipeline.placeholder import Operator, Placeholder
from tulle.pipeline.structure import flatten
from tulle.pipeline.tape import Graph, Tape


class Graphs:
    """Those of one program.

    Args:
        tape: Of this rank.
    """

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self.now = Graph(tape.phases)
        """The one that grows."""
        self._first = ref(self.now)
        self._all = WeakSet([self.now])

    @property
    def is_kept(self) -> bool:
        """Whether anybody still has a placeholder of the first one."""
        return self._first() is not None

    def cut_off(self) -> None:
        """What follows is apart from what was, which goes when nobody has anything of it any more."""
        self._tape.cut_off()
        self.now = Graph(self._tape.phases)
        self._all.add(self.now)

    def need(self, placeholder: Placeholder) -> bool:
        """Note that gradients go back to an earlier call, if they do; whether that is news. Every rank comes here.

        Args:
            placeholder: Of the same program.
        """
        graph = placeholder.graph
        if graph is self.now or not placeholder.needs_grad or not graph.phases:  # without phases no call has made it
            return False
        is_new = graph not in self.now.needs
        self.now.needs.add(graph)
        return is_new

    def take(self, placeholder: Placeholder) -> None:
        """Note that a placeholder of the same program stands for what comes from the call at hand, if it is trained."""
        if placeholder.needs_grad and torch.is_grad_enabled():
            placeholder.graph = self.now

    def clear(self) -> None:
        """Let go of all."""
        for graph in list(self._all):
            graph.clear()

    def end(self) -> None:
        """Let go of what nobody else holds."""
        self.now = Graph(self._tape.phases)


def is_made_by(program: Operator, given: object) -> bool:
    """Whether a gradient may go from what a call is given back to what a program has made; the same on all ranks."""
    leaves = flatten(given)[0]
    return any(isinstance(one, Placeholder) and one.needs_grad and one.program is program for one in leaves)
