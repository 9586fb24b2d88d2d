"""A module that has given one tensor of its own a few times, and then does something else, is still seen to."""

import pytest
import torch
from beside_one_process import both, data, loss_of
from pipeline_networks import WIDTH, make
from torch import nn

import tulle
from ranks import on_ranks
from tulle import pipeline
from tulle.errors import CommunicationError, ModelError

APART = {"a": 0, "b": 1}
LATER = 3
"""The call in which a module does something else: the first has shown what it gives, the second went the short way."""


class Turns(nn.Linear):
    calls = 0
    """Of all of the class: an attribute of its own would be told to all ranks."""

    def forward(self, x):
        type(self).calls += 1
        return super().forward(x) if self.calls % 4 != LATER else self.otherwise(x)


class Net(nn.Module):
    kind = Turns

    def __init__(self):
        super().__init__()
        self.a, self.b = self.kind(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.b(self.a(x * 1.0).tanh())


WAYS = {
    "gives its argument": lambda self, x: x,
    "gives a tuple": lambda self, x: (x.clone(), x.clone()),
    "gives a number": lambda self, x: 1.0,
    "gives another shape": lambda self, x: nn.Linear.forward(self, x)[:1],
    "gives another dtype": lambda self, x: nn.Linear.forward(self, x).float(),
    "gives no gradient": lambda self, x: nn.Linear.forward(self, x).detach(),
}


@on_ranks(2)
@pytest.mark.parametrize("way", WAYS)
def test_what_it_gives_is_refused_where_others_expect_something_else(way):
    mesh = tulle.init(pipe=-1)
    model = make(type("Other", (Net,), {"kind": type("OtherTurns", (Turns,), {"otherwise": WAYS[way]})}))
    pipeline.place(model, mesh["pipe"], APART)
    with pytest.raises((ModelError, CommunicationError), match=r"'a' gave .* where .* was expected|failed with Model"):
        pipeline.step(micro_batches=4)(loss_of)(model, data())


class Doubles(Turns):
    def otherwise(self, x):
        return super(Turns, self).forward(x.mul_(2))


class Doubling(Net):
    kind = Doubles

    def forward(self, x):
        x = self.b(x)
        return self.a(x).tanh() * x


class Sparing(Net):
    """Of which a rank that has sent a copy hears nothing."""

    kind = Doubles

    def forward(self, x):
        x = x * self.b(x)
        return self.b(x).tanh() + self.a(x)


@on_ranks(2)
def test_a_write_in_what_one_rank_alone_has_is_seen():
    worst, _, _ = both(Doubling, {"a": 0, "b": 0})
    assert worst < 1e-12


@on_ranks(2)
def test_a_write_in_what_others_have_too_is_refused():
    mesh = tulle.init(pipe=-1)
    model = make(Sparing)
    pipeline.place(model, mesh["pipe"], APART)
    with pytest.raises(
        (ModelError, CommunicationError), match=r"'a' writes in an argument .* before|failed with Model"
    ):
        pipeline.step(micro_batches=4)(loss_of)(model, data())


class Halves(nn.Module):
    def forward(self, x):
        return x / 2 if self.training else x


def halving(width, out):
    return nn.Sequential(nn.Linear(width, out), Halves())


class Hooked(Net):
    kind = staticmethod(halving)

    def __init__(self):
        super().__init__()
        self.seen, self.handles, self.calls = [], [], 0

    def forward(self, x):
        self.calls += 1
        if self.calls == LATER:
            self.handles.append(self.a[0].register_forward_hook(lambda _, __, given: self.seen.append(given)))
        y = super().forward(x)
        return y + self.seen.pop().sum() if self.seen else y


@on_ranks(2)
def test_a_hook_that_comes_later_within_it_is_noticed():
    mesh = tulle.init(pipe=-1)
    model = make(Hooked)
    pipeline.place(model, mesh["pipe"], APART)
    match = r"made in module 'a' and left by a hook on a module within it|failed with Model|left|other ranks"
    with pytest.raises((ModelError, CommunicationError), match=match):
        pipeline.step(micro_batches=4)(loss_of)(model, data())


class Evaluates(Net):
    kind = staticmethod(halving)

    def forward(self, x):
        x = self.b(x)
        y = self.a(x) + self.a(x)
        self.a.eval()
        y = y + 3 * self.a(x)
        self.a.train()
        with torch.no_grad():
            y = y + self.a(x)
        return y * self.a(x)


@on_ranks(2)
def test_a_module_that_evaluates_for_once_does():
    worst, _, _ = both(Evaluates, APART)
    assert worst < 1e-12
