"""Functions between two layers that look at more than a feature, or hand it on, leave the layers apart."""

import pytest
import torch
from split_training import check_exact, numbers, split, square
from torch import nn

from ranks import on_ranks

WIDTH = 8


def linear():
    return nn.Linear(WIDTH, WIDTH)


torch.manual_seed(7)
GLOBAL, KEPT = linear().double(), None


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.third = linear(), linear(), linear()

    def hidden(self, x):
        return torch.relu(self.up(x))


class GlobalLayer(Layers):
    """One that is no layer of the model."""

    def forward(self, x):
        return GLOBAL(self.hidden(x)) + x


def each(hidden):
    for number in range(2):
        yield hidden.softmax(-1) * number


class Generated(Layers):
    def forward(self, x):
        hidden = self.hidden(x)
        return self.down(hidden) + self.third(sum(each(hidden)))


def keep(hidden):
    global KEPT
    KEPT = hidden
    return hidden


class Kept(Layers):
    """As a variable of a Python module."""

    def forward(self, x):
        return self.down(keep(self.hidden(x))) + KEPT.softmax(-1)


def named(x, **others):
    return x * 2 + others["of"].mean(-1, keepdim=True)


class ByName(Layers):
    def forward(self, x):
        hidden = self.hidden(x)
        return self.down(named(hidden, of=hidden))


class ByNameToAMethod(Layers):
    def named(self, x, **others):
        return named(x, **others)

    def forward(self, x):
        hidden = self.hidden(x)
        return self.down(self.named(x=hidden, of=hidden))


def add_to(hidden, found=[]):  # noqa: B006 - what misleads
    found.append(hidden)
    return hidden * 2


class ToADefault(Layers):
    def forward(self, x):
        hidden = add_to(self.hidden(x))
        return self.down(hidden) + add_to.__defaults__[0].pop().softmax(-1)


def within(hidden):
    def softened(x):
        return x.softmax(-1)

    return softened(hidden) + hidden


def sometimes(hidden):
    if hidden.sum() > 0:
        return hidden
    return hidden.softmax(-1)


def counted(hidden):
    return hidden * hidden.shape[-1]


class ByAFunction(Layers):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.down(self.function(self.hidden(x)))


def store(module, hidden):
    module.memory = hidden
    return hidden


class Stored(Layers):
    def forward(self, x):
        return self.down(store(self, self.hidden(x))) + self.memory.softmax(-1)


class Softens(nn.Module):
    def forward(self, hidden):
        return hidden.softmax(-1)


class Remembers(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, hidden):
        self.mean.mul_(0.9).add_(hidden.detach().mean((0, 1)), alpha=0.1)
        return hidden * 2


class ByAModule(ByAFunction):
    """Which has no parameters."""


KINDS = {
    **{one.__name__: one for one in (GlobalLayer, Generated, Kept, ByName, ByNameToAMethod, ToADefault, Stored)},
    **{one.__name__: lambda one=one: ByAFunction(one) for one in (within, sometimes, counted)},
    **{one.__name__: lambda one=one: ByAModule(one()) for one in (Softens, Remembers)},
}


@on_ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_layers_stay_apart_where_a_function_does_more(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(WIDTH), KINDS[kind]()).double()
    check_exact(model, lambda one, step: square(one(numbers(2, 5, WIDTH, seed=step))))
    assert split(model) == ([], [])
