"""`Modes`: what a step function sets on modules for a while is of its own micro-batch.

A forward in `eval()` for targets, a critic that is frozen while its opponent learns, weights that `functional_call`
lends: code sets such things on modules and puts them back. Micro-batches pass one another wherever one waits, so each
must find them as it left them. Those that begin find them as the last of those before them left them at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

_Places = dict[str, nn.Parameter | None]
Lent = dict[str, Tensor]
"""Tensors that are no parameters, and stand in the places of some, by name."""


@dataclass(frozen=True, slots=True, eq=False)
class Mode:
    """How a program finds the modules.

    Args:
        training: Of each module, whether it trains.
        lent: Of each module, what stands in the places of its parameters.
        trained: Of each parameter, whether it needs a gradient.
    """

    training: Sequence[bool]
    lent: Sequence[Lent]
    trained: Sequence[bool]


class Modes:
    """Those of all programs of one step.

    As long as no program has set anything they cost a look at each call of a module.

    Args:
        changed: Called when what a program finds is put back, and other parameters need gradients than before.
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._begin_with([])

    def _begin_with(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._own: list[dict[str, nn.Parameter | None]] = [dict(module._parameters) for module in modules]
        self._parameters = list({id(one): one for own in self._own for one in own.values() if one is not None}.values())
        self._training = {id(module): module.training for module in modules}
        self._within: dict[int, tuple[list[nn.Module], list[bool], list[_Places], list[Tensor | None]]] = {}
        """Of each module that was called, it and those in it, whether these train, and where which parameters were."""
        self._begin = self._now()
        self._ended = -1
        self._is_varied = False

    @contextmanager
    def step(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """The step that runs within this context.

        Args:
            modules: All that there are of models that are placed.
        """
        self._begin_with(list({id(module): module for module in modules}.values()))
        try:
            yield
        finally:
            self._begin_with([])

    def look(self, module: nn.Module) -> Mode | None:
        """A module is called, or a whole model: see whether something of it was set since the step began.

        Returns:
            How all modules have been since then; None if it is one of no step, or any was set.
        """
        if self._is_varied or id(module) not in self._training:
            return None
        within = self._within.get(id(module))
        if within is None:
            inner = list(module.modules())
            training = [self._training.get(id(one), one.training) for one in inner]
            within = inner, training, [one._parameters for one in inner if one._parameters], []
            self._within[id(module)] = within
        inner, training, places, seen = within
        now = list(chain.from_iterable(map(dict.values, places)))
        if len(now) != len(seen) or not all(map(is_, now, seen)):
            self._is_varied = any(map(_lent, places))
            seen[:] = () if self._is_varied else now
        self._is_varied |= [one.training for one in inner] != training
        return None if self._is_varied else self._begin

    def vary(self) -> None:
        """Something is about to be set."""
        self._is_varied = True

    def now(self) -> Mode:
        """What the program that runs finds."""
        return self._now() if self._is_varied else self._begin

    def put_back(self, mode: Mode | None = None) -> None:
        """Let a program go on with what it found, or begin."""
        if not self._is_varied:
            return
        mode = mode or self._begin
        for module, own, training, lent in zip(self._modules, self._own, mode.training, mode.lent, strict=True):
            if module.training != training:
                module.training = training
            if lent or _lent(module._parameters):
                places: dict[str, Any] = module._parameters  # torch too puts there what is no parameter
                places.update({**own, **lent})
        with torch._C.DisableTorchFunction():
            others = [
                (parameter, is_trained)
                for parameter, is_trained in zip(self._parameters, mode.trained, strict=True)
                if parameter.requires_grad != is_trained
            ]
            for parameter, is_trained in others:
                parameter.requires_grad_(is_trained)
            if others:
                self._changed()

    def end(self, micro_batch: int) -> None:
        """A program is over; others begin, and the step ends, with what the last micro-batch of these has left."""
        if self._is_varied and micro_batch > self._ended:
            self._begin, self._ended = self._now(), micro_batch

    def _now(self) -> Mode:
        with torch._C.DisableTorchFunction():
            return Mode(
                [module.training for module in self._modules],
                [_lent(module._parameters) for module in self._modules],
                [parameter.requires_grad for parameter in self._parameters],
            )


def _lent(parameters: Mapping[str, Tensor | None]) -> Lent:
    return {name: one for name, one in parameters.items() if one is not None and not isinstance(one, nn.Parameter)}
