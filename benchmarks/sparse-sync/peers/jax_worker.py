"""One rank of JAX over its gloo collectives: rows of all tokens all-gathered, and added into the replicated tables."""

# pyright: reportMissingImports=false
from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial

import jax
import job
import numpy
import torch
from jax import numpy as jnp
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from torch import Tensor
from trainer import Trainer, Way, serve

State = tuple[list[jax.Array], tuple[jax.Array, jax.Array]]


def loss_of_rows(rows: list[jax.Array], head: tuple[jax.Array, jax.Array]) -> jax.Array:
    """The job's loss, from the rows that were looked up: so that the gradient is of those rows, and sparse."""
    means = jnp.concatenate([of_table.mean(0) for of_table in rows])
    return ((head[0] @ means + head[1]) ** 2).mean()


def train(state: State, ids: list[jax.Array], rate: float) -> State:
    """One step of one rank, inside `shard_map`: gather ids and gradients of all ranks, add them where they belong."""
    tables, head = state
    ids = [of_table[0] for of_table in ids]
    rows = [table[of_table] for table, of_table in zip(tables, ids, strict=True)]
    row_gradients, head_gradients = jax.grad(loss_of_rows, argnums=(0, 1))(rows, head)
    gather = partial(jax.lax.all_gather, axis_name="data", tiled=True)
    ranks = jax.lax.axis_size("data")
    tables = [
        table.at[gather(of_table)].add(-rate / ranks * gather(gradient))
        for table, of_table, gradient in zip(tables, ids, row_gradients, strict=True)
    ]
    head_gradients = jax.lax.pmean(head_gradients, "data")
    weight, bias = (value - rate * gradient for value, gradient in zip(head, head_gradients, strict=True))
    return tables, (weight, bias)


def make(workload: job.Workload) -> Trainer:
    """Compile the step for this job, with its weights on every rank; the state is given away and updated in place."""
    mesh = Mesh(numpy.array(jax.devices()), ("data",))
    everywhere, dealt = PartitionSpec(), PartitionSpec("data")
    model = job.build_model(workload, sparse=False)
    values = [parameter.detach().numpy() for parameter in model.parameters()]
    del model
    replicated = NamedSharding(mesh, everywhere)
    arrays = [jax.make_array_from_process_local_data(replicated, value) for value in values]
    state: list[State] = [(arrays[:-2], (arrays[-2], arrays[-1]))]
    del values, arrays
    whole = jax.shard_map(
        partial(train, rate=job.LEARNING_RATE),
        mesh=mesh,
        in_specs=(everywhere, dealt),
        out_specs=everywhere,
        check_vma=False,
    )
    compiled = jax.jit(whole, donate_argnums=0)

    def step(ids: Sequence[Tensor]) -> None:
        batch = [
            jax.make_array_from_process_local_data(NamedSharding(mesh, dealt), rows.numpy()[None].astype(numpy.int32))
            for rows in ids
        ]
        state[0] = jax.block_until_ready(compiled(state[0], batch))

    def parameters() -> list[Tensor]:
        tables, head = state[0]
        return [torch.from_numpy(numpy.array(array.addressable_data(0))) for array in (*tables, *head)]

    return Trainer(step, parameters)


def main() -> None:
    """Join the group, and do what is asked."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    jax.distributed.initialize(f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}", size, rank)
    serve(
        {"jax-allgather": Way(make, sparse=True)},
        barrier=lambda: multihost_utils.sync_global_devices("step"),
        versions={"jax": jax.__version__},
    )
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
