"""Optimizers of a user's own step models that are split."""

from unittest.mock import patch

import pytest
import torch
from axes_models import worst_difference
from torch import nn

import tulle
from ranks import on_ranks
from tulle import Memory, Plan
from tulle.distribute import steppers


class Counts(torch.optim.SGD):
    """Keeps what is of no parameter by a name, as torch lets it."""

    def step(self, closure=None):
        self.state["steps"] = self.state.get("steps", 0) + 1
        return super().step(closure)


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(30, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 30)).double()


def train(model, optimizer, rank=0, size=1):
    for step in range(3):
        batch = torch.randint(30, (8, 4), generator=torch.Generator().manual_seed(step)).chunk(size)[rank]
        nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(2)
def test_one_that_is_made_later_and_not_known_is_doubted_once():
    mesh, model = tulle.init(data=-1), make()
    tulle.distribute(model, Counts(model.parameters(), lr=0.1), mesh, plan="rows")
    with patch.object(steppers.logger, "info") as said:
        train(model, Counts(model.parameters(), lr=0.1), mesh.rank, mesh.size)
    assert [call.args[1].split()[0] for call in said.call_args_list] == ["Counts"]


@on_ranks(2)
@pytest.mark.parametrize("is_made_later", [False, True])
def test_they_may_keep_what_is_of_no_parameter(is_made_later):
    mesh, model, reference = tulle.init(data=-1), make(), make()
    theirs, optimizer = (Counts(one.parameters(), lr=0.1) for one in (reference, model))
    tulle.distribute(model, optimizer, mesh, plan="rows")
    optimizer = Counts(model.parameters(), lr=0.1) if is_made_later else optimizer
    train(reference, theirs)
    train(model, optimizer, mesh.rank, mesh.size)
    assert optimizer.state["steps"] == theirs.state["steps"] == 3
    assert worst_difference(tulle.full_state_dict(model, everywhere=True), reference.state_dict()) < 1e-12


@on_ranks(2)
@pytest.mark.parametrize("memory", [Memory(), Memory(shard_optimizer=True), Memory(full_shard=True)])
def test_a_set_of_parameters_has_another_order_on_each_rank(memory, tmp_path):
    # FT-Transformer's own make_parameter_groups gives sets, and PyTorch Geometric's example of TGN is trained by one.
    mesh, model, reference = tulle.init(data=-1), make(), make()
    theirs = torch.optim.AdamW(reference.parameters(), lr=0.1)
    mine = [*model.named_parameters()][:: (1, -1)[mesh.rank]]
    optimizer = torch.optim.AdamW(mine, lr=0.1)
    tulle.distribute(model, optimizer, mesh, plan=Plan({"data": mesh.size}, memory=memory))
    (group,) = optimizer.param_groups
    assert group["param_names"] == [name for name, _ in model.named_parameters()]
    assert [*map(id, group["params"])] == [*map(id, model.parameters())]
    train(reference, theirs)
    train(model, optimizer, mesh.rank, mesh.size)
    assert worst_difference(tulle.full_state_dict(model, everywhere=True), reference.state_dict()) < 1e-12
    tulle.save(tmp_path / "checkpoint", model, optimizer, step=3)
    other = make()
    resumed = torch.optim.AdamW(other.parameters(), lr=0.1)
    tulle.load(tmp_path / "checkpoint", other, resumed)
    train(other, resumed)
    train(reference, theirs)
    assert worst_difference(other.state_dict(), reference.state_dict()) < 1e-12
