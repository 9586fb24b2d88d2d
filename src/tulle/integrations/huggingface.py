"""`TulleTrainer`: the `Trainer` of transformers trains by a plan of tulle, with the numbers of one process."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from tulle.checkpoint import full_optimizer_state_dict, full_state_dict
from tulle.clip import clip_grad_norm_
from tulle.distribute import distribute, is_distributed
from tulle.errors import MeshError, PlanError
from tulle.memory import shard_of
from tulle.mesh import Mesh, init
from tulle.plan import PlanLike
from tulle.sync import AUTO
from tulle.tables import split_of

try:
    from accelerate import Accelerator  # Trainer is there without it, and fails when it is made
    from transformers import Trainer
    from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
except ImportError as error:
    raise ImportError(
        "tulle.integrations.huggingface needs transformers and accelerate: pip install 'tulle[huggingface]'"
    ) from error

_INSTEAD = {
    "fsdp": "give TulleTrainer plan=tulle.Plan({'data': processes}, memory=tulle.Memory(full_shard=True))",
    "deepspeed": "give TulleTrainer plan=tulle.Plan({'data': processes}, memory=tulle.Memory(shard_optimizer=True))",
    "parallelism_config": "write the loop yourself, as docs/axes.md shows",
    "torch_compile": "call model.compile() before",
    "save_on_each_node": "save to a file system that all processes share",
    "ddp_bucket_cap_mb": "give TulleTrainer plan=tulle.Plan({'data': processes}, bucket_bytes=...)",
    "ddp_static_graph": "leave it out, nothing is to be told here",
}
"""Training arguments that would be dropped in silence, each with what there is instead."""


class TulleTrainer(Trainer):
    """A `Trainer` whose model is distributed by a plan of tulle instead of being wrapped in DistributedDataParallel.

    Start it with `tulle run` or torchrun, and train, evaluate, save and resume as ever: all processes do. Loss and
    weights are those of one process with `per_device_train_batch_size` times as large as there are processes.
    Checkpoints are Trainer's own: `from_pretrained` reads the weights, and a run goes on from them on any number of
    processes and under any plan, with `Trainer` too. `class Mine(TulleTrainer, Seq2SeqTrainer)` distributes others.

    Args:
        *args: As of `Trainer`.
        mesh: From `tulle.init`, with several processes along axis `data` only; None for all processes.
        plan: As of `tulle.distribute`.
        **kwargs: As of `Trainer`.

    Raises:
        MeshError: If the mesh has other axes, or is not of the processes that Trainer deals its batches to.
        PlanError: If the training arguments ask for what a plan says here (`fsdp`, say), naming what to give instead.
    """

    def __init__(self, *args: Any, mesh: Mesh | None = None, plan: PlanLike = AUTO, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.mesh = init(data=-1) if mesh is None else mesh
        self.plan = plan
        self._check()
        accelerator: Accelerator = self.accelerator
        vars(accelerator)["clip_grad_norm_"] = self._clip  # its own fails on sparse gradients

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """Make the optimizer, and distribute the model with it. Every process must call it, as `train` does."""
        optimizer = super().create_optimizer(model)
        if not is_distributed(self._module):
            # All that Accelerate does to a model but to wrap it in DDP, as it would unless it has done so already.
            self.accelerator.prepare_model(self._module, evaluation_mode=True)
            distribute(self._module, optimizer, self.mesh, plan=self.plan)
        return optimizer

    def _clip(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
        self.accelerator.unscale_gradients()
        return clip_grad_norm_(parameters, max_norm, norm_type)

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """As of `Trainer`; what `Seq2SeqTrainer` generates takes as many steps on all processes, if they have parts."""
        options = vars(self).get("_gen_kwargs")  # of Seq2SeqTrainer
        if options is not None and any(split_of(one) or shard_of(one) for one in self._module.parameters()):
            options.setdefault("synced_gpus", True)
        return super().prediction_step(*args, **kwargs)

    # Every process must call these, as Trainer does.
    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        super()._save(output_dir, full_state_dict(self._module) if state_dict is None else state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        state = full_optimizer_state_dict(self._module, cast("Optimizer", self.optimizer))
        if self.args.should_save:
            torch.save(state, os.path.join(output_dir, OPTIMIZER_NAME))
            torch.save(cast("LRScheduler", self.lr_scheduler).state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    @property
    def _module(self) -> nn.Module:
        return cast("nn.Module", self.model)

    def _check(self) -> None:
        """Refuse what would be dropped in silence, on every process alike."""
        for name, instead in _INSTEAD.items():
            if given := getattr(self.args, name, None):
                raise PlanError(f"TulleTrainer was given {name}={given!r}, which it does not follow: {instead}")
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise PlanError(
                "TulleTrainer was started by Accelerate with FSDP or DeepSpeed, expected no such: start it with `tulle "
                "run` or torchrun, and let the plan share out memory"
            )
        if self.is_distributed_loading_by_transformers:
            raise PlanError(
                "TulleTrainer was given a model that from_pretrained has split over processes, expected a whole one: "
                "leave out distributed_config, and let the plan split it"
            )
        for name, size in self.mesh.shape.items():
            if name != "data" and size > 1:
                raise MeshError(
                    f"TulleTrainer was given {self.mesh!r}, and Trainer deals each process batches of its own: only "
                    f"axis 'data' can have several processes, not {name!r}; for the others write the loop yourself, "
                    "as docs/axes.md shows"
                )
        if self.args.world_size != self.mesh.size or self.args.n_gpu > 1:
            raise MeshError(
                f"Trainer deals batches to {self.args.world_size} processes with {self.args.n_gpu} GPUs each, and the "
                f"mesh has {self.mesh.size}: start one process for each GPU, with `tulle run` or torchrun; without "
                "GPUs give TrainingArguments use_cpu=True, else it takes each process for the only one"
            )
