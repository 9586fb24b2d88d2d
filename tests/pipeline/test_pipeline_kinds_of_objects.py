"""Objects of every kind that is taken apart, which modules on several stages change."""

import collections
import copy
from types import SimpleNamespace

import pytest
import torch
from beside_one_process import both
from pipeline_networks import WIDTH
from torch import nn
from torch.utils._pytree import register_pytree_node

from ranks import on_ranks


class Attributes(dict):
    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


class Slotted:
    __slots__ = ("x", "y")

    def __init__(self, x):
        self.x = x


class Into(nn.Linear):
    def __init__(self):
        super().__init__(WIDTH, WIDTH)

    def forward(self, one):
        one.y = super().forward(one.x).tanh()
        if isinstance(one, dict | collections.UserDict):
            one["z"] = one.y.sin()
            one.pop("x")
        return one


class Holding(nn.Module):
    kind = None

    def __init__(self):
        super().__init__()
        self.first, self.second = Into(), Into()

    def forward(self, x):
        one = self.kind(x)
        one = self.first(one)
        one.x = one.y + x
        one = self.second(one)
        return one.y


class HoldingAttributes(Holding):
    kind = staticmethod(lambda x: Attributes(x=x))


class HoldingNamespace(Holding):
    kind = staticmethod(lambda x: SimpleNamespace(x=x))


class HoldingSlots(Holding):
    kind = Slotted


class Cloned(Into):
    """Gives another object of the same class, which has no name, as those of PyTorch Geometric's batches."""

    def forward(self, one):
        return copy.copy(super().forward(one))


class HoldingNameless(Holding):
    def __init__(self):
        super().__init__()
        self.first = Cloned()

    @staticmethod
    def kind(x):
        one = NAMELESS()
        one.x = x
        return one


NAMELESS = type("Nameless", (), {"__module__": "abc"})


class User(collections.UserDict):
    @property
    def x(self):
        return self.data["x"]

    @x.setter
    def x(self, value):
        self.data["x"] = value


class HoldingUser(Holding):
    kind = staticmethod(lambda x: User(x=x))


class Ordered(collections.OrderedDict):
    x = property(lambda self: self["x"], lambda self, value: self.__setitem__("x", value))
    y = property(lambda self: self["y"], lambda self, value: self.__setitem__("y", value))


class HoldingOrdered(Holding):
    kind = staticmethod(lambda x: Ordered(x=x))


KINDS = [HoldingAttributes, HoldingNamespace, HoldingSlots, HoldingNameless, HoldingUser, HoldingOrdered]


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_all_kinds_of_objects_are_taken_apart(kind):
    worst, _, _ = both(kind, {"first": 0, "second": 1})
    assert worst < 1e-12


def halved(x):
    return x[:, : WIDTH // 2]


class Says(nn.Linear):
    """Gives as many tensors as it is told to, in ways of many kinds."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)

    def forward(self, x, names=(), code=b"", turn=0j, function=torch.tanh):
        count = len(names) + len(code) + int(turn.imag)
        return [function(super(Says, self).forward(x) * place) for place in range(1, 2 + count)]


class Told(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Says(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        made = [self.first(x, names) for names in (set(), {"a", "b"}, frozenset("abc"))]
        made += [self.first(x, code=b"a"), self.first(x, code=b"ab"), self.first(x, turn=1j), self.first(x, turn=2j)]
        made += [self.first(x, function=one) for one in (torch.sum, halved, lambda x: x[:, 0])]
        return self.second(x) + sum(one.sum() * one.numel() * len(some) for some in made for one in some)


@on_ranks(2)
def test_outcomes_follow_from_arguments_of_every_kind():
    worst, _, _ = both(Told, {"first": 1, "second": 0}, steps=1, micro_batches=2)
    assert worst < 1e-12


class Thins(nn.Linear):
    def __init__(self, layout):
        super().__init__(WIDTH, WIDTH)
        self.layout = layout

    def forward(self, x):
        return super().forward(x).relu().detach().to_sparse(layout=self.layout)


class Thinned(nn.Module):
    """Does with what is sparse what it asks for."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = Thins(torch.sparse_coo), Thins(torch.sparse_csr), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        for one in (self.first(x), self.second(x), x):
            is_thin = one.is_sparse or one.is_sparse_csr or one.layout != torch.strided
            x = x + (one.to_dense() if is_thin else 2 * one)
        return self.third(x)


@on_ranks(2)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_what_is_sparse_says_so_on_all_ranks():
    assert both(Thinned, {"first": 0, "second": 1, "third": 0}, steps=1)[0] < 1e-12


class Registered:
    """Is taken apart by torch, with lists and dictionaries beside its tensors, as `TensorDict` is."""

    def __init__(self, held, note):
        self.held, self.note = held, note


register_pytree_node(
    Registered,
    lambda one: (list(one.held.values()), {"names": [*one.held], "note": one.note}),
    lambda values, said: Registered(dict(zip(said["names"], values, strict=True)), said["note"]),
)


class Adding(nn.Linear):
    def __init__(self):
        super().__init__(WIDTH, WIDTH)

    def forward(self, one):
        return Registered({**one.held, "y": super().forward(one.held["x"]).tanh()}, one.note)


class Registering(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Adding(), Adding()

    def forward(self, x):
        one = self.first(Registered({"x": x}, {"sizes": [len(x)]}))
        assert one.note == {"sizes": [len(x)]}
        return self.second(Registered({"x": one.held["y"] + one.held["x"]}, one.note)).held["y"]


@pytest.mark.parametrize("by_profile", [False, True])
@on_ranks(2)
def test_what_torch_takes_apart_with_a_dictionary_beside(by_profile):
    worst, _, _ = both(Registering, {"first": 0, "second": 1}, by_profile=by_profile)
    assert worst < 1e-12
