"""`TulleStrategy`: the `Trainer` of Lightning trains by a plan of tulle, with the numbers of one process."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from tulle.checkpoint import full_optimizer_state_dict, full_state_dict
from tulle.clip import clip_grad_norm_
from tulle.distribute import distribute, is_distributed
from tulle.engine import broadcast_tensors
from tulle.errors import ModelError
from tulle.mesh import DEFAULT_TIMEOUT_S, Mesh, init
from tulle.parts import whole_of
from tulle.plan import PlanLike
from tulle.sync import AUTO, WireDtype

try:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import BaseFinetuning, StochasticWeightAveraging, WeightAveraging
    from lightning.pytorch.plugins.precision import Precision
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.trainer.states import TrainerFn
except ImportError as error:
    raise ImportError("tulle.integrations.lightning needs lightning: pip install 'tulle[lightning]'") from error

_AVERAGES = (StochasticWeightAveraging, WeightAveraging)
"""Callbacks that copy the module before it is distributed."""


class TulleStrategy(DDPStrategy):
    """Distributes the LightningModule by a plan of tulle: `Trainer(strategy=TulleStrategy(plan="auto"), devices=4)`.

    Started as with `DDPStrategy`, or with `tulle run` or torchrun. Loss and weights are those of one process with a
    batch as large as those of all processes together. Checkpoints are Lightning's own files, as one process would
    write them: `load_from_checkpoint` reads them, and a run goes on from them on any number of processes, under any
    plan, and with other strategies.

    Args:
        plan: As of `tulle.distribute`.
        wire_dtype: As of `tulle.distribute`.
        check_finite: As of `tulle.distribute`.
        timeout: After which a collective gives up.

    Raises:
        ModelError: In `fit`, if the LightningModule was fitted before, or is averaged by a callback of Lightning's
            though processes have parts of it.
    """

    strategy_name = "tulle"

    def __init__(
        self,
        *,
        plan: PlanLike = AUTO,
        wire_dtype: WireDtype = None,
        check_finite: bool = False,
        timeout: timedelta | None = timedelta(seconds=DEFAULT_TIMEOUT_S),
    ) -> None:
        super().__init__(timeout=timeout)
        self._distribute = partial(distribute, plan=plan, wire_dtype=wire_dtype, check_finite=check_finite)
        self.mesh: Mesh | None = None

    def setup_environment(self) -> None:
        """Join the processes, and arrange them along axis `data`."""
        super().setup_environment()
        if self.mesh is None:
            with self._told():
                self.mesh = init(data=-1)

    def setup(self, trainer: pl.Trainer) -> None:
        """Put the module on its device and, to fit it, distribute it with its optimizers."""
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        if is_fitting and self._layer_sync:
            self.model = self._layer_sync.apply(self._module)
        super(DDPStrategy, self).setup(trainer)
        if not is_fitting and not is_distributed(self._module):  # whose parts are no replicas
            assert self.mesh is not None, "processes have joined"
            whole = [*self._module.parameters(), *self._module.buffers()]
            broadcast_tensors(whole, self.mesh["data"], label="initial parameters")

    def _setup_model(self, model: nn.Module) -> nn.Module:  # pyright: ignore[reportIncompatibleMethodOverride]
        return model

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Make the optimizers, and distribute the module with them."""
        if is_distributed(self._module):
            raise ModelError(
                f"this {type(self._module).__name__} was fitted before, and lies on the processes: fit a new one, with "
                "ckpt_path= to go on; of what Tuner does by a fit, use the callbacks (LearningRateFinder)"
            )
        super().setup_optimizers(trainer)
        with self._thawed(trainer):
            self._distribute(self._module, self.optimizers, self.mesh)
        self._check_averages(trainer)

    def setup_precision_plugin(self) -> None:
        """Have gradients clipped by the norm of all, sparse ones too."""
        super().setup_precision_plugin()
        plugin = self.precision_plugin
        vars(plugin)["clip_grad_by_norm"] = partial(_clip, plugin)

    @contextmanager
    def block_backward_sync(self) -> Generator[None]:
        """Let gradients add up on each process."""
        with cast("Any", self._module).no_sync():
            yield

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state as one process would have it, on rank 0. Every process must call it."""
        return full_state_dict(self._module)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """An optimizer's state as one process would have it, on rank 0. Every process must call it."""
        return full_optimizer_state_dict(self._module, getattr(optimizer, "_optimizer", optimizer))

    @contextmanager
    def _thawed(self, trainer: pl.Trainer) -> Iterator[None]:
        """Have gradients of what a callback has frozen, to unfreeze it later, be kept in step as well."""
        unfreezes = any(isinstance(one, BaseFinetuning) for one in trainer.callbacks)  # pyright: ignore[reportAttributeAccessIssue]
        frozen = [one for one in self._module.parameters() if unfreezes and _may_train(one)]
        for parameter in frozen:
            parameter.requires_grad_(True)
        try:
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)

    def _check_averages(self, trainer: pl.Trainer) -> None:
        """Refuse an average that has been made of the whole module, where a process has parts."""
        parts = [name for name, parameter in self._module.named_parameters() if whole_of(parameter) is not None]
        averages = [type(one).__name__ for one in trainer.callbacks if isinstance(one, _AVERAGES)]  # pyright: ignore[reportAttributeAccessIssue]
        if parts and averages:
            raise ModelError(
                f"{averages[0]} averages whole parameters, and by this plan each process has a part of {parts[0]!r}: "
                "average the parts by a callback of your own, made after setup (average.lerp_(parameter, 0.1) for each "
                "of module.parameters()), or give a plan that leaves parameters whole"
            )

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Say what torchrun tells a process, and Lightning's own launcher does not."""
        known = {"RANK": str(self.global_rank), "LOCAL_WORLD_SIZE": str(self.num_processes)}
        is_partly_told = "WORLD_SIZE" in os.environ and "RANK" not in os.environ
        missing = {name: value for name, value in known.items() if is_partly_told and name not in os.environ}
        os.environ.update(missing)
        try:
            yield
        finally:
            for name in missing:
                del os.environ[name]

    @property
    def _module(self) -> pl.LightningModule:
        assert self.lightning_module is not None, "the trainer has connected it"
        return self.lightning_module


def _may_train(parameter: nn.Parameter) -> bool:
    """Whether a parameter is frozen, and can be unfrozen."""
    return not parameter.requires_grad and (parameter.is_floating_point() or parameter.is_complex())


def _clip(plugin: Precision, optimizer: Optimizer, clip_val: float) -> None:
    clip_grad_norm_(plugin.main_params(optimizer), clip_val)
