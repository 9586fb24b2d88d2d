"""Ranks that call other modules while parameters are shared out are told so, on all ranks, by the modules' names."""

import pytest
import torch
from torch import nn

import tulle
from ranks import on_ranks
from tulle.errors import ModelError
from tulle.memory import Shard
from tulle.memory.unit import Unit

WIDTH = 6
FULL = tulle.Memory(full_shard=True)


class Experts(nn.Module):
    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, w), nn.Linear(w, WIDTH)) for w in widths])

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        return self.experts[expert](x).pow(2).mean()


def shared_out(widths: list[int]) -> tuple[nn.Module, torch.optim.Optimizer, tulle.Mesh]:
    mesh = tulle.init(data=-1, timeout=8)
    model = Experts(widths)
    optimizer = torch.optim.AdamW(model.parameters())
    tulle.distribute(model, optimizer, mesh, plan=tulle.Plan({"data": 2}, memory=FULL))
    return model, optimizer, mesh


@on_ranks(2)
@pytest.mark.parametrize("widths", [[8, 8], [8, 12]], ids=["of one size", "of two sizes"])
def test_in_the_first_steps_both_modules_are_named(widths):
    model, _, mesh = shared_out(widths)
    theirs, ours = 1 - mesh.rank, mesh.rank
    text = rf"parameters of 'experts\.{theirs}.*' on rank {theirs}, parameters of 'experts\.{ours}.*' on rank {ours}"
    with pytest.raises(ModelError, match=text):
        model(torch.ones(2, WIDTH), expert=mesh.rank)


@on_ranks(2)
def test_later_they_are_not_mixed_where_they_are_of_one_size():
    model, optimizer, mesh = shared_out([8, 8])
    for step in range(4):
        model(torch.ones(2, WIDTH), expert=step % 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    with pytest.raises(ModelError, match=rf"'experts\.\d.*' on rank {mesh.rank}, another on rank {1 - mesh.rank}"):
        model(torch.ones(2, WIDTH), expert=mesh.rank)


@on_ranks(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_message_of_another_unit_is_told_by_its_mark(dtype):
    axis = tulle.init(data=-1, timeout=8)["data"]
    whole = torch.arange(float(4 * axis.size), dtype=dtype).view(-1, 4)
    shard = Shard.of(whole, axis)
    assert shard is not None
    part = nn.Parameter(shard.part(whole))
    unit = Unit("layers.0", axis, [shard], [("", "weight", 0)])
    assert torch.equal(unit.gather(unit.pack([part]))[0], whole)
    (gradient,) = unit.reduce([whole.clone()], [part])
    assert gradient is not None
    assert torch.equal(gradient, part)
    other = Unit("layers.1" if axis.rank == 2 else "layers.0", axis, [shard], [("", "weight", 0)])
    for exchange in (lambda: other.gather(other.pack([part])), lambda: other.reduce([whole], [part])):
        with pytest.raises(ModelError, match=f"'{other.name}' on rank {axis.rank}, another on rank"):
            exchange()
