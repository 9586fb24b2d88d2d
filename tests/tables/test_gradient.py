"""What would take a part of a gradient for all of it is refused."""

import pytest
import torch
from torch import nn

import tulle
from ranks import on_ranks
from tulle.errors import GradientError

ROWS, WIDTH = 8, 4
ASKED = {
    "aminmax": torch.aminmax,
    "var_mean": torch.var_mean,
    "nuclear norm": lambda gradient: torch.linalg.matrix_norm(gradient, "nuc"),
    "histogram": torch.histc,
    "distance": lambda gradient: torch.dist(gradient, gradient),
    "cosine": lambda gradient: nn.functional.cosine_similarity(gradient.flatten(), gradient.flatten(), dim=0),
    "transposed": lambda gradient: gradient.T @ gradient,
    "on the right": lambda gradient: torch.ones(2, len(gradient), dtype=torch.float64) @ gradient,
    "by einsum": lambda gradient: torch.einsum("ij,ij->", gradient, gradient),
    "a row": lambda gradient: gradient.flatten()[0],
    "frozen rows": lambda gradient: gradient.__setitem__((slice(1), slice(1)), 0.0),
    "chunks": lambda gradient: gradient.flatten().chunk(2),
    "numbers": lambda gradient: gradient.detach().cpu().numpy(),
    "noise": torch.randn_like,
    "whitened": lambda gradient: torch.linalg.svd(gradient),
}


@on_ranks(2)
@pytest.mark.parametrize("how", ["rows", "columns"])
def test_what_would_take_a_part_for_all_of_it_is_refused(how):
    mesh = tulle.init(data=-1)
    table = nn.Embedding(ROWS, WIDTH, dtype=torch.float64)
    table, _ = tulle.distribute(table, torch.optim.SGD(table.parameters()), mesh, plan=how)
    table(torch.arange(ROWS)).pow(2).sum().backward()
    gradient = table.weight.grad
    for name, ask in ASKED.items():
        with pytest.raises(GradientError, match=r"was asked of a gradient .*of which this rank has a part"):
            pytest.fail(f"{name}: {ask(gradient)}")
    with pytest.raises(GradientError, match=r"mul_ was given a gradient .* part, .* of shape \[8, 4\]: that would"):
        gradient.mul_(torch.ones(ROWS, WIDTH, dtype=torch.float64))
    if how == "rows":
        turned = gradient @ torch.eye(WIDTH, dtype=torch.float64).flip(0)
        assert torch.equal(turned, gradient.flip(1))
        assert torch.cosine_similarity(gradient, gradient).to_local().shape == gradient.to_local().shape[:1]


class Rows(torch.optim.Optimizer):
    """Momentum for the rows that have a gradient, by their numbers."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for parameter in self.param_groups[0]["params"]:
            gradient = parameter.grad.coalesce()
            rows, values = gradient.indices()[0], gradient.values()
            momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
            moved = momentum[rows] * 0.9 + values
            momentum.index_copy_(0, rows, moved)
            parameter.index_add_(0, rows, moved, alpha=-0.1)


@on_ranks(2)
@pytest.mark.parametrize("how", ["rows", "columns"])
def test_an_optimizer_that_goes_by_the_numbers_of_rows_steps_this_ranks(how):
    mesh = tulle.init(data=-1)
    model, reference = (nn.Embedding.from_pretrained(torch.eye(ROWS, WIDTH), freeze=False, sparse=True) for _ in "ab")
    model, optimizer = tulle.distribute(model, Rows(model.parameters()), mesh, plan=how)
    plain = Rows(reference.parameters())
    for ids in (torch.tensor([1, 1, 5, 6]), torch.tensor([6, 0, 2, 1])):
        model.zero_grad()
        reference.zero_grad()
        (mesh.size * model(ids.chunk(mesh.size)[mesh.rank]).pow(2).sum()).backward()
        reference(ids).pow(2).sum().backward()
        optimizer.step()
        plain.step()
        with pytest.raises(GradientError, match=r"__getitem__ was asked of a gradient along dimension 0"):
            model.weight.grad.coalesce().indices()[0]  # elsewhere they would be taken for those of the whole
    found = tulle.full_state_dict(model, everywhere=True)["weight"]
    assert torch.allclose(found, reference.weight)
