"""What ranks of axis `model` hold whole must stay the same on all; what parts it is told by name, on all ranks."""

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

import tulle
from raised_alike import every_rank_raises
from ranks import on_ranks
from tulle.errors import ModelError
from tulle.mesh import Mesh

LENGTH, WIDTH = 5, 8


def train(mesh: Mesh, *, seed: int, share: int, rate: float = 0.01) -> Tensor:
    """Ten steps, with dropout of a seed, on batches of a share, at a rate; gives the last loss."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 12, dropout=0.2, batch_first=True)
    optimizer = AdamW(layer.parameters(), lr=0.01)
    model, optimizer = tulle.distribute(layer, optimizer, mesh)
    torch.manual_seed(seed)
    optimizer.param_groups[0]["lr"] = rate
    batches, loss = torch.Generator().manual_seed(share), torch.zeros(())
    for _ in range(10):
        loss = model(torch.randn(2, LENGTH, WIDTH, generator=batches)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


@on_ranks(2, 4)
@pytest.mark.parametrize("what", ["seed", "share", "rate"])
def test_what_one_rank_along_model_does_otherwise_is_told_on_all(what):
    mesh = tulle.init(data=-1, model=2)
    own = {"seed": 1 + mesh.rank, "share": mesh.rank, "rate": 0.01 * (1 + mesh["model"].rank)}
    with every_rank_raises(ModelError, "was not the same on all ranks of axis 'model' at the step after"):
        train(mesh, **{"seed": 0, "share": 0} | {what: own[what]})


@on_ranks(2, 4)
def test_ranks_along_data_may_differ_and_those_along_model_are_alike():
    mesh = tulle.init(data=-1, model=2)
    loss = train(mesh, seed=mesh["data"].rank, share=mesh["data"].rank)
    assert set(tulle.comm.gather_values(loss.item(), mesh["model"], label="loss")) == {loss.item()}
