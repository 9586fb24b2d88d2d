"""One rank of DistributedDataParallel over gloo, with dense gradients or with `Embedding(sparse=True)`."""

from __future__ import annotations

import job
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from trainer import Trainer, Way, serve


def make(workload: job.Workload, *, sparse: bool) -> Trainer:
    """Wrap the job's model as DDP's tutorial does."""
    model = job.build_model(workload, sparse=sparse)
    step = job.training_step(DistributedDataParallel(model), job.make_optimizer(model))
    return Trainer(step, lambda: list(model.parameters()))


def main() -> None:
    """Join the group, and do what is asked."""
    dist.init_process_group("gloo")
    ways = {
        "ddp-dense": Way(lambda workload: make(workload, sparse=False), sparse=False),
        "ddp-sparse": Way(lambda workload: make(workload, sparse=True), sparse=True),
    }
    serve(ways, barrier=dist.barrier, versions={})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
