"""Functions of autograd between the modules of a pipeline, and within them."""

from inspect import getattr_static

import torch
import torch.nn.functional as F
from beside_one_process import both
from pipeline_networks import WIDTH
from torch import nn
from torch.utils.checkpoint import checkpoint

from ranks import on_ranks
from tulle.pipeline import recompute
from tulle.pipeline.place import placement_of


class Signs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        return weight.sign() * weight.abs().mean()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


signs = Signs.apply


class QuantizedBetween(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.second(signs(self.first(x).tanh()) + x)


@on_ranks(2)
def test_a_function_that_was_given_a_name_before_runs_between_modules():
    worst, _, _ = both(QuantizedBetween, {"first": 0, "second": 1}, steps=2)
    assert worst < 1e-12
    assert Signs.apply.__func__.__module__ == "torch.autograd.function"  # else names taken before escape us


class Quantized(nn.Linear):
    def inner(self, x):
        return F.linear(x, Signs.apply(self.weight), self.bias).tanh()

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


class QuantizedTwo(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Quantized(WIDTH, WIDTH), Quantized(WIDTH, WIDTH)

    def forward(self, x):
        return self.second(self.first(x))


@on_ranks(2)
def test_a_function_of_a_parameter_that_a_module_recomputes_stays_in_it():
    worst, _, _ = both(QuantizedTwo, {"first": 0, "second": 1}, steps=2)
    assert worst < 1e-12


def test_functions_apply_may_be_a_class_method_of_c(monkeypatch):
    monkeypatch.setattr(recompute, "_apply", getattr_static(dict, "fromkeys"))  # of the type that torch 2.15 has
    assert recompute._application.__wrapped__(dict)(["a"]) == {"a": None}


class RunsAgain(torch.autograd.Function):
    """Runs a function again in backward, as guided-diffusion's checkpoint does."""

    @staticmethod
    def forward(ctx, run, x, *parameters):
        ctx.run, ctx.given = run, (x, *parameters)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx, gradient):
        given = [ctx.given[0].detach().requires_grad_(), *ctx.given[1:]]
        with torch.enable_grad():
            result = ctx.run(given[0])
        return (None, *torch.autograd.grad(result, given, gradient))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return RunsAgain.apply(self.run, x, *self.parameters())

    def run(self, x):
        return x + self.out(self.inner(x).tanh())


class InLists(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleDict({"low": nn.ModuleList(Block() for _ in range(2)), "high": nn.ModuleList([Block()])})
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        for block in (*self.blocks["low"], *self.blocks["high"]):
            x = block(x)
        return self.out(x)


@on_ranks(2)
def test_lists_of_modules_are_dealt_as_the_modules_in_them():
    """A function of a module of a list ran between modules, and one rank waited for the other for ever."""
    worst, model, _ = both(InLists, {"blocks.low": 0, "blocks.high": 1, "out": 1}, steps=2)
    assert worst < 1e-12
    assert placement_of(model).stages == {"blocks.low.0": 0, "blocks.low.1": 0, "blocks.high.0": 1, "out": 1}


class WritesIn(nn.Module):
    """As DenseNet's, recomputed around modules of which one writes in what it is given."""

    def __init__(self):
        super().__init__()
        self.norm, self.relu, self.layer = nn.LayerNorm(WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)

    def inner(self, x):
        return self.layer(self.relu(self.norm(x)))

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False) + x


@on_ranks(2)
def test_a_module_that_writes_in_what_it_is_given_is_recomputed_with_what_is_around_it():
    worst, _, _ = both(WritesIn, {"norm": 0, "relu": 0, "layer": 1}, steps=2)
    assert worst < 1e-12
