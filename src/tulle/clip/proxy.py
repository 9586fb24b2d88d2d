"""`ProxyGradient`: the one gradient on each rank that answers torch's own functions for all ranks' gradients.

`torch.nn.utils.clip_grad_norm_` and `torch.amp.GradScaler` see this rank's gradients only. Of a model that is split
over ranks each would clip by another factor, or skip a step that others make. So one gradient of each optimizer, the
proxy, gives

    its norm                   such that with this rank's others it makes up the norm of all ranks' gradients
    whether it is finite       whether all ranks' are
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from tulle.clip.total import norm_over_ranks
from tulle.comm import all_reduce
from tulle.errors import GradientError
from tulle.parts import taken_together
from tulle.spread import Spread, is_counted
from tulle.tables import ShardGradient
from tulle.tables.gradient import (
    FOREACH_NORM,
    UNSCALE,
    axes_of,
    check_alone,
    norms_over_ranks,
    order_of_norms,
    over_ranks,
)


@dataclass(frozen=True, slots=True, eq=False)
class Proxied:
    """What a proxy stands for.

    Args:
        spread: Over which axes the model is split.
        parameters: All that this rank has.
        takes_norms: Whether it answers for norms: one proxy on each rank does.
    """

    spread: Spread
    parameters: Sequence[Tensor]
    takes_norms: bool

    def dense(self) -> list[tuple[Tensor, Tensor]]:
        """This rank's parameters that have dense gradients, and these."""
        return [
            (parameter, plain(parameter.grad))
            for parameter in self.parameters
            if parameter.grad is not None and parameter.grad.layout == torch.strided
        ]

    def norm(self, order: float, proxy: Tensor) -> Tensor:
        """The norm that makes up that of all ranks' dense gradients with this rank's others."""
        mine = self.dense()
        counted = [gradient for p, gradient in mine if is_counted(p, self.spread)]
        total = norm_over_ranks(counted, self.spread, order)
        if math.isinf(order):
            return total
        others = [g for _, g in mine if g.data_ptr() != proxy.data_ptr() or not g.numel()]
        rest = get_total_norm(others, order).to(total) ** order if others else total.new_zeros(())
        own = (total**order - rest).clamp(min=0.0) ** (1 / order)
        return torch.where(total.isinf(), total, own)  # infinite on all ranks: from infinity a rest leaves NaN


@taken_together
class ProxyGradient(torch.Tensor):
    """A gradient that answers for all ranks'; other operations see a plain tensor."""

    proxied: Proxied

    @classmethod
    def of(cls, gradient: Tensor, proxied: Proxied) -> ProxyGradient:
        """Turn a gradient into one; it stays the object that it is."""
        kind: type[Tensor] = ProxyShardGradient if issubclass(type(gradient), ShardGradient) else cls
        gradient.__class__ = kind
        assert isinstance(gradient, ProxyGradient), "just made so"
        gradient.proxied = proxied
        return gradient

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Let all operations but these see plain tensors. Every rank must take norms, and look for infinities."""
        keywords = kwargs or {}
        check_alone(func, args, keywords)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **keywords)
        if func is UNSCALE:
            _agree_on_infinities(args[0], args[1])
        elif func is Tensor._values:  # of a sparse one, which is what a scaler looks at
            return cls.of(result, args[0].proxied)
        elif (order := order_of_norms(func, args, keywords)) is not None:
            return _norms(args[0], result, order) if func is FOREACH_NORM else _norms(args[:1], [result], order)[0]
        return over_ranks(func, args, keywords, result)


@taken_together
class ProxyShardGradient(ProxyGradient, ShardGradient):  # pyright: ignore[reportIncompatibleMethodOverride]
    """The same of a part of a parameter: where it does not answer for all, it is what other parts' gradients are."""


class ProxyNorm(torch.Tensor):
    """The norm of a proxy, which is of use beside those of all of this rank's other gradients only."""

    proxied: Proxied

    @classmethod
    def of(cls, norm: Tensor, proxied: Proxied) -> ProxyNorm:
        """Mark a norm as that of a proxy."""
        found = norm.as_subclass(cls)
        found.proxied = proxied
        return found

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Let all operations see a plain tensor, if what stacks norms for that of all has as many as it should.

        Raises:
            GradientError: If it has fewer.
        """
        if func is torch.stack and args:
            norm = next(one for one in args[0] if isinstance(one, ProxyNorm))
            norm._check_among(len(args[0]))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def _check_among(self, count: int) -> None:
        expected = len(self.proxied.dense())
        if count < expected:
            axes = " and ".join(repr(axis.name) for axis in self.proxied.spread.axes)
            raise GradientError(
                f"the norm of {count} of this rank's {expected} gradients was asked for, but the model is split over "
                f"axis {axes}, and functions of torch know the norm of all gradients only: clip some of them with "
                "tulle.clip_grad_norm_(parameters, max_norm)"
            )


def plain(gradient: Tensor) -> Tensor:
    """The same numbers, in the same memory, as a gradient that stands for itself alone."""
    if not isinstance(gradient, ProxyGradient):
        return gradient
    itself = gradient.as_subclass(Tensor)
    if not isinstance(gradient, ProxyShardGradient):
        return itself
    whole, cuts = gradient.whole, gradient.cuts
    return ShardGradient.of(itself, gradient.axes, gradient.count, whole=whole, cuts=cuts, held=gradient.held)


def _norms(gradients: Sequence[Tensor], norms: Sequence[Tensor], order: float) -> list[Tensor]:
    """Norms, those of parts over the ranks that have one, that of a proxy such that all make up the norm of all."""
    is_proxy = [isinstance(gradient, ProxyGradient) and gradient.proxied.takes_norms for gradient in gradients]
    others = [g.as_subclass(Tensor) if is_all else g for g, is_all in zip(gradients, is_proxy, strict=True)]
    found = norms_over_ranks(others, norms, order)
    for t, gradient in enumerate(gradients):
        if isinstance(gradient, ProxyGradient):
            of_all = gradient.proxied.norm(order, gradient).to(found[t]) if is_proxy[t] else found[t]
            found[t] = ProxyNorm.of(of_all, gradient.proxied)
    return found


def _agree_on_infinities(gradients: Sequence[Tensor], found: Tensor) -> None:
    proxy = next(gradient for gradient in gradients if isinstance(gradient, ProxyGradient))
    axes = {axis.ranks: axis for axis in (*axes_of(gradients), *proxy.proxied.spread.axes)}
    for axis in axes.values():
        all_reduce(found, axis, label="gradient norm", op="max").wait()
