"""What micro-batches, ranks and code around a step could take from one another."""

import collections
import copy
import itertools
import random
from contextlib import contextmanager
from inspect import getattr_static

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pipeline_networks import WIDTH, Chain, TiedEnds, make, worst_gradient
from torch import nn
from torch.utils.checkpoint import checkpoint

import tulle
from ranks import on_ranks
from tulle import pipeline
from tulle.errors import CommunicationError, ModelError
from tulle.pipeline import placement_of, recompute
from tulle.pipeline.shapes import Shapes
from tulle.pipeline.structure import flatten
from tulle.pipeline.turns import Surroundings

DTYPE = torch.float64


def data(n=8):
    return torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(0), dtype=DTYPE)


def loss_of(model, x):
    loss = model(x).pow(2).mean()
    loss.backward()
    return loss


def placed_chain(mesh):
    return pipeline.place(make(Chain), mesh["pipe"], {"layers.0": 0, "layers.1": 1})


def both(kind, assignment, function=loss_of, steps=3, micro_batches=4, by_profile=False, timeout=8):
    mesh = tulle.init(pipe=-1, timeout=timeout)
    model = make(kind)
    reference = make(kind)
    if by_profile:
        pipeline.place(model, mesh["pipe"], sample=data(4))
    else:
        pipeline.place(model, mesh["pipe"], assignment)
    step = pipeline.step(micro_batches=micro_batches)(function)
    worst = 0.0
    for n in range(steps):
        x = data() * (n + 1)
        losses, expected = step(model, x).stack(), step(reference, x).stack().detach()
        worst = max(worst, ((losses - expected).abs() / expected.abs()).max().item(), worst_gradient(model, reference))
    return worst, model, reference


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


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        y = self.first(x)
        z = self.second(y)
        y += 1
        y[:, 0] = z[:, 1]
        canvas = torch.zeros(len(x), WIDTH, dtype=x.dtype)
        canvas[:, 1:] += y[:, 1:]
        w = self.second(y)
        y.add_(z)
        return w + self.third(y) + canvas


@on_ranks(2)
def test_writes_between_modules_are_seen_in_inference_mode():
    mesh = tulle.init(pipe=-1)
    model, reference = make(InPlace), make(InPlace)
    pipeline.place(model, mesh["pipe"], {"first": 0, "second": 1, "third": 0})
    x = data()
    with torch.inference_mode():
        out, expected = model(x), reference(x)
        out += 1
        again = model.second(out)
        out[:, 0] = 3
        assert torch.tensor(out.tolist(), dtype=DTYPE).sub(expected + 1).abs()[:, 1:].max() < 1e-12
        e = reference.second(expected + 1)
        assert torch.tensor(again.tolist(), dtype=DTYPE).sub(e).abs().max() < 1e-12
        got = pipeline.step(micro_batches=2)(lambda model, x: model(x))(model, x).concat()
        assert got.sub(expected).abs().max() < 1e-12


class Encoding(collections.UserDict):
    def __getattr__(self, name):
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


def on_encoding(model, batch, pair):
    assert len(batch.x) == 2, len(batch.x)
    assert len(pair[0]["x"]) == 2
    loss = model(batch.x).pow(2).mean()
    loss.backward()
    return loss


@on_ranks(2)
def test_what_a_tokenizer_gives_is_cut():
    model = placed_chain(tulle.init(pipe=-1))
    step = pipeline.step(micro_batches=4)(on_encoding)
    batch = Encoding({"x": data(), "n": 3})
    step(model, batch, (Encoding({"x": data()}), data()))
    step = pipeline.step(micro_batches=4, split={"batch.n": None})(on_encoding)
    step(model, batch, (Encoding({"x": data()}), data()))


class Trainer:
    def __init__(self, model):
        self.model = model

    @pipeline.step(micro_batches=4)
    def step(self, x):
        return loss_of(self.model, x)


@on_ranks(2)
def test_a_step_finds_the_model_of_a_trainer_or_a_closure():
    model = placed_chain(tulle.init(pipe=-1))
    runtime = placement_of(model).runtime
    Trainer(model).step(data())
    assert runtime.programs == 6, runtime.programs

    @pipeline.step(micro_batches=4)
    def step(x):
        return loss_of(model, x)

    step(data())
    assert runtime.programs == 11, runtime.programs


def plain_too(model, critic, x):
    loss = critic(x).pow(2).mean()
    loss.backward()
    return loss_of(model, x) + loss.detach()


@on_ranks(2)
def test_a_loss_of_a_model_that_is_not_placed_counts_by_its_share():
    model = placed_chain(tulle.init(pipe=-1))
    critic, ref = make(Chain), make(Chain)
    pipeline.step(micro_batches=4)(plain_too)(model, critic, data())
    ref(data()).pow(2).mean().backward()
    assert worst_gradient(critic, ref) < 1e-12


def with_plain_parameters(model, criterion, x):
    loss = criterion(model(x)).pow(2).mean()
    loss.backward()
    return loss


@on_ranks(2)
def test_a_trained_parameter_of_no_placed_model_is_refused():
    mesh = tulle.init(pipe=-1, timeout=8)
    model = placed_chain(mesh)
    # A rank that waits for one that has raised is told why.
    with pytest.raises((ModelError, CommunicationError), match="trained and in no model that was placed"):
        pipeline.step(micro_batches=4)(with_plain_parameters)(model, nn.Linear(WIDTH, 1).double(), data())


class Detaches(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        y = self.first(x)
        a = self.third(y.sum(0))
        y = self.first(x)
        self.second(y).detach_()
        y.detach_()
        b = self.second(y) + y * 2
        z = self.first(x).detach().requires_grad_()
        return a + b * 2 + self.third(z * 2)


@on_ranks(2)
def test_what_is_detached_in_place_is_so_on_all_ranks():
    worst, _, _ = both(Detaches, {"first": 0, "second": 1, "third": 1}, steps=2)
    assert worst < 1e-12


@on_ranks(2)
def test_a_loss_that_is_kept_can_be_read_after_the_step():
    mesh = tulle.init(pipe=-1, timeout=8)
    model = placed_chain(mesh)
    kept = []

    @pipeline.step(micro_batches=2)
    def step(model, x):
        loss = model(x).pow(2).mean()
        loss.backward()
        kept.append(loss)

    step(model, data())
    assert (kept[0] + kept[1]).item() > 0
    step(model, data())
    assert sum(one.item() for one in kept) > 0


class Signs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        return weight.sign() * weight.abs().mean()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Quantized(nn.Linear):
    def inner(self, x):
        return F.linear(x, Signs.apply(self.weight), self.bias).tanh()

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


class QuantizedTwo(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Quantized(WIDTH, WIDTH), Quantized(WIDTH, WIDTH)

    def forward(self, x):
        return self.second(self.first(x))


@on_ranks(2)
def test_a_function_of_a_parameter_that_a_module_recomputes_stays_in_it():
    worst, _, _ = both(QuantizedTwo, {"first": 0, "second": 1}, steps=2)
    assert worst < 1e-12


def test_functions_apply_may_be_a_class_method_of_c(monkeypatch):
    monkeypatch.setattr(recompute, "_apply", getattr_static(dict, "fromkeys"))  # of the type that torch 2.15 has
    assert recompute._application.__wrapped__(dict)(["a"]) == {"a": None}


class Pyramid(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv1d(1, 2, 3, padding=1), nn.Conv1d(2, 1, 3, padding=1)

    def forward(self, x):
        x = self.first(x.unsqueeze(1))
        parts = [F.interpolate(x, scale_factor=s) for s in (0.5, 2.0)]
        return sum(self.second(p).mean(-1) for p in parts)


@on_ranks(2)
def test_shapes_that_follow_from_fractions():
    worst, _, _ = both(Pyramid, {"first": 0, "second": 1}, steps=1)
    assert worst < 1e-12


@on_ranks(1)
def test_shapes_of_pools_follow_from_fractions_too():
    shapes = Shapes()
    for ratio, length in ((0.5, 10), (0.75, 15)):
        leaves, spec = flatten(((torch.zeros(1, 1, 20, 20), 2), {"output_ratio": (ratio, ratio)}))
        outcome = shapes.outcome(F.fractional_max_pool2d, leaves, spec)
        assert outcome.results[0].shape == (1, 1, length, length)


@on_ranks(2)
def test_a_copy_that_is_placed_otherwise_is_refused():
    mesh = tulle.init(pipe=-1, timeout=8)
    model = placed_chain(mesh)
    with pytest.raises(ModelError, match="no values, while another rank has them"):
        pipeline.place(copy.deepcopy(model), mesh["pipe"], {"layers.0": 1, "layers.1": 0})


def test_on_a_gpu_micro_batches_run_on_the_stream_of_the_step(monkeypatch):
    entered = []

    @contextmanager
    def stream(one):
        entered.append(one)
        yield
        entered.append(f"left {one}")

    for name, found in {"is_initialized": True, "current_device": 0, "current_stream": "the step's"}.items():
        monkeypatch.setattr(torch.cuda, name, lambda found=found: found)
    monkeypatch.setattr(torch.cuda, "set_device", entered.append)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    surroundings = Surroundings()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "another thread's")
    with surroundings:
        assert entered == [0, "the step's"]
    assert entered[2:] == ["left the step's"]


def zeroes(model, x):
    model.zero_grad()
    return loss_of(model, x)


@on_ranks(2)
def test_zero_grad_within_a_step_reaches_tied_parameters():
    worst, _, _ = both(TiedEnds, {"embed": 0, "middle": 0, "other": 1, "head": 1}, zeroes, micro_batches=1)
    assert worst < 1e-12


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        f = torch.fft.fft(self.first(x)).conj()
        g = F.linear(f, self.second.weight.to(f.dtype)).conj()
        return torch.cat([g.real, g.imag])


@on_ranks(2)
def test_conjugates_travel():
    worst, _, _ = both(Complex, {"first": 0, "second": 1})
    assert worst < 1e-12


def backs(model, x):
    y = model(x)
    g = torch.arange(float(y.numel()), dtype=DTYPE).view_as(y)
    torch.autograd.backward(y, g, retain_graph=True)
    torch.autograd.backward([y.sum()], [torch.tensor(3.0, dtype=DTYPE)], True)
    torch.autograd.backward(tensors=[y.sum()], grad_tensors=[torch.tensor(5.0, dtype=DTYPE)], retain_graph=True)
    torch.autograd.backward((y.sum(),), torch.tensor(5.0, dtype=DTYPE), retain_graph=True)
    y.backward(g)
    return y.sum()


@on_ranks(2)
def test_every_way_to_call_backward():
    worst, _, _ = both(Chain, {"layers.0": 0, "layers.1": 1}, backs, micro_batches=1, steps=2)
    assert worst < 1e-12


def freezes(model, x):
    loss = loss_of(model, x)
    for layer in model.layers[:3]:
        layer.requires_grad_(False)
    y = model.layers[0](x).sum()
    assert not y.requires_grad
    return loss + y.detach()


@on_ranks(2)
def test_parameters_that_a_step_freezes_are_frozen_on_all_ranks():
    worst, _, _ = both(Chain, {"layers.0": 0, "layers.1": 1}, freezes, micro_batches=1, steps=3)
    assert worst < 1e-12


@on_ranks(2)
def test_hooks_of_saved_tensors_hold_in_a_step():
    mesh = tulle.init(pipe=-1, timeout=8)
    model = placed_chain(mesh)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(1) or t, lambda t: t):
        pipeline.step(micro_batches=2)(loss_of)(model, data())
    assert packed


@on_ranks(2)
def test_what_compile_has_made_of_a_module_is_called():
    mesh = tulle.init(pipe=-1, timeout=8)
    model = make(Chain)
    called = []
    compiled = model.layers[0]._call_impl
    model.layers[0]._compiled_call_impl = lambda *a, **k: called.append(1) or compiled(*a, **k)
    pipeline.place(model, mesh["pipe"], {"layers.0": 0, "layers.1": 1})
    pipeline.step(micro_batches=2)(loss_of)(model, data())
    assert bool(called) == (mesh.rank == 0)


@on_ranks(2)
@pytest.mark.filterwarnings("ignore")  # of torch's compiler
def test_what_is_compiled_around_placed_modules_gives_the_numbers_of_one_process():
    mesh = tulle.init(pipe=-1, timeout=8)
    reference = make(Chain)
    wanted = loss_of(reference, data())
    model = placed_chain(mesh)
    model.layers[1].compile(backend="eager")  # what it leaves there is called by the module's stage
    found = torch.compile(F.mse_loss, backend="eager")(torch.compile(model, backend="eager")(data()), 0 * data())
    found.backward()
    assert abs(found.item() - wanted.item()) < 1e-12
    assert worst_gradient(model, reference) < 1e-12
