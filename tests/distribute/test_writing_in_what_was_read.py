"""What was read of a parameter of which a rank has a part is written in: the parameter is, too, as a view has it."""

import numpy
import pytest
import torch
from sharded_plans import FULL
from torch import nn
from torch.nn import functional as F

import tulle
from ranks import on_ranks
from tulle.errors import ModelError
from tulle.parts import Part
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
        words.weight[2].data.fill_(2)
        words.weight[3].detach().neg_()
        nn.init.constant_(out.bias[1:], 3)
    out.weight.data.unbind()[1].copy_(torch.arange(6))
    words.weight.data[torch.tensor([4])].zero_()  # a copy, in one process too
    mask = torch.arange(18).view(3, 6) % 4 != 0
    words.weight.data[6], out.weight.data[:, 1] = 0.5, torch.arange(3)
    with torch.no_grad():
        out.weight[0] = 1
        out.weight *= mask
        out.weight.detach().masked_fill_(~mask, 0.25).index_fill_(0, torch.tensor([2]), 2)
        out.bias.copy_(out.bias + torch.arange(3)).sub_(torch.arange(3))
    words.weight.data.view(-1)[3:5] = 0.75
    words.weight.detach().flatten()[7].neg_()
    flats = [weight.data.reshape(-1) * 0.5 for weight in model.parameters()]
    for weight, flat in zip(model.parameters(), flats, strict=True):
        weight.data.copy_(flat.view(weight.shape))
    words.weight.data = torch.nn.functional.normalize(words.weight.detach(), dim=1) * torch.arange(7)[:, None]


def distributed(how):
    mesh, (model, optimizer) = tulle.init(data=-1), made()
    plan = how if how in ("rows", "columns") else Plan(mesh.shape, memory=FULL)
    return mesh, *tulle.distribute(model, optimizer, mesh, plan=plan)


HOW = pytest.mark.parametrize("how", ["full_shard", "rows", "columns"])


@HOW
@on_ranks(2, 3)
def test_views_that_are_written_in_are_the_parameters(how):
    (mesh, model, optimizer), (reference, of_reference) = distributed(how), made()
    assert type(model[0].weight) is Part
    for _ in range(3):  # the next forward is to see what was written, also what was gathered ahead for it
        for one, stepper, rank, size in ((model, optimizer, mesh.rank, mesh.size), (reference, of_reference, 0, 1)):
            step(one, stepper, rank, size)
            write(one)
    state = tulle.full_state_dict(model, everywhere=True)
    for name, value in reference.state_dict().items():
        assert torch.allclose(state[name], value, rtol=1e-12, atol=1e-14), name


@HOW
@on_ranks(2)
def test_what_was_read_before_a_step_does_not_bring_its_numbers_back(how):
    mesh, model, optimizer = distributed(how)
    kept = model[0].weight.data[0]
    kept.zero_()
    kept.add_(1)
    step(model, optimizer, mesh.rank, mesh.size)
    before = tulle.full_state_dict(model, everywhere=True)["0.weight"]
    with pytest.raises(ModelError, match=r"^what was read of '0\.weight' some time ago is written in, but .* anew"):
        kept.zero_()
    assert torch.equal(tulle.full_state_dict(model, everywhere=True)["0.weight"], before)


READ = {
    "numpy": lambda w: torch.tensor(w.detach().cpu().numpy()),
    "asarray": lambda w: torch.tensor(numpy.asarray(w.data)),
    "product": lambda w: w.detach() @ w.data.T,
    "rows": lambda w: torch.stack([w.detach()[1], w.data.select(0, 2), w.detach().split(2)[1][0], w.data.unbind()[-1]]),
    "histogram": lambda w: torch.histc(w.detach(), 4),
    "covariance": lambda w: torch.cov(w.data),
    "singular values": lambda w: torch.linalg.svdvals(w.detach()),
    "distances": lambda w: torch.pdist(w.detach()),
    "reversed": lambda w: reversed(w.detach()),
    "the second smallest": lambda w: w.detach().kthvalue(2).values,
    "the commonest": lambda w: w.data.mode().values,
    "by rows": lambda w: (w.detach() * torch.arange(7)[:, None]).sum(),
    "a norm": lambda w: w.detach().norm(),
    "of many": lambda w: torch.cat([w.detach().flatten(), w.data.view(-1)]).norm(),
}


@HOW
@on_ranks(2, 3)
def test_what_is_detached_is_read_as_the_parameter_is(how):
    """Embeddings as they are exported, looked at and drawn: a part of them is not taken for all."""
    (_, model, _), (reference, _) = distributed(how), made()
    part, whole = model[0].weight, reference[0].weight
    for name, read in READ.items():
        assert torch.allclose(read(part), read(whole), rtol=1e-12, atol=1e-14), name
    with pytest.raises(ValueError, match="read-only"):
        part.detach().numpy()[0] = 0
    assert part.to_local().numel() < part.detach().flatten().size(0) == part.numel() == whole.numel()
    assert type(part.to_local()) is type(part.data.to_local()) is torch.Tensor
    assert part.to_local().data_ptr() == part.data_ptr()


@on_ranks(2)
def test_vectors_of_all_parameters_are_not_cut_by_the_lengths_of_parts():
    mesh, (model, optimizer) = tulle.init(data=-1), made()
    tulle.distribute(model, optimizer, mesh, plan=Plan(mesh.shape, memory=FULL))
    wanted = nn.utils.parameters_to_vector(made()[0].parameters()).norm().item()
    for vector in (
        nn.utils.parameters_to_vector(model.parameters()),
        torch.cat([weight.data.view(-1) for weight in model.parameters()]),
    ):
        assert vector.numel() == sum(weight.numel() for weight in made()[0].parameters())
        assert vector.norm().item() == pytest.approx(wanted, rel=1e-12)
        with pytest.raises(ModelError, match=r"^__getitem__ was given '0\.weight' as if all"):
            vector[: model[0].weight.numel()]
        with pytest.raises(ModelError, match=r"^split was given '0\.weight' as if all"):
            vector.split([weight.numel() for weight in model.parameters()])


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
