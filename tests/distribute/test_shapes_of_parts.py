"""A part is as large as the whole to a program that asks; to torch, and in an optimizer's step, as what lies here."""

import pytest
import torch
from torch import nn

import tulle
from crossing import crossed
from ranks import on_ranks
from tulle.parts import Part
from tulle.plan import Memory, Plan


class Scored(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(13, 6), nn.Linear(6, 12)

    def forward(self, ids):
        return self.out(self.words(ids)).pow(2).mean() / self.words.weight.shape[0]

    def penalty(self):
        """As losses outside of forward divide by what they sum over."""
        return sum(weight.pow(2).sum() / len(weight) / weight.size(-1) for weight in self.parameters())


class Averaging(torch.optim.Optimizer):
    """Of one's own; it makes its states by shapes."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["average"] = torch.zeros(parameter.shape, dtype=parameter.dtype)
            state["average"].mul_(0.9).add_(parameter.grad)
            parameter.sub_(0.1 * state["average"])


def made(kind=torch.optim.AdamW):
    torch.manual_seed(0)
    model = Scored().double()
    return model, kind(model.parameters())


def distributed(way, kind=torch.optim.AdamW):
    mesh, (model, optimizer) = tulle.init(data=-1), made(kind)
    plan = {"words": way} if way != "full_shard" else Plan(mesh.shape, memory=Memory(full_shard=True))
    return (*tulle.distribute(model, optimizer, mesh, plan=plan), mesh)


def train(model, optimizer, rank=0, ranks=1):
    """A loop with averages, of gradients' squares too, that are made by shapes."""
    averages, squares = ([torch.zeros(one.shape, dtype=one.dtype) for one in model.parameters()] for _ in range(2))
    for step in range(3):
        ids = torch.randint(13, (6, 4), generator=torch.Generator().manual_seed(step)).chunk(ranks)[rank]
        (model(ids) + model.penalty()).backward()
        for square, weight in zip(squares, model.parameters(), strict=True):
            square.add_(weight.grad.pow(2))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for average, weight in zip(averages, model.parameters(), strict=True):
                average.mul_(0.5).add_(weight)
    return averages, squares


def close(one, other):
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


WAYS = pytest.mark.parametrize("way", ["rows", "columns", "full_shard"])


@WAYS
@pytest.mark.parametrize("kind", [torch.optim.AdamW, Averaging])
@on_ranks(2, 3)
def test_loops_that_go_by_shapes_are_those_of_one_process(way, kind):
    (model, optimizer, mesh), (reference, of_reference) = distributed(way, kind), made(kind)
    close(train(model, optimizer, mesh.rank, mesh.size), train(reference, of_reference))
    close(tulle.full_state_dict(model, everywhere=True), dict(reference.state_dict()))
    assert isinstance(model.words.weight, Part)


ASKED = {
    "shape": lambda w: tuple(w.shape),
    "sizes": lambda w: (w.size(0), w.size(-1), len(w), w.numel(), w.dim()),
    "of data": lambda w: (tuple(w.data.shape), w.detach().size(), (2 * w).shape, (w > 0).shape),
    "of norms": lambda w: (w.detach().norm(dim=1).shape, w.detach().abs().amax(0, keepdim=True).shape),
    "of views": lambda w: (len(w.detach().view(-1)), w.detach().unsqueeze(0).shape, w.detach().view(13, 6).shape),
    "of rows": lambda w: w.detach()[: w.shape[0] // 3].sum().item(),
    "by row": lambda w: sum(w.detach()[row].norm().item() for row in range(w.size(0))),
    "gram": lambda w: (w.detach() @ w.detach().T - torch.eye(w.size(0), dtype=w.dtype)).pow(2).sum().item(),
    "filters": lambda w: w.detach().view(w.size(0), -1).norm(dim=1).max().item(),
    "as the whole": lambda w: w.detach().reshape(w.shape[0] * w.shape[1]).median().item(),
}


@pytest.mark.parametrize(("way", "name"), crossed(["rows", "columns", "full_shard"], ASKED))
@on_ranks(2, 3)
def test_a_program_is_told_the_shape_of_all_of_it(way, name):
    (model, *_), (reference, _) = distributed(way), made()
    found, wanted = ASKED[name](model.words.weight), ASKED[name](reference.words.weight)
    assert found == (pytest.approx(wanted, rel=1e-12) if isinstance(wanted, float) else wanted)


@on_ranks(2)
def test_this_ranks_part_tells_its_own():
    model, optimizer, _ = distributed("full_shard")
    model(torch.arange(4)).backward()
    gradient = model.out.weight.grad
    assert gradient.shape == (2 * gradient).shape == (12, 6)
    assert gradient.to_local().shape == (6, 6)
    optimizer.step()
    assert model.out.weight.to_local().shape == (6, 6)
    assert model.out.weight.shape == (12, 6)
    state = model.state_dict()
    assert state["out.weight"].shape == (12, 6)
    model.load_state_dict(state)
