"""What an optimizer's step sees of parts and of their gradients: plain tensors; what it keeps of them is plain, too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from tulle.parts import Part, begin_step, end_step, guard_again, keep_plainly, lift, lower
from tulle.step_hooks import Arguments, hook_failed, hook_first_after, hook_last
from tulle.tables.closures import called_first
from tulle.tables.gradient import ShardGradient
from tulle.tables.row_numbers import forget
from tulle.traits import states_of

_PARTS = "_tulle_parts"
"""The attribute by which an optimizer knows the parts that are plain while it steps."""


class _Plainly:
    """Hooks of an optimizer's step, in which gradients of parts are plain: the class takes its time at each operation.

    Hooks of others are to see the class: the one before the step is among the last, the one after it the first.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        hook_last(optimizer, self._before)
        hook_first_after(optimizer, self._after)
        hook_failed(optimizer, self._tell)
        self._plain: list[Tensor] = []

    def _before(self, optimizer: Optimizer, *_: object) -> None:
        gradients = (parameter.grad for group in optimizer.param_groups for parameter in group["params"])
        self._plain = [gradient for gradient in gradients if type(gradient) is ShardGradient]
        for gradient in self._plain:
            gradient.__class__ = Tensor

    def _after(self, optimizer: Optimizer, *_: object) -> None:
        """Give gradients their class back; what the state keeps of those that had it in the step is plain."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if isinstance(parameter.grad, ShardGradient):
                    # A state that is sharded, by piece, refuses to be asked for a parameter's.
                    _make_plain(dict.get(optimizer.state, parameter, {}))
        self._tell()

    def _tell(self) -> None:
        """Have gradients know again that they are of parts."""
        for gradient in self._plain:
            gradient.__class__ = ShardGradient
        self._plain.clear()


@contextmanager
def plain_in_step(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Within this context parameters, and their gradients, are plain: a step treats every number by itself."""
    lifted = lift(parameters)
    gradients: list[Tensor] = [gradient for p in parameters if type(gradient := p.grad) is ShardGradient]
    for gradient in gradients:
        gradient.__class__ = Tensor
    try:
        yield
    finally:
        for gradient in gradients:
            gradient.__class__ = ShardGradient
        lower(lifted)


def step_plainly(optimizer: Optimizer, *, is_elementwise: bool) -> None:
    """Have parts be plain parameters while an optimizer steps, as torch has fused kernels for these alone.

    If it treats every number by itself their gradients are plain tensors, too. To any other parts stay parts, whose
    norms are the wholes', but for those with sparse gradients, of which the numbers of rows are plain, too; what its
    state keeps of any, a moving average say, is plain after each step. Each step counts as a write. To be called again
    when the optimizer was given parameters.
    """
    parts = [p for group in optimizer.param_groups for p in group["params"] if isinstance(p, Part)]
    known: list[nn.Parameter] = vars(optimizer).setdefault(_PARTS, [])
    is_new, ids = bool(parts) and not known, {*map(id, known)}
    for part in (part for part in parts if id(part) not in ids):
        known.append(part)
        keep_plainly(optimizer, part)  # Adagrad's sums are made with it, not in its first step
    if not is_new:
        return
    hook_last(optimizer, partial(_lift, known, is_elementwise))
    hook_first_after(optimizer, partial(_count_as_written, known))
    hook_first_after(optimizer, partial(guard_again, known))
    hook_failed(optimizer, partial(guard_again, known))
    if is_elementwise:
        _Plainly(optimizer)
    else:
        hook_first_after(optimizer, partial(_end_step, known))
        hook_failed(optimizer, partial(_mark, known, is_stepped=False))
        hook_failed(optimizer, partial(end_step, optimizer))


def _lift(
    parts: Sequence[nn.Parameter],
    is_elementwise: bool,  # noqa: FBT001 - what was asked when it was hooked
    optimizer: Optimizer,
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
) -> Arguments | None:
    called = called_first(arguments, keywords) if is_elementwise else None
    if is_elementwise or (len(arguments) == 1 and not keywords):  # else a closure may call the model within the step
        lift(part for part in parts if is_elementwise or _is_by_row(part))
        _mark(parts, is_stepped=True)
    if not is_elementwise:
        begin_step(optimizer)
    return called


def _is_by_row(part: nn.Parameter) -> bool:
    """Whether a step goes by the numbers of the rows that a gradient stores, which are the part's."""
    return part.grad is not None and part.grad.layout != torch.strided


def _count_as_written(parts: Sequence[nn.Parameter], *_: object) -> None:
    """Have what was fetched of a table be old on all ranks: SparseAdam writes nothing where no row has a gradient."""
    with torch._C.DisableTorchFunctionSubclass():
        increment_version([part for part in parts if part.grad is not None])


def _end_step(parts: Sequence[nn.Parameter], optimizer: Optimizer, *_: object) -> None:
    end_step(optimizer)
    _mark(parts, is_stepped=False)
    for state in states_of(optimizer).values():
        _make_plain(state)


def _mark(parts: Sequence[nn.Parameter], *, is_stepped: bool) -> None:
    forget()
    for gradient in (part.grad for part in parts):
        if isinstance(gradient, ShardGradient):
            gradient.is_stepped = is_stepped


def _make_plain(state: Mapping[str, Any]) -> None:
    for value in state.values():
        if type(value) is ShardGradient:
            object.__setattr__(value, "__class__", Tensor)
            vars(value).clear()
