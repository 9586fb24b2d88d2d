"""One rank of Horovod over gloo: sparse gradients all-gathered, or made dense and all-reduced."""

# pyright: reportMissingImports=false, reportPrivateImportUsage=false
from __future__ import annotations

import course
import horovod
import horovod.torch as hvd
import job
import networks
from course import Course, Way
from horovod_worker import join


def make(workload: job.Workload, *, sparse_as_dense: bool) -> Course:
    """Wrap the optimizer as Horovod's tutorial does."""
    model = networks.build_model(workload, sparse=True)
    optimizer = hvd.DistributedOptimizer(
        networks.make_optimizer(model), named_parameters=model.named_parameters(), sparse_as_dense=sparse_as_dense
    )
    return Course(course.training_step(model, optimizer))


def main() -> None:
    """Join the group, and do what is asked."""
    store = join()
    ways = {
        "horovod-allgather": Way(lambda workload: make(workload, sparse_as_dense=False), sparse=True),
        "horovod-sparse-as-dense": Way(lambda workload: make(workload, sparse_as_dense=True), sparse=True),
    }
    course.serve(ways, barrier=hvd.barrier, versions={"horovod": horovod.__version__})
    hvd.shutdown()
    del store


if __name__ == "__main__":
    main()
