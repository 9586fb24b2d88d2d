"""Calls of a placed model outside of steps: gradients through several of them, and no graph of those that are over."""

import gc
from weakref import WeakSet

import pytest
import torch
from pipeline_networks import WIDTH, Chain, make
from torch import Tensor, nn

import tulle
from ranks import on_ranks
from tulle import pipeline

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


@on_ranks(2)
def test_gradients_go_back_through_several_calls():
    alone, model = make(Chain), placed()
    through_several(alone)
    for _ in range(2):
        through_several(model)
    wanted = dict(alone.named_parameters())
    mine = {name: one for name, one in model.named_parameters() if not one.is_meta}
    assert 0 < len(mine) < len(wanted)
    for name, parameter in mine.items():
        torch.testing.assert_close(parameter.grad, 2 * wanted[name].grad, rtol=1e-12, atol=0)
