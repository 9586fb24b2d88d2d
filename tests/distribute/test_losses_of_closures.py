"""Optimizers that look at the loss see that of the whole batch."""

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import nn

import tulle
from ranks import on_ranks

SAMPLES = 6


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, size: int) -> torch.Tensor:
    """All parameters after three steps."""
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        batch = torch.randn(SAMPLES, 4, dtype=torch.float64, generator=generator).chunk(size)[rank]

        def closure(batch: torch.Tensor = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(batch) - batch.sum(1, keepdim=True).sin()).pow(2).mean()
            loss.backward()
            return loss

        optimizer.step(closure)
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    return model, torch.optim.LBFGS(model.parameters(), max_iter=5, line_search_fn="strong_wolfe")


@on_ranks(2, 3)
def test_a_search_along_a_line_gives_the_numbers_of_one_process():
    mesh = tulle.init(data=-1)
    expected = train(*make(), rank=0, size=1)
    found = train(*tulle.distribute(*make(), mesh), rank=mesh.rank, size=mesh.size)
    assert (found - expected).abs().max() < 1e-9  # each step multiplies the rounding of the last
    assert torch.equal(tulle.sync.all_reduce(found, mesh["data"], op="sum"), found * mesh.size)


class Silent(torch.optim.Optimizer):
    """One of a user's, which wants gradients of a closure, and no loss."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Callable[[float], None]) -> None:
        with torch.enable_grad():
            closure(2.0)
        for parameter in self.param_groups[0]["params"]:
            parameter -= parameter.grad


@on_ranks(2)
def test_a_closure_that_is_given_something_and_returns_nothing_does_so():
    mesh = tulle.init(data=-1)
    model = nn.Linear(2, 1)
    model, optimizer = tulle.distribute(model, Silent(model.parameters()), mesh)
    before = model.bias.item()
    optimizer.step(lambda factor: (factor * model(torch.ones(1, 2)).sum()).backward())
    assert model.bias.item() == pytest.approx(before - 2.0)


@on_ranks(2)
def test_an_optimizer_that_treats_elements_by_themselves_costs_no_message():
    mesh = tulle.init(data=-1)
    model = nn.Linear(2, 1)
    model, optimizer = tulle.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), mesh)
    assert optimizer.step(lambda: float(mesh.rank)) == pytest.approx(mesh.rank)
