"""What a forward leaves for the code behind it, which takes it away again: nothing is left when the step is over."""

import time

import torch
from beside_one_process import data, loss_of
from pipeline_networks import WIDTH, make, worst_gradient
from torch import nn

import tulle
from ranks import on_ranks
from tulle import pipeline

BACKWARDS = {"first": 1, "middle": 2, "last": 0}
"""Rank 0 calls all modules, and waits for the last one's argument, before it reads what the first one has left."""


class Leaves(nn.Linear):
    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.penalty = None

    def forward(self, x):
        y = super().forward(x).tanh()
        self.penalty = y.pow(2).mean()
        return y


class Slow(nn.Linear):
    def __init__(self):
        super().__init__(WIDTH, WIDTH)

    def forward(self, x):
        time.sleep(0.03)
        return super().forward(x).tanh()


class TakesAttribute(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = Leaves(), Slow(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.last(self.middle(self.first(x)))
        penalty, self.first.penalty = self.first.penalty, None
        return y + penalty


def check(model, reference, function):
    """Of steps whose batches have other lengths, which micro-batches of a placed model meet at different times."""
    step = pipeline.step(micro_batches=4)(function)
    for rows in (8, 8, 12, 16, 8):
        losses, expected = step(model, data(rows)).stack(), step(reference, data(rows)).stack()
        torch.testing.assert_close(losses, expected, rtol=1e-12, atol=0)
        assert worst_gradient(model, reference) < 1e-12


@on_ranks(3)
def test_what_is_taken_from_an_attribute_is_the_own_micro_batchs():
    model, reference = make(TakesAttribute), make(TakesAttribute)
    pipeline.place(model, tulle.init(pipe=-1, timeout=8)["pipe"], BACKWARDS)
    check(model, reference, loss_of)
