"""`one_by_one`: a step of a model that is not placed, whose micro-batches run one after the other on each rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from tulle.pipeline.losses import scaled
from tulle.pipeline.run import Step
from tulle.pipeline.structure import flatten, rebuild
from tulle.traits import attribute_of


def one_by_one(step: Step) -> list[Any]:
    """Run a step of a model that is not placed: each micro-batch after the other.

    Replicas of a model that has a `no_sync` (as those of `tulle.distribute`, or DDP's) exchange gradients in the last.
    """
    results = []
    for index, ((args, kwargs), share) in enumerate(zip(step.calls, step.shares, strict=True)):
        with ExitStack() as stack:
            for model in step.models if index < len(step) - 1 else ():
                if (no_sync := attribute_of(model, "no_sync")) is not None:
                    stack.enter_context(no_sync())
            stack.enter_context(_Scaled(share))
            leaves, spec = flatten(step.function(*args, **kwargs))
        results.append(rebuild(spec, [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]))
    return results


class _Scaled(TorchFunctionMode):
    """Multiplies what backward begins with."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self._scale = scale

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return scaled(func, args, kwargs or {}, self._scale)
