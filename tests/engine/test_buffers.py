"""Buffers that forward writes follow rank 0; others do not travel."""

import copy

import torch
from plain_training import dummy
from torch import Tensor, nn

import tulle
from ranks import on_ranks
from tulle.comm import traffic


class Normed(nn.Module):
    """Batch norm, whose statistics differ by rank, beside a buffer that never changes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("positions", torch.arange(10_000.0))

    def forward(self, x: Tensor) -> Tensor:
        """Mean square of the normalized batch."""
        return (self.norm(x) * self.norm.weight).pow(2).mean()


@on_ranks(2)
def test_buffers_that_forward_writes_follow_rank_0_and_others_do_not_travel():
    mesh = tulle.init(data=-1)
    model = Normed()
    model, _ = tulle.distribute(model, dummy(model), mesh)
    for step in range(3):
        torch.manual_seed(10 * step + mesh.rank)
        traffic.take_labels()
        model(torch.randn(5, 3)).backward()
        sent = traffic.take_labels()["buffers"].bytes_sent if mesh.rank == 0 else 0
        assert sent < 100
    theirs = model.norm.running_mean.clone()
    torch.distributed.broadcast(theirs, src=0)
    assert torch.equal(model.norm.running_mean, theirs)
    assert model.norm.num_batches_tracked.item() == 3


class Writes(nn.Module):
    """Writes a buffer past its version counter, and puts another in the place of a second one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.register_buffer("codes", torch.zeros(4))
        self.register_buffer("mean", torch.zeros(2))
        self.codes: Tensor
        self.mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Mean of a batch `[samples, 2]`."""
        self.codes.data += x.detach().mean()
        self.mean = self.mean * 0.9 + x.detach().mean(0) * 0.1
        return self.layer(x).mean()


def assert_buffers_are_those_of_rank_0(model):
    for buffer in model.buffers():
        first = buffer.clone()
        torch.distributed.broadcast(first, src=0)
        assert torch.equal(buffer, first)


@on_ranks(2)
def test_buffers_written_in_any_way_follow_rank_0():
    mesh = tulle.init(data=-1)
    model = Writes()
    model, _ = tulle.distribute(model, dummy(model), mesh)
    for step in range(4):
        for _ in range(2):  # two forwards a step: a buffer that is replaced twice may come to lie where it was
            model(torch.full((3, 2), 1.0 + step + 10 * mesh.rank))
        model(torch.full((3, 2), 1.0 + mesh.rank)).backward()
        assert_buffers_are_those_of_rank_0(model)


@on_ranks(2)
def test_statistics_of_many_norms_travel_in_one_message():
    mesh = tulle.init(data=-1)
    model = nn.Sequential(*(nn.BatchNorm1d(4) for _ in range(5)))
    model, _ = tulle.distribute(model, dummy(model), mesh)
    for step in range(2):
        traffic.take_labels()
        model(torch.randn(5, 4) + step + mesh.rank).pow(2).mean().backward()
    assert traffic.take_labels()["buffers"].messages == (1 if mesh.rank == 0 else 0)
    assert_buffers_are_those_of_rank_0(model)


@on_ranks(2)
def test_statistics_that_follow_rank_0_leave_a_graph_as_it_is_for_another_backward():
    mesh = tulle.init(data=-1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)).double()
    reference = copy.deepcopy(model)
    model, _ = tulle.distribute(model, dummy(model), mesh)
    batches = [torch.randn(5, 3, dtype=torch.float64) for _ in range(mesh.size)]
    out = model(batches[mesh.rank])
    out[:, 0].mean().backward(retain_graph=True)
    out[:, 1].pow(2).mean().backward()
    for batch in batches:
        out = reference(batch)
        ((out[:, 0].mean() + out[:, 1].pow(2).mean()) / mesh.size).backward()
    for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(parameter.grad, expected.grad, atol=1e-12)
    assert_buffers_are_those_of_rank_0(model)
