"""`lent`: a model that is deferred runs for a while, for its profile, though it has no memory of its own.

Parameters are lent random numbers, by one module at a time while it runs, so that the model need not fit. Buffers are
lent the values that they will have, since they may be positions or masks that make the model run as it does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from tulle.deferred import is_deferred, values_of


@contextmanager
def lent(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Lend a model what it lacks on a device within this context; afterwards it is as it was.

    Args:
        model: Built within `tulle.deferred_init`, or there for real.
        device: Where it runs.
    """
    hooks = []
    for module in model.modules():
        own = {name: one for name, one in module._parameters.items() if one is not None and is_lacking(one, device)}
        if own:
            hooks += [
                module.register_forward_pre_hook(_lender(own, device)),
                module.register_forward_hook(_taker(own), always_call=True),
            ]
    try:
        with _lent_buffers(model, device):
            yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _lent_buffers(model: nn.Module, device: torch.device) -> Iterator[None]:
    lacking = {name: one for name, one in model.named_buffers() if is_lacking(one, device)}
    values = values_of(model, lacking) if lacking else {}
    lent_ones = {id(one): values[name].to(device) for name, one in lacking.items()}
    before = [
        (module, name, one)
        for module in model.modules()
        for name, one in module._buffers.items()
        if id(one) in lent_ones
    ]
    try:
        for module, name, one in before:
            module._buffers[name] = lent_ones[id(one)]
        yield
    finally:
        for module, name, one in before:
            module._buffers[name] = one


def is_lacking(tensor: Tensor, device: torch.device) -> bool:
    """Whether a tensor has no values, or none on a device."""
    return is_deferred(tensor) or tensor.device.type != device.type


def _lender(own: Mapping[str, nn.Parameter], device: torch.device) -> Callable[[nn.Module, object], None]:
    def lend(module: nn.Module, _: object) -> None:
        for name, one in own.items():
            if is_deferred(one):
                values = torch.randn(one.shape, dtype=one.dtype, device=device) * 0.02
            else:
                values = one.detach().to(device)
            module._parameters[name] = nn.Parameter(values, one.requires_grad)

    return lend


def _taker(own: Mapping[str, nn.Parameter]) -> Callable[[nn.Module, object, object], None]:
    def take(module: nn.Module, _: object, __: object) -> None:
        module._parameters.update(own)

    return take
