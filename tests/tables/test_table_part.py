"""Parts of split tables are not taken for the whole, by name of the table; what is right for a part goes on."""

import copy
import pickle
from typing import cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD

import tulle
from models import batches
from ranks import on_ranks
from tulle.errors import ModelError
from tulle.mesh import Axis
from tulle.parts import Part
from tulle.tables import guard_table, split_as, split_of

ROWS, WIDTH = 40, 6


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.words(ids)).tanh()


def build() -> nn.Module:
    torch.manual_seed(0)
    return Words().double()


HIDDEN = torch.ones(3, WIDTH, dtype=torch.float64)
WRONG = {
    "T": lambda table: HIDDEN @ table.T,
    "linear": lambda table: F.linear(HIDDEN, table),
    "einsum": lambda table: torch.einsum("bw,rw->br", HIDDEN, table),
    "embedding": lambda table: F.embedding(torch.tensor([1, 2]), table),
    "__getitem__": lambda table: table[3],
    "__setitem__": lambda table: table.data.__setitem__(0, 0.0),
    "index_select": lambda table: table.index_select(0, torch.tensor([1])),
    "unbind": lambda table: list(table),
    "normal_": lambda table: nn.init.normal_(table),
    "uniform_": lambda table: table.data.uniform_(-0.1, 0.1),
}
WRONG_IN_TRAINING = {
    "linear": lambda table: F.linear(HIDDEN, F.normalize(table * 2.0, dim=1).to(HIDDEN.dtype)),
    "norm": lambda table: table.norm().backward(),
    "mean": lambda table: (table * table).mean().backward(),
    "torch.autograd.grad": lambda table: torch.autograd.grad(table.sum(), [table]),
}


def part_of(placement: str) -> nn.Parameter:
    """What the second of two ranks has of a table."""
    nobody = cast("dist.ProcessGroup", None)  # nothing is sent
    axis = Axis("data", 1, 2, (0, 1), nobody, torch.device("cpu"), 0.0)
    split = split_as(placement, "words.weight", (ROWS, WIDTH), axis)
    parameter = nn.Parameter(split.take(torch.randn(ROWS, WIDTH, dtype=torch.float64)))
    guard_table(parameter, split)
    return parameter


@pytest.mark.parametrize("placement", ["rows", "columns"])
def test_what_takes_a_part_for_the_whole_is_refused_by_name(placement):
    table, whole = part_of(placement), nn.Parameter(torch.randn(ROWS, WIDTH, dtype=torch.float64))
    before = table.detach().clone()
    for context, wrong in ((torch.no_grad, WRONG), (torch.enable_grad, WRONG | WRONG_IN_TRAINING)):
        for name, read in wrong.items():
            with context(), pytest.raises(ModelError, match=rf"^{name} was .*the table 'words\.weight'.* split"):
                read(table)
            with context():
                read(whole)  # the twin: of a table that is not split it is right
    assert torch.equal(table.detach(), before), "nothing was written"


@on_ranks(2)
def test_what_treats_every_number_by_itself_goes_on_with_the_numbers_of_one_process():
    mesh = tulle.init(data=-1)
    model, reference = build(), build()
    ours, theirs = SGD(model.parameters(), lr=0.1, momentum=0.9), SGD(reference.parameters(), lr=0.1, momentum=0.9)
    tulle.distribute(model, ours, mesh, plan="rows")
    with pytest.raises(ModelError, match="T was given"):  # on every rank
        model(torch.tensor([mesh.rank])) @ model.words.weight.T
    for ids in batches(3, 4 * mesh.size):
        for one, optimizer, mine in ((model, ours, ids.chunk(mesh.size)[mesh.rank]), (reference, theirs, ids)):
            loss = one(mine).pow(2).mean() + 0.01 * sum((p**2).sum() + p.abs().sum() for p in one.parameters())
            loss.backward()
            nn.utils.clip_grad_norm_(one.parameters(), 0.5)
            optimizer.step()
            with torch.no_grad():
                for parameter in one.parameters():
                    parameter.mul_(0.99).add_(parameter.grad, alpha=-0.01)
                    parameter.data.clamp_(-1.0, 1.0)
                torch._foreach_mul_([*one.parameters()], 0.999)
            optimizer.zero_grad()
    table = model.words.weight
    assert type(table) is Part, "guarded again after each step"
    assert repr(table)
    assert table.norm().item() > 0, "to print it does no harm"
    split = split_of(table)
    assert split is not None
    expected = split.take(reference.words.weight)
    torch.testing.assert_close(table, expected, rtol=1e-12, atol=1e-14)
    for same in (copy.deepcopy(table.data), pickle.loads(pickle.dumps(table.data))):
        assert type(same) is torch.Tensor
        assert torch.equal(same, table.detach())
    assert type(copy.deepcopy(table)) is nn.Parameter
