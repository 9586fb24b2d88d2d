"""One rank of Horovod over gloo: sparse gradients all-gathered, or made dense and all-reduced."""

# pyright: reportMissingImports=false, reportPrivateImportUsage=false
from __future__ import annotations

import os
from datetime import timedelta

import horovod
import horovod.torch as hvd
import job
import torch.distributed as dist
from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.http.http_server import RendezvousServer
from trainer import Trainer, Way, serve


def make(workload: job.Workload, *, sparse_as_dense: bool) -> Trainer:
    """Wrap the optimizer as Horovod's tutorial does."""
    model = job.build_model(workload, sparse=True)
    optimizer = hvd.DistributedOptimizer(
        job.make_optimizer(model), named_parameters=model.named_parameters(), sparse_as_dense=sparse_as_dense
    )
    return Trainer(job.training_step(model, optimizer), lambda: list(model.parameters()))


def join() -> dist.TCPStore:
    """Do what `horovodrun` does between its processes, from torchrun's variables; keep what it returns alive."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    ranks_per_host = int(os.environ["LOCAL_WORLD_SIZE"])
    hosts = ",".join(f"host{number}:{ranks_per_host}" for number in range(size // ranks_per_host))
    slots = get_host_assignments(parse_hosts(hosts), size)
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, rank == 0, timeout=timedelta(seconds=120)
    )
    if rank == 0:
        server = RendezvousServer()
        port = server.start()
        server.init(slots)
        store.set("rendezvous", str(port))
    slot = slots[rank]
    os.environ |= {
        "HOROVOD_HOSTNAME": slot.hostname,
        "HOROVOD_RANK": str(slot.rank),
        "HOROVOD_SIZE": str(slot.size),
        "HOROVOD_LOCAL_RANK": str(slot.local_rank),
        "HOROVOD_LOCAL_SIZE": str(slot.local_size),
        "HOROVOD_CROSS_RANK": str(slot.cross_rank),
        "HOROVOD_CROSS_SIZE": str(slot.cross_size),
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": os.environ["MASTER_ADDR"],
        "HOROVOD_GLOO_RENDEZVOUS_PORT": store.get("rendezvous").decode(),
        "HOROVOD_GLOO_IFACE": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
    }
    hvd.init()
    return store


def main() -> None:
    """Join the group, and do what is asked."""
    store = join()
    ways = {
        "horovod-allgather": Way(lambda workload: make(workload, sparse_as_dense=False), sparse=True),
        "horovod-sparse-as-dense": Way(lambda workload: make(workload, sparse_as_dense=True), sparse=True),
    }
    serve(ways, barrier=hvd.barrier, versions={"horovod": horovod.__version__})
    hvd.shutdown()
    del store


if __name__ == "__main__":
    main()
