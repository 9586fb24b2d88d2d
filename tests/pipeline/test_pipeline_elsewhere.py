"""What a program asks a model's first parameter outside of steps, it is answered on all ranks."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional

import tulle
from ranks import on_ranks
from tulle import pipeline
from tulle.errors import ModelError
from tulle.pipeline.elsewhere import Elsewhere, ElsewhereData, elsewhere

WORDS, WIDTH, LAYERS, LENGTH, SAMPLES = 12, 6, 2, 5, 4
SPLIT = {"ids": 1, "targets": 1, "hidden": 1}


class WordModel(nn.Module):
    """As of PyTorch's examples: it makes its first hidden state by its first parameter."""

    def __init__(self):
        super().__init__()
        self.words, self.rnn = nn.Embedding(WORDS, WIDTH), nn.LSTM(WIDTH, WIDTH, LAYERS)
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, ids, hidden):
        states, hidden = self.rnn(self.words(ids), hidden)
        return self.out(states).view(-1, WORDS), hidden

    def init_hidden(self, samples):
        weight = next(self.parameters())
        return weight.new_zeros(LAYERS, samples, WIDTH), weight.data.new(LAYERS, samples, WIDTH).zero_()


def train_step(model, ids, targets, hidden):
    scores, hidden = model(ids, hidden)
    loss = functional.cross_entropy(scores, targets.reshape(-1))
    loss.backward()
    return {"loss": loss.detach()}


def losses_of(model, step):
    generator = torch.Generator().manual_seed(1)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.5), []
    device = next(model.parameters()).device
    for _ in range(3):
        ids, targets = (torch.randint(WORDS, (LENGTH, SAMPLES), generator=generator).to(device) for _ in range(2))
        found.append(step(model, ids, targets, model.init_hidden(SAMPLES))["loss"].mean().item())
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        scores, _ = model.eval()(ids, model.init_hidden(SAMPLES))
        return [*found, functional.cross_entropy(scores, targets.reshape(-1)).item()]


def built():
    torch.manual_seed(0)
    return WordModel().double()


@on_ranks(2)
def test_states_made_by_the_first_parameter_are_those_of_one_process():
    step = pipeline.step(micro_batches=2, split=SPLIT)(train_step)
    expected = losses_of(built(), step)
    mesh = tulle.init(pipe=-1, timeout=8)
    for first in (0, 1):
        stages = {"words": first, "rnn": 1 - first, "out": 1 - first}
        assert losses_of(pipeline.place(built(), mesh["pipe"], stages), step) == expected
    with tulle.deferred_init():
        late = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    pipeline.place(late, mesh["pipe"], {"0": 0, "1": 1})
    assert [one.device.type for one in late.parameters()] == ["cpu"] * 4


@on_ranks(2)
def test_a_parameter_that_lives_elsewhere_is_one_of_its_device_and_keeps_what_was_set_on_it():
    mesh, model = tulle.init(pipe=-1, timeout=8), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for parameter in model.parameters():
        parameter.decays = False
    pipeline.place(model, mesh["pipe"], {"0": 0, "1": 1})
    away = model[1 - mesh.rank].weight
    assert (type(away), away.is_meta, away.device.type) == (Elsewhere, True, "cpu")
    assert away.data.device.type == "cpu"
    assert away.detach().device.type == "cpu"
    assert away.detach().is_meta
    assert away.to("cpu") is away
    assert away.to("cpu", torch.float64).dtype == torch.float64
    assert not away.decays
    assert away.new_tensor([1.0]).item() == 1.0
    assert away.new_ones(2, dtype=torch.int64).tolist() == [1, 1]
    again, read = copy.deepcopy(away), pickle.loads(pickle.dumps(away))
    assert (type(again), again.device.type, type(read)) == (Elsewhere, "cpu", nn.Parameter)
    state = pickle.loads(pickle.dumps(copy.deepcopy(model.state_dict())))
    assert {type(value) for value in state.values()} == {torch.Tensor}
    assert sum(value.is_meta for value in state.values()) == 2
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert len(optimizer.state) == 2


@on_ranks(2)
def test_what_is_computed_of_a_parameter_that_lives_elsewhere_has_no_values_either():
    mesh, model = tulle.init(pipe=-1, timeout=8), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    pipeline.place(model, mesh["pipe"], {"0": 0, "1": 1})
    away = model[1 - mesh.rank].weight
    for one in (away, away.data, away.detach()):
        made = [
            one * 0.5,
            0.5 * one + one,
            one.pow(2).sum(),
            torch.zeros_like(one),
            torch.stack([one, one]),
            one.norm(),
        ]
        assert all(value.is_meta and value.device.type == "cpu" for value in made)
        with pytest.raises(ModelError, match=r"^item reads a parameter .* at another stage"):
            one.sum().item()
    assert type(away) is Elsewhere


@on_ranks(2)
def test_averages_that_take_turns_with_parameters_and_copies_of_states_are_those_of_one_process():
    def scores_of(model, ids):
        best, averages = copy.deepcopy(model.state_dict()), [one.detach() for one in model.parameters()]
        averages = [
            0.5 * average + one.detach() * 0.25 for average, one in zip(averages, model.parameters(), strict=True)
        ]
        kept = [one.data for one in model.parameters()]
        for one, average in zip(model.parameters(), averages, strict=True):
            one.data = average.data
        scores = [model(ids)]
        for one, own in zip(model.parameters(), kept, strict=True):
            one.data = own
        model.load_state_dict(best)
        return torch.stack([*scores, model(ids)]).detach()

    def made():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).double()

    ids, mesh = torch.ones(3, 2, dtype=torch.float64), tulle.init(pipe=-1, timeout=8)
    expected = scores_of(made(), ids)
    assert torch.equal(scores_of(pipeline.place(made(), mesh["pipe"], {"0": 0, "1": 1}), ids), expected)


@on_ranks(2)
def test_parameters_that_are_put_by_on_the_cpu_for_an_evaluation_come_back():
    def scores_of(model, ids):
        averages = [one.clone().detach() * 0.5 for one in model.parameters()]
        put_by = [one.detach().cpu().clone() for one in model.parameters()]
        for one, average in zip(model.parameters(), averages, strict=True):
            one.data.copy_(average.to(one.device).data)
        scores = [model(ids)]
        for one, own in zip(model.parameters(), put_by, strict=True):
            one.data.copy_(own.data)
        return torch.stack([*scores, model(ids)]).detach()

    def made():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).double()

    ids, mesh = torch.ones(3, 2, dtype=torch.float64), tulle.init(pipe=-1, timeout=8)
    model = pipeline.place(made(), mesh["pipe"], {"0": 0, "1": 1})
    assert torch.equal(scores_of(model, ids), scores_of(made(), ids))
    with pytest.raises(ModelError, match=r"^numpy reads a parameter .* at another stage"):
        model[1 - mesh.rank].weight.detach().cpu().numpy()


def test_what_lives_elsewhere_is_brought_to_another_device_without_values():
    away = elsewhere(nn.Parameter(torch.empty(2, device="meta")), torch.device("cuda"))
    for brought in (away.cpu(), away.detach().cpu(), away.to("cpu"), away.to("cpu", torch.float64)):
        assert (type(brought), brought.is_meta, brought.device.type) == (ElsewhereData, True, "cpu")
    assert away.to("cpu", torch.float64).dtype == torch.float64
    assert away.cpu().to("cuda").device.type == away.device.type == "cuda"


class Tieable(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False))


@on_ranks(2)
def test_a_weight_that_is_tied_to_another_stages_after_placing_is_refused_where_it_has_no_values():
    mesh = tulle.init(pipe=-1, timeout=8)
    model = pipeline.place(Tieable(), mesh["pipe"], {"0": 0, "1": 1})
    ids = torch.arange(WORDS)
    with torch.no_grad():
        model(ids)  # what the head reads was looked at in this call
    if mesh["pipe"].rank == 0:
        model[1].weight = model[0].weight
        return
    with pytest.raises(ModelError, match=r"'weight' of a Linear, of shape .*, was set to a parameter that lives at"):
        model[1].weight = model[0].weight
    assert not model[1].weight.is_meta


@on_ranks(2)
def test_stages_take_parameters_of_their_own_and_layers_change_places():
    mesh = tulle.init(pipe=-1, timeout=8)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])
    reference = copy.deepcopy(model)
    pipeline.place(model, mesh["pipe"], {"0": 0, "1": 0, "2": 1})
    for one in (model, reference):
        one[0].weight = one[1].weight
        one[0], one[2] = one[2], one[0]
    x = torch.ones(2, WIDTH)
    with torch.no_grad():
        assert model(x).sum().item() == reference(x).sum().item()


def by_state(target, online):
    target.load_state_dict(online.state_dict())


def by_data(target, online):
    for theirs, mine in zip(target.parameters(), online.parameters(), strict=True):
        theirs.data.copy_(mine.data)


@on_ranks(2)
@pytest.mark.parametrize("update", [by_state, by_data])
@pytest.mark.parametrize("stages", [{"0": 0, "1": 1}, {"0": 1, "1": 0}])
def test_a_target_of_another_stage_is_updated_within_a_step_and_refused_on_all_ranks_outside(update, stages):
    mesh = tulle.init(pipe=-1, timeout=8)
    model = pipeline.place(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), mesh["pipe"], stages)
    with pytest.raises(
        (ModelError, RuntimeError), match=r"has no values here, together .*load another module from tulle\.full"
    ):
        update(model[1], model[0])
    tulle.step(micro_batches=1)(lambda model: update(model[1], model[0]))(model)
    is_alike = tulle.step(micro_batches=1)(lambda model: torch.equal(model[0].weight, model[1].weight))(model)
    assert is_alike.outputs == [True]
    model.load_state_dict({name: torch.ones(one.shape) for name, one in model.state_dict().items()})
    assert torch.equal(model[mesh.rank ^ stages["0"]].weight, torch.ones(WIDTH, WIDTH)), "values that all ranks have"
