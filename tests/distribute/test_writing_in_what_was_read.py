"""What was read of a parameter of which a rank has a part is written in: the parameter is, too, as a view has it."""

import pytest
import torch
from sharded_plans import FULL
from torch import nn
from torch.nn import functional as F

import tulle
from ranks import on_ranks
from tulle.errors import ModelError
from tulle.memory import named_shards
from tulle.plan import Plan


def made():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 3)).double()
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def step(model, optimizer, rank=0, size=1):
    ids = torch.tensor([0, 1, 2, 3, 1, 5]).chunk(size)[rank]
    optimizer.zero_grad()
    model(ids).pow(2).mean().backward()
    optimizer.step()


def write(model):
    """In rows that a table pads with, in gates of a bias, by columns: as loops do between steps."""
    words, out = model
    words.weight.data[0].zero_()
    with torch.no_grad():
        words.weight[1].fill_(1)
        words.weight.T[5].mul_(2)
        nn.init.constant_(out.bias[1:], 3)
    words.weight[2].data.fill_(2)
    words.weight[3].detach().neg_()
    out.weight.data.unbind()[1].copy_(torch.arange(6))
    words.weight.data[torch.tensor([4])].zero_()  # a copy, in one process too


@on_ranks(2, 3)
def test_views_that_are_written_in_are_the_parameters():
    mesh, (model, optimizer), (reference, of_reference) = tulle.init(data=-1), made(), made()
    tulle.distribute(model, optimizer, mesh, plan=Plan(mesh.shape, memory=FULL))
    assert "0.weight" in named_shards(model)
    for _ in range(3):  # the next forward is to see what was written, also what was gathered ahead for it
        for one, stepper, rank, size in ((model, optimizer, mesh.rank, mesh.size), (reference, of_reference, 0, 1)):
            step(one, stepper, rank, size)
            write(one)
    state = tulle.full_state_dict(model, everywhere=True)
    for name, value in reference.state_dict().items():
        assert torch.allclose(state[name], value, rtol=1e-12, atol=1e-14), name


@on_ranks(2)
def test_what_was_read_before_a_step_does_not_bring_its_numbers_back():
    mesh, (model, optimizer) = tulle.init(data=-1), made()
    tulle.distribute(model, optimizer, mesh, plan=Plan(mesh.shape, memory=FULL))
    kept = model[0].weight.data[0]
    kept.zero_()
    kept.add_(1)
    step(model, optimizer, mesh.rank, mesh.size)
    before = tulle.full_state_dict(model, everywhere=True)["0.weight"]
    with pytest.raises(ModelError, match=r"^what was read of '0\.weight' some time ago is written in, but .* anew"):
        kept.zero_()
    assert torch.equal(tulle.full_state_dict(model, everywhere=True)["0.weight"], before)


@on_ranks(2)
def test_dropout_of_a_table_outside_of_forward_is_that_of_the_whole():
    """As RecBole's CORE scores items, in a method of its own; in place it would write in a part."""
    mesh, (model, optimizer), (reference, _) = tulle.init(data=-1), made(), made()
    tulle.distribute(model, optimizer, mesh, plan=Plan(mesh.shape, memory=FULL))
    for one in (model, reference):
        torch.manual_seed(1)
        (F.dropout(one[0].weight, 0.5) @ torch.ones(6).double()).pow(2).sum().backward()
    gradient = reference[0].weight.grad
    assert gradient is not None
    assert model[0].weight.grad.norm().item() == pytest.approx(gradient.norm().item(), rel=1e-12)
    with pytest.raises(ModelError, match=r"^dropout was given '0\.weight' as if all"):
        F.dropout(model[0].weight, 0.5, inplace=True)
