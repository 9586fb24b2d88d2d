"""Steps of an optimizer, and whole ones with their backward in them, may be compiled."""

import warnings

import pytest
import torch
from axes_models import worst_difference
from torch import nn

import tulle
from ranks import on_ranks

PLANS = {
    "replicas": tulle.Plan({"data": 2}),
    "rows": "rows",
    "full_shard": tulle.Plan({"data": 2}, memory=tulle.Memory(full_shard=True)),
}


def batches(rank, size):
    """Five steps: from the third on it is known where ids lie in a batch, and rows of the next are fetched."""
    for step in range(5):
        yield torch.randint(12, (4, 3), generator=torch.Generator().manual_seed(step)).chunk(size)[rank]


class Scaled(nn.Sequential):
    """It asks the class that it derives from, as models do that derive from another."""

    def forward(self, ids):
        return super().forward(ids) * self.scale()

    def scale(self):
        return 2.0


class Twice(Scaled):
    def forward(self, ids):
        return super().forward(ids) + super().scale()

    def scale(self):
        return super().scale() * 1.5


def make(kind=nn.Sequential):
    torch.manual_seed(0)
    model = kind(nn.Embedding(12, 4), nn.Linear(4, 2)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def step_alone(model, optimizer):
    update = torch.compile(optimizer.step, backend="eager")

    def step(batch):
        model(batch).pow(2).mean().backward()
        update()
        optimizer.zero_grad()

    return step


def whole_step(model, optimizer):
    def step(batch):
        model(batch).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return torch.compile(step, backend="eager")


@on_ranks(2)
@pytest.mark.parametrize(
    ("plan", "compiled"),
    [
        ("rows", step_alone),
        ("replicas", whole_step),
        ("full_shard", whole_step),
        ("rows", whole_step),
    ],
    ids=lambda one: getattr(one, "__name__", one),
)
def test_a_step_that_is_compiled_gives_the_numbers_of_one_process(plan, compiled):
    reference, expected = make()
    for batch in batches(0, 1):
        reference(batch).pow(2).mean().backward()
        expected.step()
        expected.zero_grad()
    mesh = tulle.init(data=-1)
    model, optimizer = tulle.distribute(*make(), mesh, plan=PLANS[plan])
    step = compiled(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        for batch in tulle.lookahead(batches(mesh.rank, mesh.size)):
            step(batch)
    torch.compiler.reset()
    assert worst_difference(tulle.full_state_dict(model, everywhere=True), reference.state_dict()) < 1e-12


@on_ranks(2)
@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("plan", PLANS)
def test_a_model_that_asks_the_class_it_derives_from_is_compiled(plan, is_first):
    """`torch.compile` looks for that class among those of the model, of which tulle's own equals the model's."""
    mesh = tulle.init(data=-1)
    (model, optimizer), (reference, alone) = make(Twice), make(Twice)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        if is_first:
            model.compile(backend="eager")
        tulle.distribute(model, optimizer, mesh, plan=PLANS[plan])
        called = model if is_first else torch.compile(model, backend="eager")
        for mine, whole in zip(batches(mesh.rank, mesh.size), batches(0, 1), strict=True):
            for one, forward, batch in ((optimizer, called, mine), (alone, reference, whole)):
                forward(batch).pow(2).mean().backward()
                one.step()
                one.zero_grad()
    found = tulle.full_state_dict(model, everywhere=True)
    assert worst_difference(found, reference.state_dict()) < 1e-12
    torch.compiler.reset()
