"""A distributed model that is given other parameters, or a table that is to grow: told by name, or done."""

import copy

import pytest
import torch
from torch import nn

import tulle
from ranks import on_ranks
from tulle.errors import CheckpointError, ModelError
from tulle.plan import Memory, Plan

ROWS, MORE = 20, 6


class Words(nn.Module):
    def __init__(self, rows=ROWS):
        super().__init__()
        self.words, self.out = nn.Embedding(rows, 6), nn.Linear(6, 4)

    def forward(self, ids):
        return self.out(torch.tanh(self.words(ids).mean(1))).pow(2).mean()


def stepped(model, optimizer, drawn, rank=0, size=1):
    ids = torch.randint(model.words.num_embeddings, (4 * size, 3), generator=drawn)
    model(ids.chunk(size)[rank]).backward()
    optimizer.step()
    optimizer.zero_grad()


def made(model):
    return torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-2)


def plan_of(way, mesh):
    return way if way in ("rows", "columns") else Plan(mesh.shape, memory=Memory(full_shard=way == "full_shard"))


def started(way):
    mesh = tulle.init(data=-1)
    torch.manual_seed(0)
    model = Words().double()
    tulle.distribute(model, optimizer := made(model), mesh, plan=plan_of(way, mesh))
    return mesh, model, optimizer


def grown(state):
    model = Words().double()
    model.load_state_dict(state)
    words, model.words = model.words, nn.Embedding(ROWS + MORE, 6).double()
    with torch.no_grad():
        model.words.weight.copy_(torch.cat([words.weight, torch.ones(MORE, 6)]))
    return model, made(model)


@on_ranks(2)
@pytest.mark.parametrize("way", ["rows", "columns", "full_shard", "replicas"])
def test_a_table_grows_in_a_model_that_is_made_anew(way):
    mesh, model, optimizer = started(way)
    drawn = torch.Generator().manual_seed(1)
    stepped(model, optimizer, drawn, mesh.rank, mesh.size)
    model, optimizer = grown(tulle.full_state_dict(model, everywhere=True))
    theirs = made(reference := copy.deepcopy(model))
    tulle.distribute(model, optimizer, mesh, plan=plan_of(way, mesh))
    for seed in (2, 3):
        stepped(model, optimizer, drawn.manual_seed(seed), mesh.rank, mesh.size)
        drawn.manual_seed(seed)
        reference(torch.randint(ROWS + MORE, (4 * mesh.size, 3), generator=drawn)).backward()
        theirs.step()
        theirs.zero_grad()
    found = tulle.full_state_dict(model, everywhere=True)
    for name, value in reference.state_dict().items():
        assert torch.allclose(found[name], value, rtol=1e-12, atol=1e-14), name


@on_ranks(2)
@pytest.mark.parametrize("way", ["full_shard", "replicas"])
def test_another_table_or_head_in_a_distributed_model_is_told_with_the_mend(way):
    mesh, model, optimizer = started(way)
    for name, other in (("words", nn.Embedding(ROWS + MORE, 6)), ("out", nn.Linear(6, 4))):
        setattr(model, name, other.double())
        with pytest.raises(ModelError, match=rf"'{name}.weight'.* tulle.full_state_dict\(model, everywhere=True\)"):
            stepped(model, made(model), torch.Generator().manual_seed(mesh.rank))
        model, optimizer = started(way)[1:]
    model.out = nn.Linear(6, 4).double()
    if way == "full_shard":
        with pytest.raises(CheckpointError, match="if the model has another parameter in that one's place by now"):
            tulle.save("nowhere", model, optimizer)


@on_ranks(2)
@pytest.mark.parametrize("way", ["rows", "columns"])
def test_a_part_that_is_to_be_joined_with_rows_is_refused_by_its_name(way):
    """Torch's own word, of columns, is that sizes must match."""
    _, model, _ = started(way)
    with pytest.raises(ModelError, match=rf"was given the table 'words.weight' .* split by {way}"):
        torch.cat([model.words.weight, torch.ones(MORE, 6)])


@on_ranks(2)
def test_a_parameter_that_has_taken_the_place_of_one_that_was_shared_out_is_whole_in_states():
    """It was taken for a part: sizes did not match, as torch says."""
    _, model, _ = started("full_shard")
    model.out.weight = nn.Parameter(torch.full((4, 6), 2.0))
    model.out.bias = None
    state = model.state_dict()
    assert {name: list(value.shape) for name, value in state.items()} == {
        "words.weight": [ROWS, 6],
        "out.weight": [4, 6],
    }
    assert torch.equal(state["out.weight"], torch.full((4, 6), 2.0))
    assert list(tulle.full_state_dict(model, everywhere=True)) == list(state)
    model.load_state_dict({**state, "out.weight": torch.ones(4, 6)})
    assert torch.equal(model.out.weight.detach(), torch.ones(4, 6))
