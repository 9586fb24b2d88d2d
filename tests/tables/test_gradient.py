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
        assert torch.cosine_similarity(gradient, gradient).shape == gradient.shape[:1]
