"""Ranks of a pipeline that were given other batches are told so, on all of them, before an optimizer steps."""

import numpy as np
import pytest
import torch
from torch import nn

import tulle
from raised_alike import every_rank_raises
from ranks import on_ranks
from tulle import pipeline
from tulle.errors import DataError

WIDTH, SAMPLES = 6, 4


def placed(mesh):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
    return pipeline.place(model, mesh["pipe"], {"0": 0, "1": mesh.size - 1})


@pipeline.step(micro_batches=2)
def train_step(model, batch):
    loss = (model(batch["x"]) - batch["y"]).pow(2).mean()
    loss.backward()
    return loss


def batch_of(seed):
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(SAMPLES, WIDTH, generator=generator), "y": torch.ones(SAMPLES, 1)}


@on_ranks(2, 3)
@pytest.mark.parametrize("step", [0, 3])
def test_another_batch_on_one_rank_is_an_error_on_all(step):
    mesh = tulle.init(pipe=-1, timeout=8)
    model, is_last = placed(mesh), mesh.rank == mesh.size - 1
    for number in range(step):
        train_step(model, batch_of(number))
    with every_rank_raises(DataError, "of axis 'pipe' was given another batch than rank "):
        train_step(model, batch_of(100 + step if is_last else step))
    train_step(model, batch_of(5))  # nothing is left behind


@on_ranks(2)
def test_arrays_of_numpy_and_shapes_count_too():
    mesh = tulle.init(pipe=-1, timeout=8)
    model = placed(mesh)

    @pipeline.step
    def forward(model, batch, lengths):
        loss = model(batch).sum() * len(lengths)
        loss.backward()
        return loss

    x = torch.ones(SAMPLES, WIDTH)
    with every_rank_raises(DataError, "argument 2 of the step function has shape [2] and numbers"):
        forward(model, x, np.array([mesh.rank, 7]))
    with every_rank_raises(DataError, "argument 2 of the step function has shape [4"):
        forward(model, x, np.zeros([4, 1 + mesh.rank]))


@on_ranks(2)
def test_what_differs_in_the_last_bits_or_is_of_no_use_to_a_rank_may_differ():
    mesh = tulle.init(pipe=-1, timeout=8)
    model, batch = placed(mesh), batch_of(1)
    batch["x"] = batch["x"] * (1 + 1e-6 * mesh.rank)
    batch["y"][0, 0] = torch.nan
    train_step(model, {**batch, "log": mesh.rank == 0, "teacher": None if mesh.rank else torch.ones(SAMPLES)})
