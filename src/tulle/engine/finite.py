"""`NonFinite`: finds the parameter and the rank where a NaN or an infinity began, before an all-reduce spreads it."""

from __future__ import annotations

import torch
from torch import Tensor

from tulle.comm import gather_values
from tulle.errors import GradientError
from tulle.mesh import Axis


class NonFinite:
    """Looks at this rank's gradients as they come. It reads each one back, so it is there only on request."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self._found: list[str] = []

    def look(self, name: str, gradient: Tensor | None) -> None:
        """Remember the parameter if its gradient is not finite."""
        if gradient is None:
            return
        with torch._C.DisableTorchFunctionSubclass():  # of a part, what this rank has: others have other gradients yet
            values = gradient._values() if gradient.layout == torch.sparse_coo else gradient
            broken = values.numel() - int(torch.isfinite(values).sum())
            nans = int(torch.isnan(values).sum()) if broken else 0
        if broken:
            self._found.append(f"{name!r} has {nans:,} NaN and {broken - nans:,} infinite of {values.numel():,} values")

    def raise_if_any(self, step: int) -> None:
        """Raise on every rank if any rank found one. Every rank of the axis must call it.

        Raises:
            GradientError: Naming the rank, the parameter whose gradient came first, and the step.
        """
        found, self._found = self._found, []
        for rank, names in enumerate(gather_values(found, self._axis, label="finite gradients")):
            if names:
                others = f" (and {len(names) - 1} more parameters)" if len(names) > 1 else ""
                raise GradientError(
                    f"the gradient of {names[0]}{others} on rank {rank} of axis {self._axis.name!r} in step {step}, "
                    "expected finite numbers: lower the learning rate, clip with tulle.clip_grad_norm_, "
                    "or look at that rank's batch"
                )
