"""One rank of TorchRec over gloo: the recommender, its tables split by rows over the ranks."""

# pyright: reportMissingImports=false
from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import course
import job
import networks
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchrec
from course import Course, Way
from networks import Batch, DeepFM
from torch import Tensor, nn
from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward as apply_in_backward
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable
from torchrec_worker import _load as load


@dataclass
class Clicks(Pipelineable):
    """A batch, as TorchRec's pipeline wants it."""

    ids: KeyedJaggedTensor
    numbers: Tensor
    clicked: Tensor

    @staticmethod
    def of(batch: Batch, names: list[str]) -> Clicks:
        """One id a sample and table."""
        ids, numbers, clicked = batch
        lengths = torch.ones(ids.numel(), dtype=torch.int64)
        return Clicks(KeyedJaggedTensor(keys=names, values=ids.T.flatten(), lengths=lengths), numbers, clicked)

    def to(self, device: torch.device, non_blocking: bool = False) -> Clicks:  # noqa: FBT001  (TorchRec's signature)
        """All is on the CPU, and stays there."""
        del device, non_blocking
        return self

    def record_stream(self, stream: object) -> None:
        """The CPU has no streams."""


class Recommender(nn.Module):
    """The recommender of all, with TorchRec's tables."""

    def __init__(self, workload: job.Workload, network: DeepFM) -> None:
        super().__init__()
        self.names = [table.name for table in workload.tables]
        configs = [
            EmbeddingConfig(name=t.name, num_embeddings=t.num_rows, embedding_dim=t.width, feature_names=[t.name])
            for t in workload.tables
        ]
        self.tables = EmbeddingCollection(tables=configs)
        self.network = network

    def forward(self, batch: Clicks) -> tuple[Tensor, Tensor]:
        """The loss, and what the pipeline gives back of it."""
        looked_up = self.tables(batch.ids)
        found = torch.stack([looked_up[name].values() for name in self.names], dim=1)
        loss = F.binary_cross_entropy_with_logits(self.network(found, batch.numbers), batch.clicked)
        return loss, loss.detach()


def make(workload: job.Workload, *, pipelined: bool) -> Course:
    """Split the tables, and give them the values that all start from."""
    plain = networks.build_model(workload, sparse=False)
    assert isinstance(plain, networks.Recommender), "TorchRec has tables of its own: it cannot take any model"
    model = Recommender(workload, plain.network)
    names = model.names
    sharded = split(model, workload)
    load(sharded, workload, plain)
    optimizer = KeyedOptimizerWrapper(
        {name: value for name, value in sharded.named_parameters() if not name.startswith("tables.")},
        lambda parameters: torch.optim.SGD(parameters, lr=networks.LEARNING_RATE),
    )
    if pipelined:
        pipeline = TrainPipelineSparseDist(sharded, optimizer, torch.device("cpu"))
        pulled = Pulled(pipeline, names)
        return Course(pulled.step, through=pulled.through)

    def step(batch: Batch) -> Tensor:
        loss, _ = sharded(Clicks.of(batch, names))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Course(step)


class Pulled:
    """TorchRec's pipeline, which takes batches itself, and tells the rows of one batch while it trains on another."""

    def __init__(self, pipeline: TrainPipelineSparseDist, names: list[str]) -> None:
        self._pipeline = pipeline
        self._names = names
        self._batches: Iterator[Clicks] = iter(())

    def through(self, batches: Iterable[Batch]) -> Iterable[Batch]:
        """As many turns as there are batches, which the pipeline takes when it wants them."""
        given = list(batches)
        self._batches = iter([Clicks.of(batch, self._names) for batch in given])
        return given

    def step(self, batch: Batch) -> Tensor:
        """Train on the batch whose turn it is, and have others on their way."""
        del batch
        return self._pipeline.progress(self._batches)


def split(model: Recommender, workload: job.Workload) -> DistributedModelParallel:
    """The model with its tables split by rows, and the rest replicated."""
    # The owner of a row applies the optimizer to it in backward; TorchRec knows no other way for split tables.
    apply_in_backward(torch.optim.SGD, model.tables.parameters(), {"lr": networks.LEARNING_RATE})
    plan = construct_module_sharding_plan(
        model.tables,
        {table.name: row_wise() for table in workload.tables},
        local_size=int(os.environ["LOCAL_WORLD_SIZE"]),
        world_size=dist.get_world_size(),
        device_type="cpu",
    )
    return DistributedModelParallel(
        model,
        device=torch.device("cpu"),
        plan=ShardingPlan(plan={"tables": plan}),
        sharders=[EmbeddingCollectionSharder()],
    )


def main() -> None:
    """Join the group, and do what is asked."""
    dist.init_process_group("gloo")
    ways = {
        "torchrec-row-wise": Way(partial(make, pipelined=False), sparse=True),
        "torchrec-row-wise-pipelined": Way(partial(make, pipelined=True), sparse=True),
    }
    course.serve(ways, barrier=dist.barrier, versions={"torchrec": torchrec.__version__})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
