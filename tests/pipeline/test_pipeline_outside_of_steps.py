"""Calls of a placed model outside of steps: gradients through several of them, and no graph of those that are over."""

import copy
import gc
from weakref import WeakSet

import pytest
import torch
from beside_one_process import loss_of
from pipeline_networks import WIDTH, Chain, make
from torch import Tensor, nn

import tulle
from ranks import on_ranks
from tulle import pipeline
from tulle.errors import TulleError

STAGES = {f"layers.{number}": number % 2 for number in range(6)}


def placed() -> nn.Module:
    return pipeline.place(make(Chain), tulle.init(pipe=-1, timeout=8)["pipe"], STAGES)


def data() -> Tensor:
    return torch.linspace(-1, 1, 2 * WIDTH, dtype=torch.float64).view(2, WIDTH)


class Saved:
    """What autograd saved, as long as its graph is there."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@on_ranks(2)
@pytest.mark.parametrize("is_training", [True, False])
def test_calls_of_which_nothing_is_left_leave_no_graph(is_training):
    model, saved, counts = placed().train(is_training), WeakSet(), []

    def pack(tensor: Tensor) -> Saved:
        saved.add(one := Saved(tensor.detach()))
        return one

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one.tensor):
        for _ in range(6):
            y = model(data())
            assert torch.isfinite((y * 2).pow(2).sum()).item()
            del y
            gc.collect()
            counts.append(len(saved))
    assert 0 < counts[-1] == counts[1]


def through_several(model: nn.Module) -> None:
    first, other = model(data()), model(data() * 2)
    model(data() * 3)  # of which nothing is left
    second = model(first) * 0.5
    total = first.sum() + second.sum()
    model(data() * 4)
    features = model.layers[0](data())
    for _ in range(2):
        total += model.layers[1](features).sum() + model(other).sum()
    second.mul_(2)
    (total + second.pow(3).sum()).backward()


def one_after_the_other(model: nn.Module) -> None:
    first, second, made = model(data()).sum(), model(data() * 2).sum(), model(data() * 3)
    second.backward()
    model(made).pow(2).sum().backward()  # back to a call before the last backward
    third = model(data() * 4).pow(2).sum()
    first.backward()
    third.backward()


@on_ranks(2)
@pytest.mark.parametrize("train", [through_several, one_after_the_other])
def test_gradients_go_back_through_several_calls(train):
    alone, model = make(Chain), placed()
    train(alone)
    for _ in range(2):
        train(model)
    wanted = dict(alone.named_parameters())
    mine = {name: one for name, one in model.named_parameters() if not one.is_meta}
    assert 0 < len(mine) < len(wanted)
    for name, parameter in mine.items():
        torch.testing.assert_close(parameter.grad, 2 * wanted[name].grad, rtol=1e-12, atol=0)


class Statistics(nn.Module):
    """Keeps averages of what it computes between its modules: in place, anew, and as `+=` puts it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        for name in ("early", "late", "average", "total"):
            self.register_buffer(name, torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x - self.average)
        result = self.second(hidden - self.total)
        with torch.no_grad():
            self.early.mul_(0.9).add_(hidden.mean(0))
            self.late.add_(result.mean(0))
            self.average = 0.9 * self.average + 0.1 * result.mean(0)
            self.total += hidden.mean(0)
        return result


def train(model: nn.Module) -> Tensor:
    loss = model(data()).pow(2).mean()
    loss.backward()
    return loss


@on_ranks(2)
def test_buffers_that_forward_writes_or_replaces_are_those_of_one_process_on_every_rank():
    mesh = tulle.init(pipe=-1, timeout=8)
    alone = make(Statistics)
    within, outside, without_gradients = copy.deepcopy(alone), copy.deepcopy(alone), copy.deepcopy(alone)
    for model in (within, outside, without_gradients):
        pipeline.place(model, mesh["pipe"], {"first": 0, "second": 1})
    for _ in range(2):
        train(alone)
        pipeline.step(micro_batches=1)(train)(within)
        train(outside)
        with torch.no_grad():
            without_gradients(data())
        for model in (within, outside, without_gradients):
            for name, buffer in alone.named_buffers():
                assert type(model.get_buffer(name)) is Tensor
                torch.testing.assert_close(model.get_buffer(name), buffer, rtol=1e-12, atol=0)


@on_ranks(2)
def test_a_model_that_one_rank_has_not_collected_yet_is_nothing_that_ranks_exchange():
    mesh = tulle.init(pipe=-1, timeout=4)
    gone, left = make(Statistics), make(Statistics)
    for model in (gone, left):
        pipeline.place(model, mesh["pipe"], {"first": 0, "second": 1})
    step = pipeline.step(micro_batches=2)(loss_of)
    step(gone, data())
    gc.collect()
    gc.disable()
    try:
        del model, gone
        if mesh.rank == 0:
            gc.collect()
        step(left, data())
        assert isinstance(left(data()).sum().item(), float)
    finally:
        gc.enable()


class Recurrent(nn.Linear):
    """Reads what its last call has left, past its arguments."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen = [super().forward(x).tanh(), *getattr(self, "seen", [])]
        return torch.stack(self.seen).prod(0)


@on_ranks(2)
@pytest.mark.parametrize("stages", [{"0": 0, "1": 1}, {"0": 1, "1": 0}])
def test_a_gradient_that_would_be_lost_in_an_earlier_call_is_refused(stages):
    model = nn.Sequential(Recurrent(WIDTH, WIDTH), Recurrent(WIDTH, WIDTH)).double()
    pipeline.place(model, tulle.init(pipe=-1, timeout=8)["pipe"], stages)
    model(data())
    with pytest.raises(TulleError, match="by a tensor that a module read past its arguments"):
        model(data()).sum().backward()
