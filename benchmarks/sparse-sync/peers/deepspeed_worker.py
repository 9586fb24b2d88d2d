"""One rank of DeepSpeed's engine over gloo, without ZeRO (which refuses sparse gradients)."""

# pyright: reportMissingImports=false
from __future__ import annotations

import logging
from collections.abc import Sequence

import deepspeed
import job
import torch.distributed as dist
from torch import Tensor
from trainer import Trainer, Way, serve


def make(workload: job.Workload, *, sparse: bool) -> Trainer:
    """Put the job's model and optimizer in an engine."""
    model = job.build_model(workload, sparse=sparse)
    # 0.19.8 has no `sparse_gradients` flag any more: the engine goes by the gradient that `nn.Embedding` gives.
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "steps_per_print": 1 << 30}
    config |= {"gradient_clipping": 0.0}  # 1.0 unless said: it would do more than the others
    engine, *_ = deepspeed.initialize(model=model, optimizer=job.make_optimizer(model), config=config)

    def step(ids: Sequence[Tensor]) -> None:
        engine.backward(engine(ids))
        engine.step()

    return Trainer(step, lambda: list(model.parameters()))


def main() -> None:
    """Join the group, and do what is asked."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    ways = {
        "deepspeed-dense": Way(lambda workload: make(workload, sparse=False), sparse=False),
        "deepspeed-sparse": Way(lambda workload: make(workload, sparse=True), sparse=True),
    }
    serve(ways, barrier=dist.barrier, versions={"deepspeed": deepspeed.__version__})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
