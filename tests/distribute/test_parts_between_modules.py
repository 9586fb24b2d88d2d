"""Parameters that full sharding shares out are read between the modules of a pipeline as in one process."""

import pytest
import torch
from axes_models import worst_difference
from torch import nn
from torch.nn import functional

import tulle
from ranks import on_ranks
from tulle.errors import TulleError
from tulle.plan import Memory, Plan
from tulle.plan.table_plan import TablePlan

WIDTH, WORDS, STEPS = 8, 12, 2


class Tied(nn.Module):
    """A table at the first stage, whose rows the last stage scores, and layers between."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.last = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, ids):
        return self.last(self.first(self.words(ids)).mean(1)) @ self.words.weight.T


STAGES = {"words": 0, "first": 0, "last": 1}
READS = {
    "another stage scores rows": lambda model, scores: scores.mean(),
    "its shape": lambda model, scores: scores.mean() / model.last[0].weight.shape[0] / len(model.first[0].weight),
    "how many there are": lambda model, scores: scores.mean() / sum(one.numel() for one in model.parameters()),
    "a product at its stage": lambda model, scores: (model.last[0].weight @ model.last[0].weight.T).pow(2).sum(),
    "products of two stages": lambda model, scores: (model.first[0].weight @ model.last[0].weight).pow(2).sum(),
    "a difference of two stages": lambda model, scores: (model.first[0].weight - model.last[0].weight).norm(),
    "all in one": lambda model, scores: nn.utils.parameters_to_vector(model.parameters()).norm(),
    "norms of rows": lambda model, scores: sum(one.norm(dim=0).mean() for one in model.parameters()),
}


def build():
    torch.manual_seed(0)
    return Tied().double()


def batch_of(step, rank=0, size=1):
    drawn = torch.Generator().manual_seed(step)
    ids, targets = torch.randint(WORDS, (8, 3), generator=drawn), torch.randint(WORDS, (8,), generator=drawn)
    return ids.chunk(size)[rank], targets.chunk(size)[rank]


def placed():
    mesh = tulle.init(data=2, pipe=2)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = Plan(mesh.shape, stages=STAGES, micro_batches=2, memory=Memory(full_shard=True))
    return (*tulle.distribute(model, optimizer, mesh, plan=plan), (mesh["data"].rank, mesh["data"].size))


def train(model, optimizer, read, place=(0, 1)):
    @tulle.step(micro_batches=2)
    def train_step(model, ids, targets):
        scores = model(ids)
        loss = functional.cross_entropy(scores, targets) + 0.1 * read(model, scores)
        loss.backward()
        return loss

    for step in range(STEPS):
        train_step(model, *batch_of(step, *place))
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(4)
@pytest.mark.parametrize("read", READS)
def test_what_a_step_reads_of_parameters_is_of_the_whole(read):
    model, optimizer, place = placed()
    train(model, optimizer, READS[read], place)
    reference = build()
    train(reference, torch.optim.SGD(reference.parameters(), lr=0.1), READS[read])
    assert worst_difference(tulle.full_state_dict(model, everywhere=True), reference.state_dict()) < 1e-12


@on_ranks(4)
def test_a_step_without_gradients_reads_the_whole_at_another_stage():
    model, _, place = placed()

    @tulle.step(micro_batches=2)
    def scores(model, ids):
        with torch.no_grad():
            return model(ids), model.first[0].weight.detach() * 2

    given, twice = scores(model, batch_of(0, *place)[0])
    reference = build()
    assert torch.allclose(given.concat(), reference(batch_of(0, *place)[0]), rtol=0, atol=1e-12)
    assert torch.equal(twice.stack()[0], reference.first[0].weight * 2)


@on_ranks(4)
def test_a_moving_average_of_another_stage_is_written_in_a_step():
    model, _, _ = placed()

    @tulle.step(micro_batches=1)
    def follow(model):
        with torch.no_grad():
            model.last[0].weight.lerp_(model.first[0].weight, 0.25)
            model.first[0].bias.copy_(model.last[0].bias)
        model.last[0].load_state_dict(model.last[0].state_dict())

    reference = build()
    for one in (model, reference):
        follow(one)
    assert worst_difference(tulle.full_state_dict(model, everywhere=True), reference.state_dict()) < 1e-12


@on_ranks(4)
def test_beside_split_layers_shapes_and_states_are_of_the_whole_at_every_stage():
    mesh = tulle.init(pipe=2, model=2)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = Plan(mesh.shape, stages=STAGES, tensor_parallel=("first.0", "last.0"))
    tulle.distribute(model, optimizer, mesh, plan=plan)
    assert all(part.is_meta or len(part.to_local()) < WIDTH for part in (model.first[0].weight, model.last[0].weight))
    reference = build()
    assert [one.shape for one in model.parameters()] == [one.shape for one in reference.parameters()]
    assert [one.numel() for one in model.parameters()] == [one.numel() for one in reference.parameters()]

    @tulle.step(micro_batches=1)
    def counted(model):
        with torch.no_grad():
            model.last[0].load_state_dict(model.first[0].state_dict())
            return sum(one.numel() for one in model.parameters()), model.first[0].weight.shape[0], model.last[0].weight

    *numbers, weight = counted(model)
    assert [one.mean() for one in numbers] == [sum(one.numel() for one in reference.parameters()), WIDTH]
    assert torch.equal(weight.stack()[0], reference.first[0].weight)
    found = tulle.full_state_dict(model, everywhere=True)
    assert all(torch.equal(found[f"last.0.{name}"], value) for name, value in reference.first[0].state_dict().items())


class Scored(nn.Module):
    """A table that the plan splits by rows, whose rows another stage scores."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids):
        return functional.linear(self.last(self.words(ids)), self.words.weight).mean()


@on_ranks(4)
def test_what_nobody_gathers_with_a_gradient_is_refused_by_name():
    mesh = tulle.init(data=2, pipe=2, timeout=8)
    model = Scored()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tables = (TablePlan("words.weight", WORDS, WIDTH, "rows", "given"),)
    plan = Plan(mesh.shape, tables=tables, stages={"words": 0, "last": 1}, micro_batches=1)
    tulle.distribute(model, optimizer, mesh, plan=plan)

    @tulle.step
    def train_step(model, ids):
        loss = model(ids)
        loss.backward()
        return loss

    with pytest.raises(TulleError, match=r"linear was given the table 'words\.weight' as if|waited in vain"):
        train_step(model, batch_of(0)[0])
