"""Full sharding along the data axis: the numbers of one process, and 1/n of the parameters on each rank."""

import pytest
import torch
from saving_models import layers
from torch import nn

import tulle
from ranks import on_ranks
from tulle.errors import ModelError
from tulle.memory import recompute, repeated, shard_fully, whole_state_dict
from tulle.memory.shard import Shard


def train(model, rank=0, size=1, steps=4):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        x = torch.randn(12, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        model.eval()(x.chunk(size)[rank]).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("recomputed", [False, True])
def test_training_is_that_of_one_process(recomputed):
    mesh = tulle.init(data=-1)
    axis = mesh["data"]
    reference, model = layers(), layers()
    train(reference)
    if recomputed:
        recompute(model, list(repeated(model)))
    shard_fully(model, mesh)
    train(model, axis.rank, axis.size)
    expected = reference.state_dict()
    found = whole_state_dict(model)
    assert list(found) == list(expected)
    assert max(((found[name] - expected[name]).abs().max()).item() for name in expected) < 1e-12
    held = sum(p.to_local().numel() for p in model.parameters())
    assert held <= sum(p.numel() for p in reference.parameters()) / axis.size * 1.35


@on_ranks(2)
def test_a_parameter_is_cut_where_parts_are_equal_and_else_where_it_is_longest():
    axis = tulle.init(data=-1)["data"]
    of_shapes = {(5, 4): 1, (4, 6): 1, (6, 4): 0, (5, 3): 0, (3, 7, 2): 2, (2,): 0, (1, 1): None, (0, 4): None}
    cuts = {shape: Shard.of(torch.empty(shape), axis) for shape in of_shapes}
    assert {shape: cut and cut.dim for shape, cut in cuts.items()} == of_shapes


@on_ranks(2)
def test_a_parameter_that_is_tied_across_modules_is_refused_unless_they_are_one():
    mesh = tulle.init(data=-1)

    def tied():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight = model[0].weight
        return model

    with pytest.raises(ModelError, match=r"1\.weight is tied to 0\.weight, .* give modules= without 1"):
        shard_fully(tied(), mesh)
    with pytest.raises(ModelError, match="has no module of that name"):
        shard_fully(tied(), mesh, modules=["x"])
    shard_fully(tied(), mesh, modules=[])(torch.ones(2, 4)).sum().backward()
