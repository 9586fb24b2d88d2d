"""Sparse gradients of split tables, as loops that look at them, or set them, have them."""

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import tulle
from ranks import on_ranks
from tulle.errors import GradientError

ROWS, WIDTH = 43, 6


def after_backward(plan: str) -> tuple[nn.Embedding, SGD, tulle.Mesh, int]:
    """A table whose gradient is there, and how many rows of it all ranks have looked up."""
    mesh = tulle.init(data=-1)
    torch.manual_seed(0)
    table = nn.Embedding(ROWS, WIDTH, sparse=True)
    table, optimizer = tulle.distribute(table, SGD(table.parameters(), lr=0.5), mesh, plan=plan)
    ids = torch.randint(ROWS, (mesh.size, 9), generator=torch.Generator().manual_seed(1))
    table(ids[mesh.rank]).pow(2).sum().backward()
    return table, optimizer, mesh, len(ids.unique())


def gradient_of(table: nn.Embedding) -> Tensor:
    assert table.weight.grad is not None
    return table.weight.grad


@on_ranks(2, 3)
@pytest.mark.parametrize("plan", ["rows", "columns", "allgather"])
def test_the_rows_that_were_touched_are_counted_over_all_ranks(plan):
    table, _, mesh, touched = after_backward(plan)
    assert gradient_of(table).coalesce()._nnz() == touched
    if not mesh.rank:
        assert "nnz" in str(gradient_of(table))  # asks nobody


@on_ranks(2)
@pytest.mark.parametrize("plan", ["rows", "columns"])
def test_a_gradient_as_large_as_the_whole_is_refused_with_the_mend(plan):
    table, _, _, _ = after_backward(plan)
    made = torch.sparse_coo_tensor(torch.empty(1, 0, dtype=torch.long), torch.empty(0, WIDTH), table.weight.shape)
    for gradient in (made, torch.zeros(ROWS, WIDTH)):
        with pytest.raises(
            GradientError, match=r"of shape \[43, 6\] was given to a parameter .*: write in the gradient"
        ):
            table.weight.grad = gradient
    with pytest.raises(RuntimeError, match=r"attempting to assign a gradient of size '\[2, 6\]'"):
        table.weight.grad = torch.zeros(2, WIDTH)
    gradient_of(table).coalesce().values().clamp_(-0.1, 0.1)  # as the error says


@on_ranks(2)
def test_an_optimizer_of_ones_own_counts_the_rows_of_its_part():
    """What it makes of so many rows must be as long as these."""

    class Counts(SGD):
        def step(self, closure: None = None) -> None:
            gradient = self.param_groups[0]["params"][0].grad.coalesce()
            assert gradient._nnz() == gradient._indices().shape[1]
            super().step(closure)

    mesh = tulle.init(data=-1)
    table = nn.Embedding(ROWS, WIDTH, sparse=True)
    table, optimizer = tulle.distribute(table, Counts(table.parameters(), lr=0.5), mesh, plan="rows")
    table(torch.arange(5) + mesh.rank).pow(2).sum().backward()
    optimizer.step()
