"""Models and hooks that remember between forwards keep micro-batches in order, on any number of stages."""

import itertools
import random

import numpy as np
import pytest
import torch
from beside_one_process import both, data
from pipeline_networks import WIDTH, Chain
from torch import nn

from ranks import on_ranks
from tulle.errors import TulleError


class Features(nn.Module):
    """Hooks that remember in a dictionary of their own."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        features = {}
        for n, layer in enumerate(self.layers):
            layer.register_forward_hook(lambda _, __, out, n=n: features.__setitem__(n, out))
        self.get = lambda n: features[n]

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x + self.get(0) * self.get(2)


@on_ranks(3)
def test_hooks_that_remember_outside_of_the_model_keep_micro_batches_in_order():
    worst, _, _ = both(Features, {f"layers.{n}": min(n, 2) for n in range(4)})
    assert worst < 1e-12


class Counter(Chain):
    def __init__(self):
        super().__init__(4)
        self.calls = 0

    def forward(self, x):
        for layer in self.layers:
            self.calls = (self.calls + 1) % 8
            if self.calls % 5 != 2:
                x = layer(x).tanh()
        return x


class Private(Chain):
    def __init__(self):
        super().__init__(4)
        self.rng = np.random.default_rng(0)
        self.other = random.Random(1)
        self.third = torch.Generator().manual_seed(3)

    def forward(self, x):
        for layer in self.layers:
            if self.rng.random() + self.other.random() + torch.rand(1, generator=self.third).item() > 0.8:
                x = layer(x).tanh()
        return x


class Iterates(Chain):
    def __init__(self):
        super().__init__(4)
        self.turn = itertools.cycle([1, 1, 0, 1, 0])

    def forward(self, x):
        for layer in self.layers:
            if next(self.turn):
                x = layer(x).tanh()
        return x


@on_ranks(3)
@pytest.mark.parametrize("kind", [Counter, Private, Iterates])
@pytest.mark.parametrize("by_profile", [False, True])
def test_models_that_decide_by_a_state_of_their_own_equal_one_process(kind, by_profile):
    worst, _, _ = both(kind, {f"layers.{n}": min(n, 2) for n in range(4)}, by_profile=by_profile, micro_batches=8)
    assert worst < 1e-12


class Reassigned(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.seen = []

    def forward(self, x):
        x = self.first(x)
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        self.seen.append(len(x))
        return self.second(x - self.mean) * len(self.seen)


@on_ranks(2)
@pytest.mark.parametrize("by_profile", [False, True])
def test_buffers_that_are_set_anew_and_lists_are_as_before_a_profile(by_profile):
    worst, _, _ = both(Reassigned, {"first": 0, "second": 1}, by_profile=by_profile)
    assert worst < 1e-12


class Registered(nn.Module):
    """Registers its buffer when it is first called."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.first(x)
        if not hasattr(self, "mean"):
            self.register_buffer("mean", x.detach().mean(0))
        return self.second(x - self.mean)


@on_ranks(2)
def test_a_buffer_that_a_forward_registers_is_not_there_after_a_profile():
    worst, _, _ = both(Registered, {}, by_profile=True)
    assert worst < 1e-12


class ReassignedWithin(nn.Module):
    """The buffer is one of a placed module, and is set by the code around it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        x = self.first(x)
        self.second.mean = 0.5 * self.second.mean + 0.5 * x.detach().mean(0)
        return self.second(x - self.second.mean)


@on_ranks(2)
def test_a_buffer_of_a_placed_module_that_is_set_anew_from_outside_is_a_tensor_again():
    worst, model, reference = both(ReassignedWithin, {"first": 0, "second": 1})
    assert worst < 1e-12
    assert type(model.second.mean) is torch.Tensor
    torch.testing.assert_close(model.second.mean, reference.second.mean, rtol=1e-12, atol=1e-12)
    for one in (model, reference):
        one.second.mean = torch.ones_like(one.second.mean)
    assert model(data()).sum().item() == pytest.approx(reference(data()).sum().item(), rel=1e-12)
    torch.testing.assert_close(model.second.mean, reference.second.mean, rtol=1e-12, atol=1e-12)


class Cache:
    """Keeps what layers have made of earlier chunks, in no dictionary that a layer is given."""

    def __init__(self):
        self.seen, self.first = {}, {}

    def with_earlier(self, n, x):
        self.seen[n] = torch.cat([self.seen[n], x]) if n in self.seen else x.sin()
        return self.seen[n]


class Cached(nn.Module):
    """Adds what it made of earlier chunks, past which it receives others, and gives again what it gave first."""

    kind = Cache

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(CachedLayer(n) for n in range(4))

    def forward(self, x):
        cache, total = self.kind(), 0.0
        for chunk in x.split(1):
            for layer in self.layers:
                chunk, kept = layer(chunk, cache)
                total = total + kept.sum()
        return chunk * total


class CachedLayer(nn.Linear):
    def __init__(self, n):
        super().__init__(WIDTH, WIDTH)
        self.n, self.state = n, None

    def forward(self, x, cache):
        y = super().forward(x).tanh()
        self.state = y if len(cache.with_earlier(self.n, y)) == 1 else self.state * y
        return y + cache.seen[self.n].mean(0) * self.state, cache.first.setdefault(self.n, y.exp())


class Written(Cache):
    """Writes in what it keeps."""

    def with_earlier(self, n, x):
        self.seen.setdefault(n, x.sin())[0, 0] = 1.0
        return self.seen[n]


class CachedInPlace(Cached):
    kind = Written


@pytest.mark.parametrize("stages", [2, 4])
@on_ranks(2)
def test_gradients_go_back_through_what_modules_keep_past_their_arguments(stages):
    worst, _, _ = both(Cached, {f"layers.{n}": n * stages // 4 for n in range(4)}, steps=2)
    assert worst < 1e-12


@on_ranks(2)
def test_writing_in_what_an_earlier_call_has_kept_is_refused():
    with pytest.raises(TulleError, match=r"writes in a tensor of shape \[1, .* that an earlier call left"):
        both(CachedInPlace, {f"layers.{n}": n for n in range(4)}, steps=1)
