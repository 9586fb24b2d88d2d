"""Ranks that call other modules while parameters are shared out are told so, on all ranks, by the modules' names."""

import time
from unittest import mock

import pytest
import torch
from torch import nn

import tulle
from rank_process import patches
from ranks import on_ranks
from tulle.comm import traffic
from tulle.errors import CommunicationError, ModelError
from tulle.memory import Shard, execution_order
from tulle.memory.unit import Unit

WIDTH = 6
FULL = tulle.Memory(full_shard=True)


class Experts(nn.Module):
    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, w), nn.Linear(w, WIDTH)) for w in widths])

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        return self.experts[expert](x).pow(2).mean()


def shared_out(
    widths: list[int], mesh: tulle.Mesh | None = None
) -> tuple[nn.Module, torch.optim.Optimizer, tulle.Mesh]:
    mesh = mesh or tulle.init(data=-1, timeout=8)
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
def test_what_a_forward_gathers_is_of_the_step_that_it_begins():
    model, optimizer, _ = shared_out([8, 8])
    steps: list[int] = []  # of which an error would speak
    model.experts[0][0].register_forward_hook(lambda *_: steps.append(traffic.step))
    for _ in range(2):
        model(torch.ones(2, WIDTH), expert=0).backward()
        optimizer.step()
    assert steps == [1, 2]


@on_ranks(2)
def test_a_state_that_one_rank_asks_for_alone_is_told_long_before_the_time_out():
    patches.setattr(execution_order, "LONG_S", 0.1)
    model, optimizer, mesh = shared_out([8, 8])
    for _ in range(3):
        model(torch.ones(2, WIDTH), expert=0).backward()
        optimizer.step()
    assert model.state_dict()["experts.0.0.weight"].shape == (8, WIDTH)
    ours, theirs = r"'experts\.0\.0\.weight' for model\.state_dict\(\)", r"parameters of 'experts\.0.*'"
    one, other = (ours, theirs) if mesh.rank else (theirs, ours)
    begin_s = time.monotonic()
    with pytest.raises(ModelError, match=rf"{one} on rank {1 - mesh.rank}, {other} on rank {mesh.rank}"):
        model(torch.ones(2, WIDTH), expert=0) if mesh.rank else model.state_dict()
    assert time.monotonic() - begin_s < 4


@on_ranks(2)
@pytest.mark.parametrize("steps", [0, 3], ids=["in the first step", "in a later one"])
def test_unlike_numbers_of_micro_batches_are_told(steps):
    patches.setattr(execution_order, "LONG_S", 0.1)
    model, optimizer, mesh = shared_out([8, 8])
    x = torch.ones(2, WIDTH)

    def train(steps: int, micro_batches: int) -> None:
        for _ in range(steps):
            for _ in range(micro_batches):
                model(x, expert=0).backward()
            optimizer.step()

    train(steps, 2)
    first, third = (rf"parameters of 'experts\.0{time}" for time in ("'", "', time 3 since the last step"))
    one, other = (first, third) if mesh.rank else (third, first)
    with pytest.raises(ModelError, match=rf"{other} on rank {1 - mesh.rank}, {one} on"):
        train(2, 2 if mesh.rank else 3)


def epoch(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        model(torch.ones(2, WIDTH), expert=0).backward()
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize("late", [False, True], ids=["in the first step", "in a later one"])
def test_what_one_rank_alone_has_frozen_is_named(late):
    patches.setattr(execution_order, "LONG_S", 0.1)
    model, optimizer, mesh = shared_out([8, 8])
    epoch(model, optimizer, 3 * late)
    model.experts[0][1].bias.requires_grad_(mesh.rank == 0)
    ours, theirs = r"gradients of 'experts\.0' on rank 0", r"gradients of 'experts\.0' without 1\.bias.* on rank 1"
    one, other = (theirs, ours) if mesh.rank == 0 else (ours, theirs)
    with pytest.raises(ModelError, match=rf"{one}, {other}.*freeze the same parameters"):
        epoch(model, optimizer, 1)


@on_ranks(2)
def test_after_an_error_that_a_rank_catches_all_are_told_at_once_with_other_models_too():
    """What the others wait for would end at the time-out only, and what comes later behind it."""
    patches.setattr(execution_order, "LONG_S", 0.1)
    model, optimizer, mesh = shared_out([8, 8])
    epoch(model, optimizer, 3)
    fails = model.experts[0][1].register_forward_pre_hook(lambda *_: [].pop()) if mesh.rank else None
    if fails is not None:
        with pytest.raises(IndexError):
            epoch(model, optimizer, 1)
        fails.remove()
    with pytest.raises(ModelError, match=r"parameters of 'experts\.0.*', time 2 since the last step"):
        epoch(model, optimizer, 1)
    for other in (model, shared_out([8, 8], mesh)[0]):
        begin_s = time.monotonic()
        with pytest.raises(CommunicationError, match=r"cannot be exchanged any more on axis 'data'.* start anew"):
            other(torch.ones(2, WIDTH), expert=0)
        assert time.monotonic() - begin_s < 1
    epoch(*shared_out([8, 8])[:2], 3)  # on a new mesh


class Layers(nn.Module):
    """Some of which may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, width), nn.Linear(width, WIDTH)) for width in (8, 300, 16, 8)
        )

    def forward(self, x: torch.Tensor, left_out: int = -1) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = x if number == left_out else layer(x)
        return x.pow(2).mean()


def loss_of(model: nn.Module, x: torch.Tensor, where: str) -> torch.Tensor:
    """Of another branch: a layer or an expert of another size than is due in forward, or in backward."""
    if where == "backward":
        return model.layers[0](x).pow(2).mean() + 0 * model(x).detach()
    return model(x, left_out=2) if where == "forward" else model(x, expert=0)


@on_ranks(2)
@pytest.mark.parametrize("where", ["forward", "expert", "backward"])
def test_in_later_steps_they_are_named_too_and_nothing_is_announced_until_then(where):
    patches.setattr(execution_order, "LONG_S", 0.1)
    mesh = tulle.init(data=-1, timeout=8)
    model, arguments = (Experts([8, 300]), {"expert": 1}) if where == "expert" else (Layers(), {})
    optimizer = torch.optim.AdamW(model.parameters())
    tulle.distribute(model, optimizer, mesh, plan=tulle.Plan({"data": 2}, memory=FULL))
    x = torch.ones(2, WIDTH)
    for _ in range(4):
        with mock.patch.object(execution_order, "gather_values", wraps=execution_order.gather_values) as announced:
            model(x, **arguments).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert not announced.called
    what = r"(parameters|gradients) of '\w+\.\d.*'(, time 2 since the last step)?"
    text = rf"{what} on rank {1 - mesh.rank}, {what} on rank {mesh.rank}"
    with pytest.raises(ModelError, match=text):
        (loss_of(model, x, where) if mesh.rank else model(x, **arguments)).backward()


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
    gathers, reduces = lambda: other.gather(other.pack([part])), lambda: other.reduce([whole], [part])
    for exchange in (
        [reduces] if part.is_cuda else [gathers, reduces]
    ):  # where to look at what comes would be waited for
        with pytest.raises(ModelError, match=f"'{other.name}' on rank {axis.rank}, another on rank"):
            exchange()
