"""One rank of DeepSpeed's engine over gloo, without ZeRO (which refuses sparse gradients)."""

# pyright: reportMissingImports=false
from __future__ import annotations

import logging

import course
import deepspeed
import job
import networks
import torch.distributed as dist
from course import Course, Way
from networks import Batch
from torch import Tensor


def make(workload: job.Workload, *, sparse: bool) -> Course:
    """Put the model and its optimizer in an engine."""
    model = networks.build_model(workload, sparse=sparse)
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "steps_per_print": 1 << 30}
    config |= {"gradient_clipping": 0.0}  # 1.0 unless said: it would train another model
    engine, *_ = deepspeed.initialize(model=model, optimizer=networks.make_optimizer(model), config=config)

    def step(batch: Batch) -> Tensor:
        loss = engine(*batch)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return Course(step)


def main() -> None:
    """Join the group, and do what is asked."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    ways = {
        "deepspeed-dense": Way(lambda workload: make(workload, sparse=False), sparse=False),
        "deepspeed-sparse": Way(lambda workload: make(workload, sparse=True), sparse=True),
    }
    course.serve(ways, barrier=dist.barrier, versions={"deepspeed": deepspeed.__version__})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
