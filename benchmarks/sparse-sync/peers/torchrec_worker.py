"""One rank of TorchRec over gloo: tables that are replicated, or split by rows over the ranks.

Split tables are an EmbeddingCollection. Replicated ones are an EmbeddingBagCollection, which takes the job's mean: a
replicated EmbeddingCollection fails on CPU, where fbgemm's dense kernel returns one row a batch and not one an id.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import job
import torch
import torch.distributed as dist
import torchrec
from torch import Tensor, nn
from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward as apply_in_backward
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, data_parallel, row_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from trainer import Trainer, Way, serve


class Lookups(nn.Module):
    """The job's model with TorchRec's tables."""

    def __init__(self, tables: Sequence[job.TableShape], head: nn.Linear, *, pooled: bool) -> None:
        super().__init__()
        self.names = [table.name for table in tables]
        self.pooled = pooled
        shapes = [
            {"name": t.name, "num_embeddings": t.num_rows, "embedding_dim": t.width, "feature_names": [t.name]}
            for t in tables
        ]
        if pooled:
            configs = [EmbeddingBagConfig(**shape, pooling=PoolingType.MEAN) for shape in shapes]
            self.tables = EmbeddingBagCollection(tables=configs)
        else:
            self.tables = EmbeddingCollection(tables=[EmbeddingConfig(**shape) for shape in shapes])
        self.head = head

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        """Scalar loss of the ids, one key a table."""
        found = self.tables(ids)
        means = found.values()[0] if self.pooled else torch.cat([found[name].values().mean(0) for name in self.names])
        return self.head(means).pow(2).mean()


def make(workload: job.Workload, *, row_split: bool) -> Trainer:
    """Shard the job's tables and give them the job's weights."""
    plain = job.build_model(workload, sparse=False)
    model = Lookups(workload.tables, plain.head, pooled=not row_split)
    if row_split:
        # The owner of a row applies the optimizer to it in backward; TorchRec knows no other way for split tables.
        apply_in_backward(torch.optim.SGD, model.tables.parameters(), {"lr": job.LEARNING_RATE})
    placements = {table.name: row_wise() if row_split else data_parallel() for table in workload.tables}
    plan = construct_module_sharding_plan(
        model.tables,
        placements,
        local_size=int(os.environ["LOCAL_WORLD_SIZE"]),
        world_size=dist.get_world_size(),
        device_type="cpu",
    )
    sharded = DistributedModelParallel(
        model,
        device=torch.device("cpu"),
        plan=ShardingPlan(plan={"tables": plan}),
        sharders=[EmbeddingCollectionSharder(), EmbeddingBagCollectionSharder()],
    )
    _load(sharded, workload, plain)
    names = [table.name for table in workload.tables]
    optimizer = KeyedOptimizerWrapper(
        {name: value for name, value in sharded.named_parameters() if not (row_split and name.startswith("tables."))},
        lambda parameters: torch.optim.SGD(parameters, lr=job.LEARNING_RATE),
    )

    def step(ids: Sequence[Tensor]) -> None:
        lengths = torch.tensor([len(rows) for rows in ids])
        sharded(KeyedJaggedTensor(keys=names, values=torch.cat(list(ids)), lengths=lengths)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Trainer(step, lambda: [*_tables(sharded, workload), model.head.weight, model.head.bias])


def _load(sharded: DistributedModelParallel, workload: job.Workload, plain: job.Lookups) -> None:
    """Copy each table's rows, or those of this rank's part of it."""
    with torch.no_grad():
        for state, weight in zip(_states(sharded, workload), plain.tables.parameters(), strict=True):
            for part, rows in _parts(state):
                part.copy_(weight[rows])


def _tables(sharded: DistributedModelParallel, workload: job.Workload) -> list[Tensor]:
    """Each table whole, on every rank."""
    whole: list[Tensor] = []
    for state, table in zip(_states(sharded, workload), workload.tables, strict=True):
        gathered = torch.zeros(table.num_rows, table.width)
        for part, rows in _parts(state):
            gathered[rows] = part
        if hasattr(state, "local_shards"):
            dist.all_reduce(gathered)
        whole.append(gathered)
    return whole


def _parts(state: Any) -> list[tuple[Tensor, slice]]:
    """What of a table this rank holds, and which rows that is."""
    if not hasattr(state, "local_shards"):
        return [(state, slice(None))]
    parts: list[tuple[Tensor, slice]] = []
    for shard in state.local_shards():
        first, length = shard.metadata.shard_offsets[0], shard.metadata.shard_sizes[0]
        parts.append((shard.tensor, slice(first, first + length)))
    return parts


def _states(sharded: DistributedModelParallel, workload: job.Workload) -> list[Any]:
    """The tables' entries of the state, in the job's order: tensors, or sharded tensors."""
    states = {name.split(".")[-2]: value for name, value in sharded.state_dict().items() if name.startswith("tables.")}
    return [states[table.name] for table in workload.tables]


def main() -> None:
    """Join the group, and do what is asked."""
    dist.init_process_group("gloo")
    ways = {
        "torchrec-data-parallel": Way(lambda workload: make(workload, row_split=False), sparse=False),
        "torchrec-row-wise": Way(lambda workload: make(workload, row_split=True), sparse=True),
    }
    serve(ways, barrier=dist.barrier, versions={"torchrec": torchrec.__version__})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
