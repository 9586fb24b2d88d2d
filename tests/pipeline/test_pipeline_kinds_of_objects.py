"""Objects of every kind that is taken apart, which modules on several stages change."""

import collections
import copy
from types import SimpleNamespace

import pytest
from beside_one_process import both
from pipeline_networks import WIDTH
from torch import nn

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
