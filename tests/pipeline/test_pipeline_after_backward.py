"""After its backward a micro-batch reads what its own forward has left on modules, as in one process."""

import logging
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from beside_one_process import data
from pipeline_networks import WIDTH, make, worst_gradient
from torch import nn

import tulle
from ranks import on_ranks
from tulle import pipeline
from tulle.errors import TulleError

STAGES = {f"layers.{number}": number for number in range(6)}


class Scores(nn.Linear):
    """Leaves a loss, and how often it ran, on itself."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.loss, self.calls = None, 0

    def forward(self, x):
        y = super().forward(x).tanh()
        self.loss, self.calls = y.pow(2).mean(), self.calls + 1
        return y


class Experts(nn.Module):
    """Leaves things of all kinds on itself, between layers that do so too."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Scores() for _ in range(6))
        self.inner = nn.Module()
        self.aux, self.calls, self.size, self.kept, self.features = None, 0, 0.0, {}, None
        self.meter, self.sizes = SimpleNamespace(value=0.0, nested={"last": [0.0]}), []
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        self.calls += 1
        for n, layer in enumerate(self.layers):
            x = layer(x)
            if n == 1:
                self.features = x.detach()
                self.mean = 0.5 * self.mean + x.detach().mean(0)
        self.aux = sum(layer.loss for layer in self.layers)
        self.kept["last"] = x.detach() * 2
        self.inner.seen = x.detach().mean() + self.calls
        self.size = x.abs().sum().item()
        self.meter.value = 0.5 * self.meter.value + self.size
        self.meter.nested["last"][0] += len(x)
        self.sizes.append(len(x) + self.calls)
        return x + self.aux * 0.1


READERS = {
    "a tensor of code between modules": lambda model: model.aux.detach() * 3,
    "a tensor of one stage, of other shapes": lambda model: model.features.sum(),
    "a number": lambda model: torch.tensor(float(model.calls)),
    "a number from the data": lambda model: torch.tensor(model.size).double(),
    "what is in a dictionary": lambda model: model.kept["last"].sum(),
    "what is in a list": lambda model: torch.tensor([len(model.sizes), sum(model.sizes)]).double(),
    "what is in an object": lambda model: torch.tensor(model.meter.value).double(),
    "what is in objects in objects": lambda model: torch.tensor(model.meter.nested["last"][0]).double(),
    "an attribute of a module within": lambda model: model.inner.seen * 1,
    "a buffer": lambda model: model.mean.sum(),
    "what the first layer left": lambda model: model.layers[0].loss.detach() * 2,
    "what a layer left": lambda model: model.layers[3].loss.detach() * 2,
    "a number that a layer left": lambda model: torch.tensor(float(model.layers[2].calls)),
    "the whole": lambda model: sum(model.layers[n].loss.detach() * n for n in range(6)) + model.aux + model.calls,
}


def reading(read):
    def step(model, x):
        loss = model(x).pow(2).mean()
        loss.backward()
        return loss, read(model)

    return step


def results_of(step, model, x):
    losses, values = step(model, x)
    return losses.stack().tolist(), values.stack().tolist()


def run_both(function, stages, schedule="1f1b", micro_batches=4, kind=Experts, between=lambda model, x: None, steps=3):
    """What steps give, beside one process, with batches of other sizes and a call outside of steps between them."""
    axis = tulle.init(pipe=-1, timeout=8)["pipe"]
    model, reference = make(kind), make(kind)
    pipeline.place(model, axis, {name: number * stages // 6 for name, number in STAGES.items()})
    step = pipeline.step(micro_batches=micro_batches, schedule=schedule)(function)
    alone = pipeline.step(micro_batches=micro_batches)(function)
    for n in range(steps):
        x = data(8 + 3 * n) * (n + 1)
        assert results_of(step, model, x) == results_of(alone, reference, x), f"step {n}"
        assert between(model, x) == between(reference, x)
    assert worst_gradient(model, reference) < 1e-12
    return model, reference


@on_ranks(2, 3)
@pytest.mark.parametrize("read", READERS)
def test_after_backward_a_micro_batch_reads_what_its_own_forward_left(read):
    run_both(reading(READERS[read]), 3)


def without_gradients(model, x):
    with torch.no_grad():
        return model(x).sum().item(), model.aux.item(), model.calls, model.layers[4].loss.item()


@on_ranks(2)
@pytest.mark.parametrize("schedule", ["1f1b", "eager-1f1b", "gpipe", "zb-h1"])
@pytest.mark.parametrize("stages", [2, pytest.param(6, marks=pytest.mark.slow)])
def test_it_does_so_in_any_order_of_micro_batches(schedule, stages):
    run_both(reading(READERS["the whole"]), stages, schedule, micro_batches=6, between=without_gradients)


@on_ranks(2)
def test_what_is_left_after_a_step_is_the_last_micro_batch_s():
    model, reference = run_both(reading(READERS["the whole"]), 2)
    for name in ("calls", "size", "sizes"):
        assert getattr(model, name) == getattr(reference, name)
    assert vars(model.meter) == vars(reference.meter)
    assert model.layers[5].calls == reference.layers[5].calls
    torch.testing.assert_close(model.mean, reference.mean, rtol=0, atol=0)


@contextmanager
def handled(logger):
    """What a logger is told."""
    said = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logger.addHandler(handler)
    yield said
    logger.removeHandler(handler)


def reset(model, x):
    loss = model(x).pow(2).mean()
    loss.backward()
    value = torch.tensor(sum(model.sizes)).double() + model.calls
    model.sizes, model.calls = [], 0
    return loss, value


def cleared(model, x):
    loss = model(x).pow(2).mean()
    loss.backward()
    value = torch.tensor(sum(model.sizes)).double()
    model.sizes.clear()
    return loss, value


def called_again(model, x):
    loss = model(x).pow(2).mean()
    loss.backward()
    with torch.no_grad():
        again = model(x[:1]).pow(2).mean()
    return loss + again, model.aux.detach() + model.calls


@on_ranks(2)
@pytest.mark.parametrize("function", [reset, cleared, called_again])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_what_is_set_after_backward_the_next_forward_finds(function, schedule):
    with handled(logging.getLogger("tulle")) as said:
        run_both(function, 2, schedule)
    assert len(said) == 1
    assert "after its backward, which forwards set, too" in said[0]


class Settings(dict):
    """A dictionary of the user's own class, as configurations often are."""


class Names(list):
    """A list of the user's own class."""


class Configured(Experts):
    """Reads settings, and counts in others."""

    def __init__(self):
        super().__init__()
        self.settings, self.names = Settings(scale=2.0, nested={"more": [1]}), Names(["first", "second"])
        self.counts = Settings(calls=0)

    def forward(self, x):
        self.counts["calls"] += len(self.names)
        return super().forward(x) * self.settings["scale"]


def reset_counts(model, x):
    loss = model(x).pow(2).mean()
    loss.backward()
    value = torch.tensor(model.counts["calls"]).double()
    model.counts["calls"] = 0
    return loss, value


@on_ranks(2)
def test_items_of_a_class_of_the_user_s_own_that_nobody_sets_are_not_taken_for_set():
    with handled(logging.getLogger("tulle")) as said:
        run_both(reading(lambda model: torch.tensor(model.counts["calls"]).double()), 2, kind=Configured)
    assert not said


@on_ranks(2)
def test_items_of_a_class_of_the_user_s_own_that_a_step_sets_are_seen():
    with handled(logging.getLogger("tulle")) as said:
        run_both(reset_counts, 2, kind=Configured)
    assert len(said) == 1
    assert "a step sets 'counts' after its backward, which forwards set, too" in said[0]


def reset_sometimes(model, x):
    loss = model(x).pow(2).mean()
    loss.backward()
    if len(x) > 2:
        model.calls = 0
    return loss, loss.detach() * 1


@on_ranks(2)
def test_what_is_set_after_backward_for_the_first_time_in_a_later_step_is_refused():
    with pytest.raises(TulleError, match="sets 'calls' after its backward, which forwards set, too"):
        run_both(reset_sometimes, 2)


def counted(model, x):
    loss = model(x).pow(2).mean()
    loss.backward()
    model.steps = getattr(model, "steps", 0) + 1
    return loss, torch.tensor(float(model.steps))


@on_ranks(2)
def test_what_only_the_step_sets_all_micro_batches_share():
    model, _ = run_both(counted, 2, steps=2)
    assert model.steps == 8


class Counting(nn.Module):
    """Writes in buffers in place: between layers, and within one."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.layers[0] = nn.Sequential(self.layers[0], nn.BatchNorm1d(WIDTH))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("total", torch.zeros(WIDTH))
        self.register_buffer("still", torch.ones(WIDTH))

    def forward(self, x):
        self.steps += 1
        for layer in self.layers:
            x = layer(x).tanh()
        self.total += x.detach().sum(0)
        return x


IN_PLACE = {
    "steps": lambda model: model.steps * 1.0,
    "total": lambda model: model.total.sum(),
    "layers.0.1.num_batches_tracked": lambda model: model.layers[0][1].num_batches_tracked * 1.0,
    "layers.0.1.running_mean": lambda model: model.layers[0][1].running_mean.sum(),
}


@on_ranks(2)
@pytest.mark.parametrize(
    ("name", "schedule"),
    [(name, "gpipe") for name in IN_PLACE] + [(name, "1f1b") for name in IN_PLACE if name != "total"],
)
def test_reading_after_backward_what_later_forwards_wrote_in_place_is_refused(name, schedule):
    with pytest.raises(TulleError, match=f"'{name}' is read after a micro-batch's backward"):
        run_both(reading(IN_PLACE[name]), 2, schedule, kind=Counting)


def reading_before(model, x):
    loss = model(x).pow(2).mean()
    values = model.steps + model.total.sum() + model.layers[0][1].running_mean.sum()
    loss.backward()
    model(x[:2])
    return loss, values * model.still.sum()


@on_ranks(2)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_reading_it_before_or_in_another_forward_is_not(schedule):
    axis = tulle.init(pipe=-1, timeout=8)["pipe"]
    model = pipeline.place(make(Counting), axis, {name: number // 3 for name, number in STAGES.items()})
    step = pipeline.step(micro_batches=4, schedule=schedule)(reading_before)
    for _ in range(3):
        step(model, data())


def numbers_beside(function, kind=Experts):
    """Those of a first step, all of whose forwards run before the first backward, and those of one process."""
    axis = tulle.init(pipe=-1, timeout=8)["pipe"]
    model, reference = make(kind), make(kind)
    pipeline.place(model, axis, {name: number // 3 for name, number in STAGES.items()})
    _, values = results_of(pipeline.step(micro_batches=4, schedule="gpipe")(function), model, data())
    _, expected = results_of(pipeline.step(micro_batches=4)(function), reference, data())
    return values, expected


@on_ranks(2)
def test_without_views_a_later_micro_batch_s_is_read(monkeypatch):
    monkeypatch.setattr("tulle.pipeline.views.Views.enter", lambda self, turn: None)
    values, expected = numbers_beside(reading(READERS["a number"]))
    assert expected == [1.0, 2.0, 3.0, 4.0]
    assert values == [1.0, 4.0, 4.0, 4.0]


@on_ranks(2)
def test_without_a_trial_what_is_set_after_backward_is_refused(monkeypatch):
    monkeypatch.setattr("tulle.pipeline.views.Views.is_alone", False)
    with pytest.raises(TulleError, match="micro-batch 0 sets 'calls', 'sizes' after its backward"):
        numbers_beside(reset)


@on_ranks(2)
def test_without_a_refusal_what_later_forwards_wrote_in_place_is_read(monkeypatch):
    monkeypatch.setattr("tulle.pipeline.views.Views._written_since", lambda *_: None)
    values, expected = numbers_beside(reading(IN_PLACE["steps"]), Counting)
    assert expected == [1.0, 2.0, 3.0, 4.0]
    assert values == [1.0, 4.0, 4.0, 4.0]
