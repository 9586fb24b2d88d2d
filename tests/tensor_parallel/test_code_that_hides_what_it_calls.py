"""Parts of layers that are split together stay within what splits them, by whatever way other code comes to them."""

import contextlib
import functools
import weakref
from collections import deque

import pytest
import torch
from split_training import check_exact, numbers, split, square
from torch import nn

from ranks import on_ranks

WIDTH, INNER = 8, 10


def loss(model, step):
    return square(model(numbers(2, 5, WIDTH, seed=step).requires_grad_()))


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)


class InAClosure(Two):
    def forward(self, x):
        def total():
            return hidden.sum()

        hidden = self.up(x)
        return self.down(hidden) * total()


class InALambda(Two):
    def forward(self, x):
        total = lambda: hidden.sum()  # noqa: E731 - what is tested
        hidden = self.up(x)
        return self.down(hidden) * total()


class ByNonlocal(Two):
    def forward(self, x):
        hidden = x

        def soften():
            nonlocal hidden
            hidden = hidden.softmax(-1)

        hidden = self.up(x)
        soften()
        return self.down(hidden)


class InAGenerator(Two):
    def forward(self, x):
        hidden = x
        later = (hidden.sum() * one for one in [1.0])
        hidden = self.up(x)
        return self.down(hidden) * sum(later)


class AsText(Two):
    def forward(self, x):
        hidden = self.up(x)
        return self.down(hidden) * float(f"{hidden.detach().sum():.6f}")


class AsStr(Two):
    def forward(self, x):
        hidden = self.up(x)
        return self.down(hidden) * str(hidden).count(",")


class NamedInText(Two):
    def forward(self, x):
        hidden = self.up(x)
        said = f"{(total := hidden.sum())}"
        return self.down(hidden) * total if said else x


class Evaluated(Two):
    def forward(self, x):
        hidden = self.up(x)
        return self.down(hidden) * eval("hidden.sum()")


class ByLocals(Two):
    def forward(self, x):
        hidden = self.up(x)
        return self.down(hidden) * locals()["hidden"].sum()


class Asked:
    def __get__(self, owner, kind):
        return self if owner is None else owner.up


class ByDescriptor(Two):
    first = Asked()

    def forward(self, x):
        return self.down(torch.relu(self.up(x))) + self.first(x).max()


class ByCachedProperty(Two):
    @functools.cached_property
    def first(self):
        return self.up

    def forward(self, x):
        return self.down(torch.relu(self.up(x))) + self.first(x).max()


class ByReference(Two):
    def __init__(self):
        super().__init__()
        self.first = weakref.ref(self.up)

    def __deepcopy__(self, memo):
        made = type(self)().double()
        made.load_state_dict(self.state_dict())
        return made

    def forward(self, x):
        return self.down(torch.relu(self.up(x))) + self.first()(x).max()


class Inner(Two):
    first = Asked()

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()


class ByGetattr(Outer):
    def forward(self, x):
        return self.inner(x) + getattr(self, "inner").up(x).max()  # noqa: B009 - what is tested


class ByItsDescriptor(Outer):
    def forward(self, x):
        return self.inner(x) + self.inner.first(x).max()


class ByVars(Outer):
    def forward(self, x):
        return self.inner(x) + vars(self.inner)["_modules"]["up"](x).max()


class ByDunder(Outer):
    def forward(self, x):
        return self.inner(x) + self.inner.__getattr__("up")(x).max()


class Matched(Outer):
    def forward(self, x):
        match self.inner:
            case Inner(up=layer):
                return self.inner(x) + layer(x).max()


class InAMapping(Outer):
    def forward(self, x):
        layers = {name: layer for name, layer in self.inner.named_children()}
        return self.inner(x) + layers["up"](x).max()


class Returned(Outer):
    def layer_of(self, name):
        return getattr(self, name).up

    def forward(self, x):
        return self.inner(x) + self.layer_of("inner")(x).max()


class Hooked(Two):
    def __init__(self):
        super().__init__()
        self.relu = nn.ReLU()
        self.relu.register_full_backward_hook(lambda _, given, __: (given[0] / (1 + given[0].norm()),))

    def forward(self, x):
        return self.down(self.relu(self.up(x)))


class HookedBefore(Two):
    def __init__(self):
        super().__init__()
        self.up.register_full_backward_pre_hook(lambda _, given: (given[0] / (1 + given[0].norm()),))

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class InACall(Outer):
    def forward(self, x):
        layers = dict(first=self.inner.up)
        return self.inner(x) + layers["first"](x).max()


class ByForward(Outer):
    def forward(self, x):
        run = self.inner.up.forward
        return self.inner(x) + run(x).max()


class Slotted:
    __slots__ = ("module",)

    def __init__(self, module):
        self.module = module

    def __call__(self, x):
        return self.module.up(x).max()


HELD = {
    "a lambda in a list": lambda outer: [lambda x: outer.inner.up(x).max()],
    "a default": lambda outer: [lambda x, layer=outer.inner.up: layer(x).max()],
    "slots": lambda outer: [Slotted(outer.inner)],
    "a deque": lambda outer: deque([outer.inner.up]),
    "a mapping of mappings": lambda outer: {0: {1: [(outer.inner.up,)]}, 1: None},
    "an iterator": lambda outer: iter([outer.inner.up] * 9),
    "what is remembered": lambda outer: functools.lru_cache(lambda: outer.inner.up),
}


class Held(Outer):
    def __init__(self, how):
        super().__init__()
        self.how, self.held = how, HELD[how](self)

    def __deepcopy__(self, memo):
        made = type(self)(self.how).double()
        made.load_state_dict(self.state_dict())
        return made

    def forward(self, x):
        if self.how == "an iterator":
            return self.inner(x) + next(self.held)(x).max()
        if self.how == "what is remembered":
            return self.inner(x) + self.held()(x).max()
        if self.how == "a mapping of mappings":
            return self.inner(x) + self.held[0][1][0][0](x).max()
        return self.inner(x) + self.held[0](x).max()


@on_ranks(2)
@pytest.mark.parametrize("how", HELD)
def test_what_an_attribute_holds_may_call_what_it_has(how):
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(WIDTH), Held(how)).double()
    check_exact(model, loss)
    assert split(model)[1] == []


APART = [InAClosure, InALambda, ByNonlocal, InAGenerator, AsText, AsStr, NamedInText, Evaluated, ByLocals]
APART += [ByDescriptor, ByCachedProperty, ByReference, ByGetattr, ByItsDescriptor, ByVars, ByDunder, Matched]
APART += [InAMapping, InACall, ByForward, Returned, Hooked, HookedBefore]


@on_ranks(2)
@pytest.mark.parametrize("kind", APART)
def test_layers_stay_apart_where_code_comes_to_them_by_another_way(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(WIDTH), kind()).double()
    check_exact(model, loss)
    assert split(model)[1] == []


class Three(Two):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, INNER)


class UnderTwoNames(Three):
    def forward(self, x):
        hidden = kept = self.up(x)
        hidden *= self.gate(x)
        return self.down(torch.tanh(kept))


class EndsEarly(Three):
    def forward(self, x):
        hidden = self.up(x)
        with contextlib.suppress(ZeroDivisionError):
            hidden = hidden * (1 // (x.shape[-1] - WIDTH))
            hidden = self.gate(x)
        return self.down(torch.tanh(hidden)) + self.gate(x)[..., :WIDTH]


@on_ranks(2)
@pytest.mark.parametrize("kind", [UnderTwoNames, EndsEarly])
def test_what_a_variable_was_before_is_split_with_what_it_may_be(kind):
    torch.manual_seed(0)
    check_exact(nn.Sequential(nn.LayerNorm(WIDTH), kind()).double(), loss)
