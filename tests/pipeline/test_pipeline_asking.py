"""What a module asks for of an object that it is given, while ranks know more of it than others, or less."""

import time
from types import SimpleNamespace

import pytest
import torch
from beside_one_process import data, loss_of
from pipeline_networks import WIDTH, Chain, make, worst_gradient
from torch import nn

import tulle
from ranks import on_ranks
from tulle import pipeline


class Keeps(nn.Linear):
    """Leaves its keys for a later layer, as Gemma 4 does, and is slow, so that the other stages know more."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)

    def forward(self, x, shared):
        time.sleep(0.05)
        shared.keys = super().forward(x).tanh()
        return shared.keys.cos(), shared.keys.sin()


class Reads(nn.Linear):
    def __init__(self):
        super().__init__(WIDTH, WIDTH)

    def forward(self, x, bias, shared):
        return super().forward(x) * shared.keys + bias


class Shares(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.keeps, self.reads, self.last = (
            nn.Linear(WIDTH, WIDTH),
            Keeps(),
            Reads(),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, x):
        shared, first = SimpleNamespace(), self.first(x)
        y, bias = self.keeps(x, shared)
        return self.last(self.reads(first * y, bias, shared))


@on_ranks(3)
def test_what_a_module_asks_for_travels_in_one_order_whoever_knows_of_it_before():
    model, reference = make(Shares), make(Shares)
    pipeline.place(model, tulle.init(pipe=-1, timeout=8)["pipe"], {"first": 1, "keeps": 0, "reads": 1, "last": 2})
    step = pipeline.step(micro_batches=4)(loss_of)
    for rows in (8, 8, 12, 16):  # of new lengths micro-batches pass each other before all ranks know the same
        torch.testing.assert_close(
            step(model, data(rows)).stack(), step(reference, data(rows)).stack(), rtol=1e-12, atol=0
        )
        assert worst_gradient(model, reference) < 1e-12


@on_ranks(2)
@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
def test_numbers_that_torch_asks_for_past_its_modes_are_those_of_the_owner():
    model, reference = make(Chain), make(Chain)
    pipeline.place(model, tulle.init(pipe=-1, timeout=8)["pipe"], {"layers.0": 0, "layers.1": 1})
    y, expected = model(data()), reference(data())
    torch.testing.assert_close(torch.tensor([y.mean(), y.sum()]), torch.tensor([expected.mean(), expected.sum()]))
    assert float(y.mean()) == pytest.approx(float(expected.mean()), rel=1e-12)
    assert torch.tensor([(y > 0).any(), (y > 9).all()]).tolist() == [True, False]
    assert torch.tensor([y.argmax(), 1]).tolist() == [expected.argmax(), 1]
