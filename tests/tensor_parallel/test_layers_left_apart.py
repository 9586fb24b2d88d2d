"""Layers that look as if they followed each other stay apart where something looks at more than a feature."""

import pytest
import torch
from split_training import check_exact, numbers, split, square
from torch import nn
from torch.nn import functional

from ranks import on_ranks
from tulle import tensor_parallel

WIDTH = 8


def linear():
    return nn.Linear(WIDTH, WIDTH)


def loss(model, step):
    return square(model(numbers(2, 5, WIDTH, seed=step)))


class Spoiled(nn.Module):
    """Two layers that look as if they followed each other."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.other = linear(), linear(), linear()
        self.scale = nn.Parameter(torch.full((WIDTH,), 2.0))


class Normed(Spoiled):
    def forward(self, x):
        return self.down(functional.normalize(self.up(x), dim=-1))


class Scaled(Spoiled):
    def forward(self, x):
        return self.down(self.up(x) * self.scale)


class Softened(Spoiled):
    def forward(self, x):
        return self.down(self.up(x).softmax(-1))


class SeenTwice(Spoiled):
    def forward(self, x):
        hidden = self.up(x)
        return self.down(hidden) + hidden


class CalledTwice(Spoiled):
    def forward(self, x):
        return self.down(self.up(self.up(x)))


class InALoop(Spoiled):
    def forward(self, x):
        found = []
        for _ in range(2):
            found.append(self.up(x))
        return self.down(sum(found))


class Kept(Spoiled):
    def forward(self, x):
        hidden = self.up(x)
        self.seen = hidden
        return self.down(hidden) + self.seen.sum()


class ByAFunction(Spoiled):
    def forward(self, x):
        return self.down(run(self, x))


def run(module, x):
    return module.up(x).cumsum(-1)


class Residual(Spoiled):
    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)) * torch.tanh(self.other(x)))


class Helper:
    def __init__(self, layer):
        self.layer = layer

    def run(self, x):
        return self.layer(x)


class ByAnObject(Spoiled):
    def __init__(self):
        super().__init__()
        self.helper = Helper(self.other)

    def forward(self, x):
        x = self.helper.run(x)
        return self.down(torch.tanh(self.up(x)))


class BySuper(Residual):
    """What comes of its parent's forward is no argument: it has parameters in it."""

    def __init__(self):
        super().__init__()
        self.wide, self.narrow = linear(), linear()

    def forward(self, x):
        x = super().forward(x)
        return self.narrow(torch.tanh(self.wide(x)))


class PastForward(Spoiled):
    """What is around it calls a method that forward does not come to."""

    def forward(self, x):
        return self.down(self.up(x))

    def features(self, x):
        return self.up(x)


class Around(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        features = getattr(self.inner, "features", None)
        return self.inner(x) + (0 if features is None else features(x).sum())


class CallsPast(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(linear(), nn.ReLU(), linear())

    def forward(self, x):
        return self.inner(x) + self.inner[0](x)


class Rolled(Spoiled):
    def forward(self, x):
        return self.down(self.up(x).roll(1, -1))


class InPlace(Spoiled):
    """Who gave x sees it changed; it is split, but x enters each layer by itself."""

    def forward(self, x):
        x *= 2
        return self.down(torch.relu(self.up(x)))


@on_ranks(2)
@pytest.mark.parametrize(
    "kind",
    [
        Normed,
        Scaled,
        Softened,
        SeenTwice,
        CalledTwice,
        InALoop,
        Kept,
        ByAFunction,
        PastForward,
        CallsPast,
        Rolled,
        BySuper,
    ],
)
def test_layers_stay_apart_where_more_than_a_feature_is_looked_at(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(WIDTH), Around(kind())).double()
    check_exact(model, loss)
    assert split(model) == ([], [])
    assert len(tensor_parallel.placements(model)) >= 4


@on_ranks(2)
@pytest.mark.parametrize("kind", [InPlace, Residual, ByAnObject])
def test_what_is_used_otherwise_too_enters_each_layer_by_itself(kind):
    torch.manual_seed(0)
    model = nn.Sequential(linear(), nn.LayerNorm(WIDTH), kind()).double()
    check_exact(model, loss)
    assert len(split(model)[1]) == 1


@on_ranks(2)
def test_hooks_see_whole_features():
    torch.manual_seed(0)
    model = Residual().double()
    seen = []
    model.up.register_forward_hook(lambda *of: seen.append(of[2].shape[-1]))
    check_exact(model, loss)
    assert {*seen} == {WIDTH}
    assert split(model) == ([], [])


@on_ranks(2)
def test_a_head_of_few_features_that_scores_many_words_gathers_them():
    torch.manual_seed(0)
    head = nn.Sequential(linear(), nn.GELU(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH))
    model = nn.Sequential(nn.LayerNorm(WIDTH), head).double()
    check_exact(model, loss)
    assert split(model) == ([], [])  # their sum would be twice the numbers
    assert {"1.0.weight", "1.3.weight"} <= {*tensor_parallel.placements(model)}
