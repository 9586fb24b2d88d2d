"""A class that tulle puts in the place of a module's own equals it, for code that asks `type(module) == nn.Linear`."""

import abc
import copy
import typing

import pytest
import torch
from torch import nn

import tulle
from ranks import on_ranks
from tulle.derived import derived, is_derived, put_before
from tulle.errors import ModelError
from tulle.plan import Memory, Plan


class Before(nn.Module):
    """What is put before a class."""


def of(kind, **options):
    return derived(Before, kind, name=kind.__name__, module=__name__, **options)


def test_a_class_that_was_made_equals_the_one_it_is_of_and_is_another():
    made = of(nn.Linear)
    again = derived(nn.Identity, made, name="Again", module=__name__)
    assert is_derived(made)
    assert made is not nn.Linear
    assert of(nn.Linear) is made
    assert made == nn.Linear == again == made
    assert again in (nn.Conv1d, nn.Linear)
    assert again not in {nn.Linear: 1}
    for other in (nn.Identity, of(nn.Identity), "Linear"):
        assert made != other
    assert not isinstance(nn.Linear(1, 1), made)
    assert of(nn.Identity, given=nn.Linear) == nn.Linear


def test_a_class_that_derives_from_one_that_was_made_is_one_of_its_own():
    class Own(of(nn.Linear)):
        pass

    made = derived(nn.Identity, Own, name="Own", module=__name__)
    assert made == Own
    assert nn.Linear not in (made, Own)


def test_a_class_is_found_among_those_it_derives_from_as_super_finds_it():
    made = of(nn.Linear)
    order = made.__mro__
    assert [order.index(one) for one in order] == [*range(len(order))]
    assert order.index(nn.Linear) == 2
    assert nn.Linear.__mro__.index(nn.Linear) == 0
    with pytest.raises(ValueError, match=r"is not among"):
        order.index(nn.Linear, 0, 2)
    with pytest.raises(ValueError, match=r"Conv1d'> is not among"):
        order.index(nn.Conv1d)


def test_the_class_of_a_class_stays_what_it_was():
    class Abstract(nn.Module, abc.ABC):
        pass

    assert of(Abstract) == Abstract
    assert isinstance(of(Abstract), abc.ABCMeta)


class Twice(nn.Module):
    """What is put before a class, and asks it."""

    def forward(self, *arguments):
        return 2 * super().forward(*arguments)


class Mixin:
    """Has no attributes of objects."""

    __slots__ = ()


class Abstract(abc.ABC, nn.Identity):
    """Python lays its objects out in another way than a module's, for a base without attributes comes first."""


class Generic(typing.Generic[typing.TypeVar("T")], nn.Identity):
    """The same."""


class Slotted(Mixin, nn.Identity):
    """The same."""


class Below(Abstract):
    """The same, for what it derives from."""

    def forward(self, x):
        return super().forward(x) + 1


@pytest.mark.parametrize("kind", [Abstract, Generic, Slotted, Below])
def test_an_object_of_a_class_whose_first_base_has_no_attributes_takes_what_is_put_before(kind):
    module = kind()
    before = module(4)
    put_before(Twice, module)
    put_before(nn.Identity, module, name="Again")
    copied = copy.deepcopy(module)
    for one in (module, copied):
        assert type(one) == kind  # noqa: E721
        assert isinstance(one, kind)
        assert Twice.forward(one, 4) == one(4) == 2 * before
    another = kind()
    put_before(Twice, another)
    assert type(another) is type(module).__bases__[0]


def test_a_class_may_derive_from_one_that_was_made_and_from_an_abstract_one():
    class Patched(of(nn.Linear), abc.ABC):  # as higher makes of type(module), whose inner loops MAML runs
        pass

    assert isinstance(Patched(1, 1), nn.Linear)
    assert nn.Linear not in (Patched, derived(nn.Identity, Patched, name="Patched", module=__name__))


class Penalized(nn.Module):
    """Its loss adds the weights of the modules of two classes, as FuxiCTR's models do, and its forward asks for one."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(12, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)])

    def forward(self, ids):
        hidden = self.words(ids)
        for layer in self.layers:
            hidden = layer(hidden) + hidden if type(layer) == nn.Linear else layer(hidden)  # noqa: E721
        return hidden

    def loss(self, ids):
        penalized = [module for module in self.modules() if type(module) in (nn.Embedding, nn.Linear)]
        return self(ids).pow(2).mean() + sum(0.1 * module.weight.norm() ** 2 for module in penalized)


IDS = torch.arange(12).view(4, 3)
PLANS = {
    "rows": {"words": "rows"},
    "columns": {"words": "columns"},
    "full sharding": Plan({"data": 2}, memory=Memory(full_shard=True)),
    "recomputation": Plan({"data": 2}, memory=Memory(recompute=("layers.0", "layers.2"))),
}


def stepped(ids, mesh=None, plan=None, kind=Penalized):
    torch.manual_seed(0)
    model = kind().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if mesh is not None:
        tulle.distribute(model, optimizer, mesh, plan=plan)
    model.loss(ids).backward()
    optimizer.step()
    return model


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@on_ranks(2)
def test_what_goes_over_modules_by_their_class_does_what_it_did(plan):
    mesh = tulle.init(data=-1)
    found = tulle.full_state_dict(stepped(IDS.chunk(2)[mesh.rank], mesh, plan), everywhere=True)
    torch.testing.assert_close(found, dict(stepped(IDS).state_dict()), rtol=1e-12, atol=1e-14)


class Sliced(Penalized):
    """Runs some layers without the first, as SAC of pixels does, and makes another of a module's class."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*self.layers)

    def forward(self, ids):
        return self.layers[1:](type(self.layers)(self.layers[0], nn.ReLU())(self.words(ids)))


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@on_ranks(2)
def test_a_slice_of_layers_does_what_it_did(plan):
    mesh = tulle.init(data=-1)
    found = tulle.full_state_dict(stepped(IDS.chunk(2)[mesh.rank], mesh, plan, Sliced), everywhere=True)
    torch.testing.assert_close(found, dict(stepped(IDS, kind=Sliced).state_dict()), rtol=1e-12, atol=1e-14)


def test_an_object_that_is_made_of_a_class_that_was_made_is_of_the_modules_own():
    assert type(of(nn.Linear)(1, 1)) is nn.Linear
    assert type(derived(nn.Identity, of(nn.Linear), name="Again", module=__name__)(1, 1)) is nn.Linear


@on_ranks(2)
def test_a_parametrization_that_is_removed_from_a_class_that_tulle_has_made_is_refused_by_name():
    mesh = tulle.init(data=-1)
    model = nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    tulle.distribute(model, optimizer, mesh, plan=Plan(mesh.shape, memory=Memory(full_shard=True)))
    with pytest.raises(ModelError, match="'weight' was to be taken from the class of a ParametrizedLinear, as torch's"):
        torch.nn.utils.parametrize.remove_parametrizations(model[0], "weight")


def test_what_a_class_that_was_made_has_itself_can_be_taken_from_it():
    made = of(nn.Bilinear)
    made.noted = 1
    del made.noted
    assert not hasattr(made, "noted")
    with pytest.raises(AttributeError):
        del made.noted
