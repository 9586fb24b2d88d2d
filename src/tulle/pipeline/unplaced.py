"""`one_by_one`: a step of a model that is not placed, whose micro-batches run one after the other on each rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from tulle.errors import GradientError
from tulle.pipeline.losses import is_backward, scaled
from tulle.pipeline.run import Step
from tulle.pipeline.structure import flatten, rebuild
from tulle.traits import attribute_of


def one_by_one(step: Step) -> list[Any]:
    """Run a step of a model that is not placed: each micro-batch after the other.

    Replicas of a model that has a `no_sync` (as those of `tulle.distribute`, or DDP's) exchange gradients in the last.

    Raises:
        GradientError: If there are replicas, and earlier ones ran a backward, but not the last.
    """
    results: list[Any] = []
    backwards: list[int] = []
    together = [no_sync for model in step.models if (no_sync := attribute_of(model, "no_sync")) is not None]
    for index, ((args, kwargs), share) in enumerate(zip(step.calls, step.shares, strict=True)):
        with ExitStack() as stack:
            for no_sync in together if index < len(step) - 1 else ():
                stack.enter_context(no_sync())
            mode = stack.enter_context(_Scaled(share))
            leaves, spec = flatten(step.function(*args, **kwargs))
        backwards.append(mode.backwards)
        results.append(rebuild(spec, [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]))
    if together and any(backwards) and not backwards[-1]:
        raise GradientError(
            f"the last of {len(step)} micro-batches of a step ran no backward, and earlier ones did, whose gradients "
            "replicas exchange in the last: run one in each micro-batch ((loss * 0).backward() of one that is not to "
            "count)"
        )
    return results


class _Scaled(TorchFunctionMode):
    """Multiplies what backward begins with."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self._scale, self.backwards = scale, 0

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.backwards += is_backward(func)
        return scaled(func, args, kwargs or {}, self._scale)
