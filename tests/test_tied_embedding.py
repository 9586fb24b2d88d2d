"""*Densifying Assumed-sparse Tensors*: what gathering a tied table's gradient holds, and that tulle reduces it."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

import tulle
from ranks import on_ranks
from tulle.comm import all_gather_parts, traffic
from tulle.cost import Characteristics, Network
from tulle.engine import engine_of
from tulle.sync import choose

ROWS, WIDTH, TOKENS = 33_708, 1_024, 5_000  # Transformer-big's shared table; tokens of each side in a process
SMALLER = 64  # rows, tokens and columns are so many times fewer where tensors are really exchanged
GIGABIT = Network(latency_s=3e-4, bandwidth_bytes_per_s=1.2e8)


def gathered_bytes(ranks: int, rows: int, width: int, tokens: int) -> int:
    """Values that each rank holds where all three gradients are taken for sparse, laid end to end and gathered."""
    return ranks * (rows + 2 * tokens) * width * 4


class Translator(nn.Module):
    """One table for source words, target words and the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS // SMALLER, WIDTH // SMALLER, sparse=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """The loss of predicting `[tokens]` from `[tokens]`."""
        return F.cross_entropy((self.words(source) + self.words(target)) @ self.words.weight.T, target)


def tokens_of(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * rank + step)
    return torch.randint(ROWS // SMALLER, (2, TOKENS // SMALLER), generator=generator)


def test_the_papers_figures_are_arithmetic():
    """11.4 GB and 139 MB at 64 processes."""
    gathered = [gathered_bytes(ranks, ROWS, WIDTH, TOKENS) for ranks in (4, 8, 16, 64)]
    assert [f"{size / 1e9:.2f} GB" for size in gathered] == ["0.72 GB", "1.43 GB", "2.86 GB", "11.46 GB"]
    assert f"{ROWS * WIDTH * 4 / 1e6:.1f} MB" == "138.1 MB"


@on_ranks(2, 4)
def test_what_is_really_gathered_grows_with_the_ranks_and_what_is_reduced_does_not():
    mesh = tulle.init(data=-1)
    axis = mesh["data"]
    table = (ROWS // SMALLER, WIDTH // SMALLER)
    assumed_sparse = torch.ones(table[0] + 2 * (TOKENS // SMALLER), table[1])
    gathered = all_gather_parts(assumed_sparse, [len(assumed_sparse)] * axis.size, axis, label="here").wait()
    assert gathered.nbytes == gathered_bytes(axis.size, *table, TOKENS // SMALLER)
    torch.manual_seed(0)
    reference = Translator().double()
    model = Translator().double()
    model, [optimizer] = tulle.distribute(model, [SGD(model.parameters(), lr=0.1)], mesh)
    reference.load_state_dict(model.state_dict())
    for step in range(3):
        traffic.take_labels()
        model(*tokens_of(mesh.rank, step)).backward()
        (sum(reference(*tokens_of(rank, step)) for rank in range(mesh.size)) / mesh.size).backward()
        gradient = model.words.weight.grad
        assert gradient.layout == torch.strided
        assert gradient.shape == table
        assert torch.allclose(gradient, reference.words.weight.grad, rtol=1e-12, atol=1e-15)
        sent = sum(count.bytes_sent for count in traffic.take_labels().values())
        if step:  # the first also measures the network
            assert sent < 1.05 * 2 * (mesh.size - 1) / mesh.size * gradient.nbytes
        optimizer.step()
        for one in (model, reference):
            with torch.no_grad():
                one.words.weight.copy_(model.words.weight)
            one.zero_grad()
    assert engine_of(model).schemes() == {}, "no table is left that would be taken for sparse"


@pytest.mark.parametrize("ranks", [4, 8, 16, 64])
def test_auto_does_not_gather_a_gradient_that_touches_every_row(ranks):
    every_row = Characteristics(ROWS, WIDTH, 4, (ROWS,) * ranks)
    choice = choose(every_row, GIGABIT, ranks)
    predicted = dict(choice.candidates)
    dense = 2 * (ranks - 1) / ranks * ROWS * WIDTH * 4
    assert predicted["densify"].bytes == pytest.approx(dense, rel=0.001)
    assert predicted["allgather"].bytes == pytest.approx(ranks / 2 * dense, rel=0.001)
    # To push all rows to owners and back is a reduction too, within a few percent of the backend's own.
    assert predicted[choice.scheme].bytes < 1.01 * dense
    eager = replace(GIGABIT, all_reduce_latency_s=3e-4, all_reduce_bytes_per_s=1.5e8)
    assert choose(every_row, eager, ranks).scheme == "densify"


@on_ranks(3)
def test_rows_that_meet_a_dense_gradient_of_another_rank_are_reduced_with_it():
    axis = tulle.init(data=-1)["data"]
    table = (ROWS // SMALLER, WIDTH // SMALLER)
    dense = torch.ones(table)
    rows = tulle.RowSparse(torch.arange(table[0]), dense, table[0])
    traffic.take_labels()
    total = tulle.sync.all_reduce(dense if axis.rank == 1 else rows, axis, op="sum")
    assert isinstance(total, Tensor)
    assert torch.equal(total, axis.size * dense)
    assert traffic.take_labels()["gradient"].bytes_sent <= 1.01 * 2 * (axis.size - 1) / axis.size * dense.nbytes
