"""`Replicas`: data parallelism of a model that other axes split: torch's own clipping and scaling hear of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.optim import Optimizer

from tulle.clip import Bearer, Burden, spread_of
from tulle.comm import gather_values
from tulle.distribute.axes import Axes
from tulle.engine import DataParallel


class Replicas(DataParallel):
    """Keeps replicas in step, and has one gradient of each optimizer speak for those of all ranks.

    Args:
        model: What this rank has of it.
        axes: Of the mesh.
        optimizers: Over its parameters.
        options: Of `DataParallel`.
    """

    def __init__(self, model: nn.Module, axes: Axes, optimizers: Sequence[Optimizer], **options: Any) -> None:
        super().__init__(model, axes.data, **options)
        self._bearing = _bearing(model, axes, optimizers) if axes.splitting else []
        if axes.data.size == 1 and axes.pipe is None:  # no backward is followed to its end
            for parameters, _ in self._bearing:
                for parameter in parameters:
                    parameter.register_post_accumulate_grad_hook(_arrived(ref(self)))

    def end_backward(self) -> None:
        """All gradients are there."""
        super().end_backward()
        if self.is_syncing:
            self.appoint()

    def appoint(self) -> None:
        """Have one gradient of each optimizer speak for all ranks'."""
        takes_norms = True
        for parameters, burden in self._bearing:
            gradients = [p.grad for p in parameters if p.grad is not None and type(p.grad) in (Tensor, Bearer)]
            bearer = next((g for g in gradients if isinstance(g, Bearer)), gradients[0] if gradients else None)
            if bearer is not None:
                Bearer.of(bearer, Burden(burden.spread, burden.parameters, takes_norms))
                takes_norms = False


def _bearing(
    model: nn.Module, axes: Axes, optimizers: Sequence[Optimizer]
) -> list[tuple[Sequence[nn.Parameter], Burden]]:
    """The parameters of each optimizer that has some on every rank, and what their gradients speak for."""
    held = [parameter for parameter in model.parameters() if parameter.requires_grad]
    known = {id(parameter) for parameter in held}
    mine = [[p for group in one.param_groups for p in group["params"] if id(p) in known] for one in optimizers]
    heard = gather_values([bool(parameters) for parameters in mine], axes.whole, label="optimizers")
    found: list[tuple[Sequence[nn.Parameter], Burden]] = []
    for number, parameters in enumerate(mine):
        if all(has_some[number] for has_some in heard):
            spread = spread_of(parameters[0])
            assert spread is not None, "the model is split"
            found.append((parameters, Burden(spread, held, takes_norms=False)))
    return found


def _arrived(engine: ref[Replicas]) -> Any:
    def appoint(_: Tensor) -> None:
        alive = engine()
        if alive is not None:
            alive.appoint()

    return appoint
