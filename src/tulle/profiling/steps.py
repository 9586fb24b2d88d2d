"""`Twin`: a copy of a model and its optimizers that steps in their place, so that a profile leaves no trace."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tulle.deferred import is_deferred, values_of
from tulle.pipeline.profile import as_call
from tulle.profiling.borrowed import Borrowed, borrowed, fit_optimizers
from tulle.profiling.laps import now_on
from tulle.tensor_parallel.twin import computed
from tulle.traits import states_of

Loss = Callable[[Any], Tensor]
"""From what the model gives to what backward starts from."""
_SPREAD = 0.02
"""Of random parameters, which must not overflow."""


@dataclass(frozen=True, slots=True)
class Twin:
    """A copy that takes real steps, at a learning rate of nothing.

    What a step takes is the same; but a model that was trained on a few samples over and over would run off, to numbers
    that its own forward may refuse.

    Args:
        model: The copy.
        optimizers: Over the copy's parameters, with copies of the state.
        samples: Batches, each as the model is called with it.
        loss: From the model's result to the loss.
        device: Where it runs.
        borrowed: Tables that it has not copied.
    """

    model: nn.Module
    optimizers: Sequence[Optimizer]
    samples: Sequence[object]
    loss: Loss
    device: torch.device
    borrowed: Sequence[Borrowed] = ()

    @staticmethod
    def of(
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        samples: Sequence[object],
        loss: Loss,
        *,
        borrows: bool = False,
    ) -> Twin:
        """Copy a model and its optimizers, without hooks of these; what has no values gets random ones.

        Args:
            model: The model.
            optimizers: Over its parameters.
            samples: Batches.
            loss: From what it gives to the loss.
            borrows: Whether tables may stay where they are, as the model does nothing while the twin is there.
        """
        device = next((one.device for one in model.parameters() if not one.is_meta), torch.device("cpu"))
        memo = _given(model, device)
        tables = borrowed(model, optimizers) if borrows else {}
        memo.update((table, one.read) for table, one in tables.items())
        copied = copy.deepcopy(model, memo)
        for table, one in tables.items():
            memo.update({table: one.written, **one.state})
        stepping = copy.deepcopy(list(optimizers), memo)
        for one, optimizer in zip(stepping, optimizers, strict=True):
            _complete(one, optimizer, memo)
            for group in one.param_groups:
                if group.get("lr") is not None:  # some choose it themselves (Adafactor's relative steps)
                    group["lr"] = 0 * group["lr"]
        fit_optimizers([*tables.values()], stepping)
        twin = Twin(copied, stepping, samples, loss, device, [*tables.values()])
        twin.clear()
        return twin

    def forward(self, sample: object) -> Tensor:
        """The loss of a batch."""
        args, kwargs = as_call(sample, self.device)
        return self.loss(self.model(*args, **kwargs))

    def backward(self, sample: object) -> None:
        """Give the optimizers the gradients of a batch."""
        self.forward(sample).backward()
        self._hand_over()

    def update(self) -> None:
        """Step all optimizers, and forget the gradients."""
        self._hand_over()
        for optimizer in self.optimizers:
            optimizer.step()
        self.clear()

    def clear(self) -> None:
        """Forget the gradients."""
        for parameter in self.model.parameters():
            parameter.grad = None
        self._hand_over()

    def step(self, sample: object) -> None:
        """One whole step."""
        self.forward(sample).backward()
        self.update()

    def held(self) -> list[Tensor]:
        """All parameters, buffers and states of optimizers, each table once."""
        written = {id(one.read): one.written for one in self.borrowed}
        state = [entry for one in self.optimizers for kept in states_of(one).values() for entry in kept.values()]
        parameters = [written.get(id(one), one) for one in self.model.parameters()]
        return [*parameters, *self.model.buffers(), *(one for one in state if isinstance(one, Tensor))]

    def _hand_over(self) -> None:
        for one in self.borrowed:
            one.hand_over()

    def seconds(self, work: Callable[[], object]) -> float:
        """What some work takes."""
        begin_s = now_on(self.device)
        work()
        return now_on(self.device) - begin_s


def _complete(copied: Optimizer, optimizer: Optimizer, memo: dict[int, object]) -> None:
    """Give a copy what `torch.optim.Optimizer` leaves out of one: what a class derived from it has set besides."""
    own = [name for name in vars(optimizer) if name not in vars(copied) and not hasattr(type(optimizer), name)]
    for name in own:
        with suppress(Exception):  # what cannot be copied may not be needed
            setattr(copied, name, copy.deepcopy(getattr(optimizer, name), memo))


def _given(model: nn.Module, device: torch.device) -> dict[int, object]:
    """What takes the place of tensors that cannot be copied: random parameters, the values of all others."""
    given: dict[int, object] = {id(one): one.detach().clone() for one in computed(model)}
    for parameter in model.parameters():
        if is_deferred(parameter):
            values = torch.randn(parameter.shape, dtype=parameter.dtype, device=device) * _SPREAD
            given[id(parameter)] = nn.Parameter(values, parameter.requires_grad)
    lacking = {name: one for name, one in model.named_buffers() if is_deferred(one)}
    values_by_name = values_of(model, list(lacking)) if lacking else {}
    return given | {id(one): values_by_name[name].to(device) for name, one in lacking.items()}
