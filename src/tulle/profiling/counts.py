"""`count`: what the pieces of a model leave for backward, and their floating-point operations, in one real step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker

from tulle.live import looking_at_saved
from tulle.memory import LiveBytes


@dataclass(slots=True)
class Counts:
    """What one step was seen to need.

    Args:
        activations_bytes: What each piece's forward, and what is computed before it, leaves for backward; memory that
            several leave counts for the first.
        flop: Floating-point operations of each piece's forward.
        made_bytes: Of what each module that was called returns, without sparse tensors, by name; the last call's.
        taken_bytes: Of what each module was called with that has a gradient, by name; the last call's.
        peak_bytes: The most that was alive at any moment of the step, with parameters, gradients and optimizer state.
    """

    activations_bytes: list[int]
    flop: list[float]
    made_bytes: dict[str, int] = field(default_factory=dict)
    taken_bytes: dict[str, int] = field(default_factory=dict)
    peak_bytes: int = 0


def count(
    model: nn.Module,
    names: Sequence[str],
    forward: Callable[[], Tensor],
    rest: Callable[[Tensor], object],
    held: Sequence[Tensor],
) -> Counts:
    """Run a step and count.

    Args:
        model: What runs.
        names: Of the pieces, modules none of which is within another.
        forward: Runs it, and gives the loss.
        rest: Runs backward and the optimizer, given the loss.
        held: What is in memory before: parameters, the optimizer's state.
    """
    counts = Counts([0] * len(names), [0.0] * len(names))
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    parameters = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    left: dict[int, int] = {}
    flops = FlopCounterMode(display=False)
    flops.mod_tracker = _Untracked()
    left_bytes, seen_flop = 0, 0.0

    def note(tensor: Tensor) -> None:
        nonlocal left_bytes
        if tensor.untyped_storage()._cdata not in parameters:
            memory = tensor.untyped_storage()
            left_bytes += memory.nbytes() - left.get(memory._cdata, 0)
            left[memory._cdata] = memory.nbytes()

    def cut(number: int) -> None:
        nonlocal left_bytes, seen_flop
        flop = flops.get_total_flops()
        counts.activations_bytes[number] += left_bytes
        counts.flop[number] += flop - seen_flop
        left_bytes, seen_flop = 0, flop

    with LiveBytes(device.type) as live:
        live.add(held)
        with _hooked(model, names, cut, counts), flops:
            with looking_at_saved(note):
                loss = forward()
            cut(len(names) - 1)
        rest(loss)
    counts.peak_bytes = live.peak_bytes
    return counts


class _Untracked(ModuleTracker):
    """Counts all as one: what torch's hangs on a module's input cannot be there for `torch.autograd.grad` of a leaf."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@contextmanager
def _hooked(model: nn.Module, names: Sequence[str], cut: Callable[[int], None], counts: Counts) -> Iterator[None]:
    numbers = {name: number for number, name in enumerate(names)}

    def hook(name: str) -> Any:
        def ended(_: nn.Module, args: object, kwargs: object, output: object) -> None:
            made, taken = _tensors(output), _tensors((args, kwargs))
            counts.made_bytes[name] = sum(one.nbytes for one in made if one.layout == torch.strided)
            counts.taken_bytes[name] = sum(one.nbytes for one in taken if one.requires_grad)
            if name in numbers:
                cut(numbers[name])

        return ended

    handles = [module.register_forward_hook(hook(name), with_kwargs=True) for name, module in model.named_modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _tensors(values: object) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
