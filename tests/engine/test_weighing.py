"""A penalty of weights of which ranks have parts is weighed alike on all ranks, or backward says that it is not."""

import pytest
import torch
from torch import nn

import tulle
from models import Words, build
from rank_process import patches
from ranks import on_ranks
from tulle.engine import data_parallel
from tulle.errors import ModelError

IDS = torch.arange(32).view(8, 4) % 20


def made() -> nn.Module:
    return build(lambda: Words(is_sparse=False), seed=0)


def distributed(plan: str):
    mesh, model = tulle.init(data=-1), made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    saving = tulle.Plan(mesh={"data": mesh.size}, memory=tulle.Memory(full_shard=True))
    return mesh, *tulle.distribute(model, optimizer, mesh, plan=saving if plan == "full_shard" else plan)


def penalty(model: nn.Module) -> torch.Tensor:
    return 0.1 * model.words.weight.pow(2).sum() + 0.2 * model.tags.weight.norm()


@on_ranks(2)
@pytest.mark.parametrize("plan", ["rows", "columns", "full_shard"])
def test_penalties_that_are_weighed_by_shares_of_unlike_size_are_refused_on_all_ranks(plan):
    mesh, model, _ = distributed(plan)
    mine = IDS[:2] if mesh.rank == 0 else IDS[2:]
    loss = (model(mine) + penalty(model)) * (len(mine) * mesh.size / len(IDS))
    with pytest.raises(
        ModelError, match=r"in backward 1: by 0\.05\d* on rank 0, 0\.15\d* on rank 1\. Each rank's part"
    ):
        loss.backward()


@on_ranks(2)
@pytest.mark.parametrize("plan", ["rows", "columns", "full_shard"])
def test_behind_the_weight_of_the_share_they_are_those_of_one_process(plan):
    mesh, model, optimizer = distributed(plan)
    reference = made()
    steps_it = torch.optim.SGD(reference.parameters(), lr=0.1)
    mine = IDS[:2] if mesh.rank == 0 else IDS[2:]
    for _ in range(3):
        (model(mine) * (len(mine) * mesh.size / len(IDS)) + penalty(model)).backward()
        (reference(IDS) + penalty(reference)).backward()
        for one in (optimizer, steps_it):
            one.step()
            one.zero_grad()
    whole = tulle.full_state_dict(model, everywhere=True)
    for name, value in reference.state_dict().items():
        assert torch.allclose(whole[name], value, rtol=1e-12, atol=1e-15), name


@on_ranks(2)
def test_without_the_look_each_part_is_moved_by_its_own_ranks_weight():
    patches.setattr(data_parallel, "check_weighed", lambda *_: None)
    mesh, model, _ = distributed("rows")
    (model(IDS) + 0.1 * model.never.weight.pow(2).sum() * (0.5 + mesh.rank)).backward()
    part, gradient = (one.detach().as_subclass(torch.Tensor) for one in (model.never.weight, model.never.weight.grad))
    assert torch.allclose(gradient, (0.5 + mesh.rank) * 0.2 * part)
