"""What is made of each row of a part, its norm say, is that of one process: as a penalty, and to scale the rows by."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD

import tulle
from crossing import crossed
from models import batches
from ranks import on_ranks
from tulle.errors import ModelError
from tulle.tables import split_of

ROWS, WIDTH = 41, 6  # so that a place stays empty


def by_its_norm(weight):
    weight.div_(weight.norm(dim=1, keepdim=True))


def by_a_bound(weight):
    weight.mul_(1 / torch.linalg.vector_norm(weight, dim=-1, keepdim=True).clamp(min=0.8))


@torch.enable_grad()
def by_a_mask(weight):
    """As PyKEEN bounds the norms of rows."""
    norms = weight.norm(dim=1, keepdim=True)
    mask = (norms < 2).type_as(weight)
    weight.data = mask * weight + (1 - mask) * (weight / norms.clamp(min=1e-6) * 2)


def by_squares(weight):
    weight.copy_(weight / weight.pow(2).sum(1, keepdim=True).add(1e-3).sqrt())


def by_extremes(weight):
    largest, places = weight.abs().max(dim=1, keepdim=True)
    weight.sub_(0.1 * (largest + weight.amin(1, keepdim=True) + places))


def of_data(weight):
    weight.data /= weight.data.norm(2, 1, True)


@torch.enable_grad()
def laid_out(weight):
    """As PyKEEN constrains entities."""
    weight.data = functional.normalize(weight.view(ROWS, WIDTH), dim=-1).view(*weight.data.shape)


WRITES = [by_its_norm, by_a_bound, by_a_mask, by_squares, by_extremes, of_data, laid_out]
PENALTIES = {
    "norms": lambda w: (w.norm(dim=1) - 1).relu().sum() + (w.norm(dim=1) - 1).pow(2).mean(),
    "squares": lambda w: (1 - w.pow(2).sum(1)).abs().sum(),
    "laid out": lambda w: (
        w.view(ROWS, -1, 2).norm(dim=2).sum() + w.reshape([1, ROWS, WIDTH]).pow(2).sum(-1).sqrt().sum()
    ),
    "beside all": lambda w: (w * w.mean(1, keepdim=True)).sum() + (w.pow(2).mean(-1, keepdim=True) - w).pow(2).mean(),
}


@on_ranks(2, 3)
@pytest.mark.parametrize(("write", "penalty"), crossed(WRITES, PENALTIES))
def test_norms_of_rows_are_those_of_one_process(write, penalty):
    mesh = tulle.init(data=-1)
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, 1)).double()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, 1)).double()
    ours, theirs = SGD(model.parameters(), lr=0.1), SGD(reference.parameters(), lr=0.1)
    tulle.distribute(model, ours, mesh, plan={"0.weight": "rows"})
    for ids in batches(3, 6 * mesh.size):
        for one, optimizer, mine in ((model, ours, ids.chunk(mesh.size)[mesh.rank]), (reference, theirs, ids)):
            (one(mine % ROWS).pow(2).mean() + 0.1 * PENALTIES[penalty](one[0].weight)).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                write(one[0].weight)
    split = split_of(model[0].weight)
    assert split is not None
    places = split.rows()[1]
    found, wanted = model[0].weight.to_local()[places], split.take(reference[0].weight.detach())[places]
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)


@on_ranks(2)
def test_what_is_of_each_row_meets_nothing_else():
    mesh = tulle.init(data=-1)
    model = nn.Sequential(nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, ROWS)).double()
    optimizer = SGD(model.parameters(), lr=0.1)
    tulle.distribute(model, optimizer, mesh, plan={"0.weight": "rows"})
    norms = model[0].weight.norm(dim=1)
    scores = torch.zeros(4, len(norms), dtype=torch.float64)
    for taker, wrong in {
        "add": lambda: scores + norms,
        "__getitem__": lambda: norms[3],
        "softmax": lambda: norms.softmax(0),
        "tolist": lambda: norms.tolist(),
        "mv": lambda: torch.mv(scores, norms),
    }.items():
        with pytest.raises(ModelError, match=rf"^{taker} was given the table '0\.weight'"):
            wrong()
