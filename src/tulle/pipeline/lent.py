"""`lent`: a model that is deferred runs for a while, for its profile, though it has no memory of its own.

Parameters are lent random numbers, by one module at a time while it runs, so that the model need not fit; one that is
read past its module (`nn.MultiheadAttention` reads its projection's weight, a head the table's) to the operation that
reads it. Buffers are lent the values that they will have, since they may be positions or masks that make the model run
as it does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from tulle.deferred import is_deferred, values_of
from tulle.parts import local_of
from tulle.pipeline.placeholder import is_about_shape


@contextmanager
def lent(model: nn.Module, device: torch.device) -> Iterator[Collection[int]]:
    """Lend a model what it lacks on a device within this context, which gives the storages of what is lent just now.

    Afterwards the model is as it was.

    Args:
        model: Built within `tulle.deferred_init`, or there for real.
        device: Where it runs.
    """
    hooks, loans = [], _Loans(device)
    for module in model.modules():
        own = {name: one for name, one in module._parameters.items() if one is not None and is_lacking(one, device)}
        if own:
            hooks += [
                module.register_forward_pre_hook(_lender(own, loans)),
                module.register_forward_hook(_taker(own, loans), always_call=True),
            ]
    try:
        with _lent_buffers(model, device), _LentToOperations(loans) if hooks else nullcontext():
            yield loans.storages
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
    return tensor.is_meta or is_deferred(tensor) or tensor.device.type != device.type


class _Loans:
    """Parameters that are lent, and where they lie."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.storages: set[int] = set()

    def give(self, one: nn.Parameter) -> nn.Parameter:
        if is_deferred(one):
            values = torch.randn(one.shape, dtype=one.dtype, device=self.device) * 0.02
        else:
            values = local_of(one).to(self.device)
        self.storages.add(values.untyped_storage()._cdata)
        return nn.Parameter(values, one.requires_grad)

    def take_back(self, one: Tensor) -> None:
        self.storages.discard(one.untyped_storage()._cdata)


def _lender(own: Mapping[str, nn.Parameter], loans: _Loans) -> Callable[[nn.Module, object], None]:
    def lend(module: nn.Module, _: object) -> None:
        module._parameters.update({name: loans.give(one) for name, one in own.items()})

    return lend


def _taker(own: Mapping[str, nn.Parameter], loans: _Loans) -> Callable[[nn.Module, object, object], None]:
    def take(module: nn.Module, _: object, __: object) -> None:
        for name in own:
            loan = module._parameters[name]
            if loan is not None:
                loans.take_back(loan)
        module._parameters.update(own)

    return take


class _LentToOperations(TorchFunctionMode):
    """Lends to an operation what its module was not: a parameter of another module."""

    def __init__(self, loans: _Loans) -> None:
        super().__init__()
        self._loans = loans

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if is_about_shape(func):
            return func(*args, **(kwargs or {}))
        lent_here: list[nn.Parameter] = []

        def there(parameter: nn.Parameter) -> nn.Parameter:
            if not is_lacking(parameter, self._loans.device):
                return parameter
            lent_here.append(self._loans.give(parameter))
            return lent_here[-1]

        there_args = tree_map_only(nn.Parameter, there, args)
        there_kwargs = tree_map_only(nn.Parameter, there, kwargs or {})
        try:
            return func(*there_args, **there_kwargs)
        finally:
            for loan in lent_here:
                self._loans.take_back(loan)
