"""Random generators of the user's own, between modules: micro-batches draw in their order, on all ranks alike."""

import copy
import random

import numpy as np
import pytest
import torch
from beside_one_process import data
from pipeline_networks import WIDTH, make, worst_gradient
from torch import nn

import tulle
from ranks import on_ranks
from tulle import pipeline

KINDS = {
    "torch": lambda: torch.Generator().manual_seed(5),
    "numpy": lambda: np.random.default_rng(5),
    "numpy's older one": lambda: np.random.RandomState(5),
    "python": lambda: random.Random(5),
}


def draw(generator):
    if isinstance(generator, torch.Generator):
        return torch.rand((), generator=generator, dtype=torch.float64)
    return generator.random() if hasattr(generator, "random") else generator.rand()


class Three(nn.Module):
    """Layers of two stages in turn, with what is drawn between them."""

    generator = None

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x, generator=None):
        generator = generator or self.generator
        for layer in (self.a, self.b, self.c):
            x = layer(x).tanh() * draw(generator)
        return x


def once(model, x, generator=None):
    loss = model(x, generator).pow(2).mean()
    loss.backward()
    return loss


def twice(model, x, generator=None):
    return once(model, x, generator) + once(model, x + 1, generator)


def behind_backward(model, x, generator=None):
    loss = model.c(model.b(model.a(x))).pow(2).mean()
    loss.backward()
    return loss + once(model, x, generator)


def beside(step, kind, *, is_given, micro_batches=4):
    mesh = tulle.init(pipe=-1, timeout=8)
    model = make(Three)
    reference = copy.deepcopy(model)
    pipeline.place(model, mesh["pipe"], {"a": 0, "b": 1, "c": 0})
    step = pipeline.step(micro_batches=micro_batches)(step)
    drawn = KINDS[kind](), KINDS[kind]()
    for one, generator in zip((model, reference), drawn, strict=True):
        one.generator = None if is_given else generator
    for number in range(3):
        losses, expected = (
            step(one, data() * (number + 1), generator if is_given else None).stack().detach()
            for one, generator in zip((model, reference), drawn, strict=True)
        )
        torch.testing.assert_close(losses, expected, rtol=1e-12, atol=0)
        assert worst_gradient(model, reference) < 1e-12
    assert draw(drawn[0]) == draw(drawn[1])


@on_ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_generator_that_a_step_is_given_is_drawn_from_in_order(kind):
    beside(once, kind, is_given=True)


@on_ranks(2)
@pytest.mark.parametrize("is_given", [True, False])
@pytest.mark.parametrize("step", [twice, behind_backward])
def test_what_is_drawn_behind_backward_the_next_micro_batch_goes_on_from(step, is_given):
    beside(step, "numpy", is_given=is_given)


class Draws(nn.Linear):
    def forward(self, x, generator):
        return super().forward(x) * draw(generator)


class Given(Three):
    """Hands its generator to the layers."""

    def __init__(self):
        super().__init__()
        self.a, self.b = Draws(WIDTH, WIDTH), Draws(WIDTH, WIDTH)

    def forward(self, x, generator):
        return self.b(self.a(x, generator), generator) * draw(generator)


@on_ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_do_not_part_by_what_one_draws_in_a_module(kind):
    model = pipeline.place(make(Given), tulle.init(pipe=-1, timeout=8)["pipe"], {"a": 0, "b": 1, "c": 0})
    generator = KINDS[kind]()
    for _ in range(2):
        pipeline.step(micro_batches=2)(once)(model, data(), generator)
    expected = KINDS[kind]()
    for _ in range(4):
        draw(expected)
    assert draw(generator) == draw(expected)


HIDDEN = {}


class Hidden(Three):
    """Draws from a generator that neither the step nor the model has."""

    def forward(self, x, _):
        for layer in (self.a, self.b, self.c):
            x = layer(x).tanh() * torch.rand((), generator=HIDDEN[id(self)], dtype=torch.float64)
        return x


@on_ranks(2)
def test_a_generator_of_torch_s_is_drawn_from_in_order_wherever_it_is():
    mesh = tulle.init(pipe=-1, timeout=8)
    model, reference = make(Hidden), make(Hidden)
    HIDDEN.update({id(one): torch.Generator().manual_seed(5) for one in (model, reference)})
    pipeline.place(model, mesh["pipe"], {"a": 0, "b": 1, "c": 0})
    step = pipeline.step(micro_batches=4)(once)
    for _ in range(3):
        assert torch.allclose(step(model, data(), None).stack(), step(reference, data(), None).stack(), rtol=1e-12)
