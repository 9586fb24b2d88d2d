"""Code that needs more than it seems to: layers are split together only where nothing else comes to their parts."""

import functools
import math
from types import MethodType
from typing import NamedTuple

import pytest
import torch
from split_layers import model_axis
from split_training import check_exact, numbers, split, square
from torch import Tensor, nn
from torch.nn import functional

from ranks import on_ranks
from tulle import tensor_parallel
from tulle.errors import ModelError

WIDTH, INNER = 8, 10
TABLE = torch.linspace(0, 1, INNER, dtype=torch.float64)


def loss(model, step):
    return square(model(numbers(2, 5, WIDTH, seed=step)))


class Two(nn.Module):
    def __init__(self, inner=INNER):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)
        self.scale, self.soft = nn.Parameter(torch.full((), 2.0)), False


class Runs(Two):
    def run(self, x, soft=False):
        hidden = self.up(x)
        return self.down(hidden.softmax(-1) if soft else torch.tanh(hidden))


class ByLength(Two):
    def forward(self, x):
        hidden = self.up(x)
        return self.down(hidden / math.sqrt(hidden.shape[-1]))


class ByUnpackedLength(Two):
    def forward(self, x):
        hidden = self.up(x)
        *_, features = hidden.shape
        return self.down(hidden * features)


class IfWide(Two):
    def forward(self, x):
        hidden = self.up(x)
        return self.down(hidden * 2 if hidden.size(-1) >= INNER else hidden)


class ByFeatures(Two):
    def forward(self, x):
        return self.down(self.up(x) / self.up.out_features)


class ByWeight(Two):
    def forward(self, x):
        return self.down(self.up(x) / self.up.weight.shape[0])


class ByTable(Two):
    def forward(self, x):
        return self.down(self.up(x) * TABLE)


class Drawn(Two):
    def forward(self, x):
        hidden = self.up(x)
        return self.down(hidden * torch.rand(hidden.shape, dtype=hidden.dtype))


class Cleared(Two):
    def forward(self, x):
        hidden = torch.tanh(self.up(x)) * 1
        hidden[..., :3] = 0
        return self.down(hidden)


class ByNested(Two):
    def forward(self, x):
        def relu(hidden):
            return hidden.cumsum(-1)

        return self.down(relu(self.up(x)))


relu = torch.relu  # that above is another


class ByUnpacked(Runs):
    def forward(self, x, **options):
        return self.run(x, **{"soft": True}, **options)


def scaled(method):
    @functools.wraps(method)
    def inner(self, x):
        return method(self, x * self.scale)

    return inner


class Decorated(Runs):
    @scaled
    def forward(self, x):
        return self.run(x)


class Switched(Runs):
    def forward(self, x):
        soft, self.soft = self.soft, True
        return self.run(x, soft=True) if soft else self.run(x)


class Patched(Two):
    def __init__(self):
        super().__init__()
        self.activation = nn.ReLU()
        self.activation.forward = lambda hidden: hidden.softmax(-1)

    def forward(self, x):
        return self.down(self.activation(self.up(x)))


class ByProperty(Runs):
    @property
    def first(self):
        return self.up

    def forward(self, x):
        return self.run(x) + self.first(x).max()


class ByList(Runs):
    def __init__(self):
        super().__init__()
        self.layers = [self.up]

    def forward(self, x):
        return self.run(x) + self.layers[0](x).max()


class ByBoundMethod(Runs):
    def __init__(self):
        super().__init__()
        self.most = MethodType(lambda self, x: self.up(x).max(), self)

    def forward(self, x):
        return self.run(x) + self.most(x)


class Chosen(Runs):
    def forward(self, x):
        layer = self.up if x.sum() > -1e9 else self.down
        return self.run(x) + layer(x).max()


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


class OneByOne(Sequence):
    def forward(self, x):
        for layer in self.net:
            x = layer(x).cumsum(-1)
        return x


class OfSome(Sequence):
    def forward(self, x):
        return self.net[2:](self.net[:2](x).cumsum(-1))


class OfAMapping(Sequence):
    def forward(self, x):
        layers = [*self.net._modules.values()]
        for number in range(3):
            x = layers[number](x).cumsum(-1)
        return x


class ByFunction(Sequence):
    def forward(self, x):
        return functools.reduce(lambda hidden, layer: layer(hidden).cumsum(-1), self.net, x)


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(WIDTH, INNER)

    def forward(self, x):
        return torch.relu(self.dense(x))


class Pair(nn.Module):
    def __init__(self, first):
        super().__init__()
        self.first, self.second = first, nn.Linear(INNER, WIDTH)

    def forward(self, x):
        return self.second(self.first(x))


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.pair = Pair(First())
        self.other = nn.Sequential(self.pair.first, nn.Softmax(-1), nn.Linear(INNER, WIDTH))

    def forward(self, x):
        return self.pair(x) + self.other(x)


class FromOutside(nn.Module):
    def __init__(self):
        super().__init__()
        self.pair = Pair(First())

    def forward(self, x):
        return self.pair(x) + self.pair.first(x).max()


class Watched(nn.Module):
    def __init__(self):
        super().__init__()
        self.pair, self.seen = Pair(First()), []

    def watch(self):
        self.pair.second.register_forward_pre_hook(lambda _, given: self.seen.append(given[0].max()))

    def forward(self, x):
        if not self.pair.second._forward_pre_hooks:
            self.watch()
        return self.pair(x) + self.seen.pop()


APART = [ByLength, ByUnpackedLength, IfWide, ByFeatures, ByWeight, ByTable, Drawn, Cleared, ByNested, ByUnpacked]
APART += [Decorated, Switched, Patched, ByProperty, ByList, ByBoundMethod, Chosen, OneByOne, OfSome, OfAMapping]
APART += [ByFunction, Shared, FromOutside, Watched]


@on_ranks(2)
@pytest.mark.parametrize("kind", APART)
def test_layers_stay_apart_where_other_code_comes_to_their_parts(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(WIDTH), kind()).double()
    check_exact(model, loss)
    assert split(model)[1] == []


class Given(NamedTuple):
    hidden: Tensor


class OfAPack(Runs):
    def forward(self, pack):
        return self.run(pack[0])


class OfAName(Runs):
    def forward(self, pack):
        return self.run(pack.hidden)


class OfAKey(Runs):
    def forward(self, pack):
        return self.run(pack["hidden"])


class Packs(nn.Module):
    def __init__(self, inner, pack):
        super().__init__()
        self.inner, self.pack = inner, pack

    def forward(self, x):
        return self.inner(self.pack(x))


def in_a_list(x):
    return [x]


def by_key(x):
    return {"hidden": x}


class WritesFirst(Runs):
    def forward(self, x):
        return self.run(functional.relu(x, inplace=True)) + x


@on_ranks(2)
@pytest.mark.parametrize(
    ("kind", "pack"),
    [(OfAPack, in_a_list), (OfAPack, Given), (OfAName, Given), (OfAKey, by_key), (WritesFirst, torch.clone)],
)
def test_what_is_packed_or_written_to_enters_with_its_gradient(kind, pack):
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(WIDTH), Packs(kind(), pack)).double()
    check_exact(model, loss)
    assert len(split(model)[1]) == 1


class Dropped(nn.Module):
    def __init__(self, drop, inner=16):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH), drop

    def forward(self, x):
        return self.down(self.drop(torch.relu(self.up(x))))


class SharesDropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.first, self.second = Dropped(self.drop), Dropped(self.drop, inner=12)

    def forward(self, x):
        return self.drop(self.second(self.first(x)))


@on_ranks(2)
def test_a_dropout_that_several_modules_have_drops_what_it_did():
    torch.manual_seed(0)
    check_exact(nn.Sequential(nn.LayerNorm(WIDTH), SharesDropout()).double(), loss)


@on_ranks(2)
def test_dropout_that_begins_later_drops_as_in_one_process():
    def begin_and_loss(model, step):
        model[1].drop.p = 0.5
        return loss(model, step)

    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(WIDTH), Dropped(nn.Dropout(0.0))).double()
    check_exact(model, begin_and_loss)
    assert split(model)[1] == ["1.down"]


class AlwaysDrops(Two):
    def forward(self, x):
        return self.down(functional.dropout(self.up(x), 0.5, training=True))


@on_ranks(3)
def test_what_functions_drop_in_evaluation_leaves_the_shared_stream_alike():
    axis = model_axis()
    torch.manual_seed(0)
    model = tensor_parallel.apply(AlwaysDrops(), axis, smallest_bytes=0).eval()
    assert split(model)[1] == ["down"]
    first, second = (model(numbers(2, 5, WIDTH, seed=0).float()) for _ in range(2))
    assert not torch.equal(first, second)
    drawn = [None] * axis.size
    torch.distributed.all_gather_object(drawn, torch.rand(()).item())
    assert len({*drawn}) == 1


class Decides(Runs):
    def forward(self, x):
        return self.run(x, soft=True) if self.soft else self.run(x)


@on_ranks(2)
def test_an_attribute_that_decides_and_is_set_later_is_refused_by_name():
    model = tensor_parallel.apply(nn.Sequential(Decides()), model_axis(), smallest_bytes=0)
    x = numbers(2, 5, WIDTH, seed=0).float()
    model(x)
    model[0].soft = True
    with pytest.raises(ModelError, match="soft of a Decides was False when layers of 0 were split together, and is"):
        model(x)
