"""Objects that hang on modules, what code between modules keeps in such, and what a profile leaves as it was."""

import threading
from collections import Counter, defaultdict
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from beside_one_process import both, data
from pipeline_networks import WIDTH, make
from torch import nn
from torch.distributions import Normal, kl_divergence

import tulle
from ranks import on_ranks
from tulle import pipeline
from tulle.errors import TulleError

APART = {"a": 0, "b": 1}


class Pair(nn.Module):
    kind = nn.Linear

    def __init__(self):
        super().__init__()
        self.a, self.b = self.kind(WIDTH, WIDTH), self.kind(WIDTH, WIDTH)

    def forward(self, x):
        return self.b(self.a(x))


class Bayes(nn.Linear):
    posterior = None

    def forward(self, x):
        y = super().forward(x)
        self.posterior = Normal(y, y.exp())
        return y.tanh()


class Posteriors(Pair):
    kind = Bayes

    def forward(self, x):
        y = super().forward(x)
        return y + sum(kl_divergence(one.posterior, Normal(0.0, 1.0)).mean() for one in (self.a, self.b))


class Counts(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.stats = SimpleNamespace(value=0.0, calls=0)

    def forward(self, x):
        y = super().forward(x).tanh()
        self.stats.value = self.stats.value + y.mean()
        self.stats.calls += 1
        return y


class Statistics(Pair):
    kind = Counts

    def forward(self, x):
        self.a.stats.value = self.b.stats.value = 0.0
        y = super().forward(x)
        return y * self.a.stats.calls + self.a.stats.value + self.b.stats.value


@pytest.mark.parametrize("kind", [Posteriors, Statistics])
@pytest.mark.parametrize("by_profile", [False, True])
@on_ranks(2)
def test_objects_on_attributes_are_seen_by_all(kind, by_profile):
    worst, _, _ = both(kind, APART, by_profile=by_profile)
    assert worst < 1e-12


class Appends(nn.Linear):
    def __init__(self, losses):
        super().__init__(WIDTH, WIDTH)
        self.losses = losses

    def forward(self, x):
        y = super().forward(x).tanh()
        self.losses.append(y.mean())
        return y


class Shared(nn.Module):
    """One list hangs on all modules."""

    def __init__(self):
        super().__init__()
        self.losses = []
        self.a, self.b = Appends(self.losses), Appends(self.losses)

    def forward(self, x):
        self.losses.clear()
        return self.b(self.a(x)) + sum(self.losses)


@on_ranks(2)
def test_a_list_that_hangs_on_several_modules_is_found_by_a_profile_and_refused_otherwise():
    worst, _, _ = both(Shared, None, by_profile=True)
    assert worst < 1e-12
    with pytest.raises(TulleError, match="into its attribute 'losses', a list that modules"):
        both(Shared, APART)


@dataclass
class Kept:
    value: float


class Meter:
    def __init__(self):
        self.value = 1.0


class Metered(Pair):
    """What one forward leaves the next one reads: micro-batches keep their order."""

    def __init__(self):
        super().__init__()
        self.meter, self.kept, self.nested = Meter(), Kept(1.0), {"average": {"values": [1.0]}}

    def forward(self, x):
        values = self.nested["average"]["values"]
        y = self.b(self.a(x) * self.meter.value * self.kept.value * values[-1])
        size = y.abs().mean().item()
        self.meter.value = 0.5 * self.meter.value + 0.5 * size
        self.kept.value = 0.5 * self.kept.value + 0.5 * size
        values.append(0.5 * values[-1] + 0.5 * size)
        return y


class MeteredByObject(Pair):
    def __init__(self):
        super().__init__()
        self.meter = Meter()

    def forward(self, x):
        y = self.b(self.a(x) * self.meter.value)
        self.meter.value = 0.5 * self.meter.value + 0.5 * y.abs().mean().item()
        return y


@pytest.mark.parametrize("kind", [Metered, MeteredByObject])
@pytest.mark.parametrize("by_profile", [False, True])
@on_ranks(2)
def test_numbers_that_objects_keep_are_those_of_one_process(kind, by_profile):
    worst, _, _ = both(kind, APART, by_profile=by_profile)
    assert worst < 1e-12


class Bank(nn.Linear):
    """Keeps tensors in an object, and writes in one of a list."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.keys, self.average = SimpleNamespace(all=torch.zeros(1, WIDTH).double()), [torch.zeros(WIDTH).double()]

    def forward(self, x):
        y = super().forward(x)
        keys = self.keys.all
        self.keys.all = torch.cat([keys, y.detach()])[-5:]
        with torch.no_grad():
            self.average[0].mul_(0.5).add_(y.mean(0))
        return y + (y @ keys.T).logsumexp(-1, keepdim=True) + self.average[0].clone()


class Banks(Pair):
    kind = Bank


@on_ranks(2)
def test_a_profile_leaves_what_modules_keep_as_it_was():
    worst, _, _ = both(Banks, None, by_profile=True)
    assert worst < 1e-12


class Into(nn.Linear):
    def forward(self, graph):
        graph.x = super().forward(graph.x).tanh()
        graph.calls += 1
        return graph


class Graphs(Pair):
    kind = Into


class OfDictionary(nn.Linear):
    def forward(self, batch):
        batch["x"] = super().forward(batch["x"])[:, :3]
        return batch


@on_ranks(2)
def test_a_profile_leaves_its_sample_as_it_was():
    axis = tulle.init(pipe=-1, timeout=8)["pipe"]
    x = data(4)
    graph = SimpleNamespace(x=x, calls=0)
    pipeline.place(make(Graphs), axis, sample=graph)
    assert graph.x is x
    assert graph.calls == 0
    batch = {"x": x}
    pipeline.place(nn.Sequential(make(lambda: OfDictionary(WIDTH, WIDTH))), axis, sample=(batch,))
    assert batch["x"] is x


class Items(dict):
    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


class NotCopied(Pair):
    kind = Into

    def forward(self, x):
        lock = SimpleNamespace(x=x, calls=0, lock=threading.Lock(), model=self)
        return self.b(self.a(Items(x=self.b(self.a(lock)).x, calls=0))).x


@on_ranks(2)
def test_a_profile_goes_by_objects_that_cannot_be_copied():
    worst, _, _ = both(NotCopied, None, by_profile=True)
    assert worst < 1e-12


class Grows(nn.Linear):
    def forward(self, values):
        values.append(super().forward(values[-1]).tanh())
        return values


class OfList(Pair):
    kind = Grows

    def forward(self, x):
        values = [x]
        last = self.b(self.a(values))
        assert last is values
        return sum(values)


@dataclass
class State:
    x: torch.Tensor


class Steps(nn.Linear):
    def forward(self, state, names):
        state.x = super().forward(state.x).tanh()
        names["calls"] += 1
        return {"state": state, "names": [names]}


class OfDataclass(Pair):
    kind = Steps

    def forward(self, x):
        state, names = State(x), Counter()
        for layer in (self.a, self.b):
            given = layer(state, names)
            assert given["state"] is state
            assert given["names"][0] is names
        return state.x * names["calls"]


@pytest.mark.parametrize("kind", [OfList, OfDataclass])
@on_ranks(2)
def test_what_a_module_gives_back_is_what_it_was_given(kind):
    worst, _, _ = both(kind, APART)
    assert worst < 1e-12


class Trainer:
    def __init__(self, model):
        self.model, self.weights, self.losses = model, torch.arange(8.0).double(), []

    def train(self, x):
        loss = (self.model(x) * self.weights.mean()).pow(2).mean()
        loss.backward()
        self.losses.append(loss.item())
        return loss


@on_ranks(2)
def test_a_trainer_is_given_whole_to_each_micro_batch():
    axis = tulle.init(pipe=-1, timeout=8)["pipe"]
    trainer, other = Trainer(pipeline.place(make(Pair), axis, APART)), Trainer(make(Pair))
    losses = pipeline.step(micro_batches=4)(Trainer.train)(trainer, data()).stack()
    assert losses.tolist() == [other.train(x).item() for x in data().tensor_split(4)]
    assert trainer.losses == other.losses


class GivesWhatCannotBeTold(nn.Linear):
    def forward(self, x):
        return SimpleNamespace(x=super().forward(x), double=lambda y: 2 * y)


class GivesItself(nn.Linear):
    def forward(self, x):
        return SimpleNamespace(x=super().forward(x), layer=self)


class OfLambda(Pair):
    kind = GivesWhatCannotBeTold

    def forward(self, x):
        return self.b(self.a(x).x).x


class OfItself(OfLambda):
    kind = GivesItself


@pytest.mark.parametrize(("kind", "what"), [(OfLambda, "cannot be told to other ranks"), (OfItself, "gives a module")])
@on_ranks(2)
def test_what_cannot_be_told_is_named(kind, what):
    with pytest.raises(TulleError, match=what):
        both(kind, APART)


class Key:
    """Has an address."""


KEY = Key()


class ByObject(nn.Linear):
    def forward(self, x, seen):
        return super().forward(x) + len(seen)


class OfAddresses(Pair):
    """Dictionaries by objects, and with functions, are the same on all ranks, whatever addresses these have."""

    kind = ByObject

    def forward(self, x):
        kept = [Key() for _ in range(100 * tulle.init(pipe=-1, timeout=8)["pipe"].rank)]
        seen = {Key(): 1, KEY: 2}
        y = self.b(self.a(x, seen), defaultdict(lambda: 0.0))
        assert len(kept) % 100 == 0
        return y


@on_ranks(2)
def test_what_differs_between_ranks_by_addresses_alone_is_alike():
    worst, _, _ = both(OfAddresses, APART)
    assert worst < 1e-12
