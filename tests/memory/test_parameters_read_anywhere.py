"""Under full sharding what takes all of a parameter, outside of the modules that it belongs to, has it gathered."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import tulle
from pretended_hosts import pretend_hosts
from rank_process import patches
from ranks import on_ranks
from tulle.errors import ModelError
from tulle.memory import execution_order
from tulle.plan import Memory, Plan


class Policy(nn.Module):
    """As of reinforcement learning: a method besides forward reads parameters, by itself and with other modules'."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(12, 6)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)])
        self.mean, self.log_std = nn.Linear(6, 4), nn.Parameter(torch.randn(4))
        self.kept = [self.blocks[0][0].bias]

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.mean(x * self.kept[0])  # another unit's, which has run

    def evaluate(self, ids):
        means = self(ids) * self.log_std.exp()
        orthogonal = sum((b[0].weight @ b[0].weight.T - torch.eye(6)).pow(2).sum() for b in self.blocks)
        scores = functional.linear(self.mean.weight, self.embed.weight)
        longest = self.embed.weight.norm(dim=1).topk(3).values.sum()
        return means.pow(2).mean() + 0.01 * orthogonal + scores.pow(2).mean() + self.embed.weight[2].sum() + longest


def built():
    torch.manual_seed(0)
    return Policy().double()


def distributed(full_shard=True):
    mesh, model = tulle.init(data=-1), built()
    optimizer = torch.optim.Adam(model.parameters(), 0.01, eps=1e-3)
    plan = Plan(mesh.shape, memory=Memory(full_shard=full_shard))
    return (*tulle.distribute(model, optimizer, mesh, plan=plan), mesh)


def train(model, optimizer, average, place=(0, 1)):
    rank, ranks = place
    for step in range(4):
        ids = torch.randint(12, (12, 3), generator=torch.Generator().manual_seed(step))
        model.evaluate(ids.chunk(ranks)[rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                mean.mul_(0.9).add_(parameter, alpha=0.1)


def close(one, other):
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def compare(full_shard):
    torch.set_default_dtype(torch.float64)
    reference, average, expected = built(), built(), built()
    train(reference, torch.optim.Adam(reference.parameters(), 0.01, eps=1e-3), expected)
    model, optimizer, mesh = distributed(full_shard)
    train(model, optimizer, average, (mesh.rank, mesh.size))
    close(dict(model.state_dict()), dict(reference.state_dict()))
    close(average.state_dict(), expected.state_dict())
    return model, reference


@on_ranks(2, 3)
def test_they_train_and_are_averaged_as_in_one_process():
    model, reference = compare(True)
    weight, whole = model.embed.weight, reference.embed.weight
    close(weight[3], whole[3])
    assert weight[3].tolist() == pytest.approx(whole[3].tolist(), rel=1e-12)
    close((2 * weight).T, 2 * whole.T)
    close(weight.data.median(), whole.data.median())
    close(torch.linalg.svdvals(weight), torch.linalg.svdvals(whole))
    assert weight.norm(dim=1).detach().numpy() == pytest.approx(whole.norm(dim=1).detach().numpy(), rel=1e-12)
    assert (weight > 0).any(dim=1).tolist() == (whole > 0).any(dim=1).tolist()
    assert weight.shape == whole.shape != weight.to_local().shape


@on_ranks(4)
def test_hosts_are_replicas_of_them():
    pretend_hosts(2)
    compare("host")


@on_ranks(2)
def test_a_rank_that_reads_alone_is_told_by_name():
    patches.setattr(execution_order, "LONG_S", 0.1)
    model, _, mesh = distributed()
    with pytest.raises(ModelError, match=r"'embed\.weight' for what takes all of it on rank 0"):
        model(torch.ones(2, 3, dtype=torch.long)) if mesh.rank else model.embed.weight[0]


@on_ranks(2)
def test_a_copy_reads_its_own():
    model, _, _ = distributed()
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.embed.weight.mul_(2)
    close(copied.embed.weight[1], 2 * model.embed.weight[1])
