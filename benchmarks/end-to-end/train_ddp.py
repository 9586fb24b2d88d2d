"""One rank of DistributedDataParallel over gloo, with dense gradients or with `Embedding(sparse=True)`."""

# pyright: reportMissingImports=false
from __future__ import annotations

import course
import job
import networks
import torch.distributed as dist
from course import Course, Way
from torch.nn.parallel import DistributedDataParallel


def make(workload: job.Workload, *, sparse: bool) -> Course:
    """Wrap the model as DDP's tutorial does."""
    model = networks.build_model(workload, sparse=sparse)
    # Views save a copy of all dense gradients; sparse ones are in no bucket.
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=not sparse)
    return Course(course.training_step(wrapped, networks.make_optimizer(model)))


def main() -> None:
    """Join the group, and do what is asked."""
    dist.init_process_group("gloo")
    ways = {
        "ddp-dense": Way(lambda workload: make(workload, sparse=False), sparse=False),
        "ddp-sparse": Way(lambda workload: make(workload, sparse=True), sparse=True),
    }
    course.serve(ways, barrier=dist.barrier, versions={})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
