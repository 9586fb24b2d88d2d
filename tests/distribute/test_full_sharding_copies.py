"""A copy of a model of which a rank has parts has parts of its own, which stand for wholes as the model's do."""

import copy
import gc

import pytest
import torch
from sharded_plans import FULL
from torch import nn

import tulle
from ranks import on_ranks
from tulle.errors import ModelError
from tulle.parts import Part
from tulle.plan import Memory, Plan


def made():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def trained_as_a_copy(model, rank=0, size=1):
    """A copy that is trained, pulled to the model, and clipped; and what it tells of its numbers."""
    copied, told = copy.deepcopy(copy.deepcopy(model)), []
    optimizer = torch.optim.SGD(copied.parameters(), lr=0.1)
    for step in range(3):
        x = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step)).chunk(size)[rank]
        copied(x).pow(2).mean().backward()
        sum((p - q.data).pow(2).sum() for p, q in zip(copied.parameters(), model.parameters(), strict=True)).backward()
        told.append(nn.utils.clip_grad_norm_(copied.parameters(), 0.05).item())
        optimizer.step()
        optimizer.zero_grad()
    told += [number.item() for p in copied.parameters() for number in (p.norm(), p.data.norm(), p.data.abs().max())]
    return told, copied.state_dict()


@on_ranks(2)
@pytest.mark.parametrize(
    ("shape", "memory"), [({"data": 2}, FULL), ({"data": 1, "model": 2}, Memory())], ids=["full_shard", "model"]
)
def test_a_copy_that_is_trained_is_one_process(shape, memory):
    mesh, (model, optimizer), (reference, _) = tulle.init(**shape), made(), made()
    tulle.distribute(model, optimizer, mesh, plan=Plan(mesh.shape, memory=memory))
    assert any(isinstance(p, Part) for p in model.parameters())
    told, state = trained_as_a_copy(model, mesh["data"].rank, mesh["data"].size)
    expected, of_one = trained_as_a_copy(reference)
    assert told == pytest.approx(expected, rel=1e-12)
    assert all(torch.allclose(state[name], value, rtol=1e-12, atol=1e-14) for name, value in of_one.items())


@on_ranks(2)
def test_a_copy_does_not_outlive_its_model_in_silence():
    mesh, (model, optimizer) = tulle.init(data=-1), made()
    tulle.distribute(model, optimizer, mesh, plan=Plan(mesh.shape, memory=FULL))
    copied = copy.deepcopy(nn.ParameterList([model[0].weight]))
    del model, optimizer
    gc.collect()
    with pytest.raises(ModelError, match=r"^one number of all of '0\.weight' was asked of a copy, but the model that"):
        copied[0].norm()
