"""What a step sets on modules for a while, and puts back, is not seen by micro-batches that run meanwhile."""

import contextlib
import warnings

import pytest
import torch
import torch.nn.functional as F
from beside_one_process import both, data, loss_of
from pipeline_networks import WIDTH, Chain, make, worst_gradient
from torch import nn
from torch.distributions import Distribution, Normal
from torch.func import functional_call
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends, sdpa_kernel
from torch.nn.utils import parametrizations, parametrize

import tulle
from ranks import on_ranks
from tulle import pipeline

IN_TURN = {f"layers.{number}": number % 2 for number in range(4)}


class Layers(Chain):
    """Four of them, that do something else in training."""

    def __init__(self):
        super().__init__(4)

    def forward(self, x):
        x = super().forward(x)
        return x * 1.5 if self.training else x


class Adapted(nn.Module):
    """A layer with an adapter that can be switched off."""

    def __init__(self):
        super().__init__()
        self.base, self.adapter, self.is_on = (
            nn.Linear(WIDTH, WIDTH).requires_grad_(False),
            nn.Linear(WIDTH, WIDTH),
            True,
        )

    def forward(self, x):
        return self.base(x) + self.adapter(x) if self.is_on else self.base(x)


class Adapters(nn.Module):
    """Adapted layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Adapted() for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x

    @contextlib.contextmanager
    def off(self):
        for layer in self.layers:
            layer.is_on = False
        yield
        for layer in self.layers:
            layer.is_on = True


def targets_in_eval(model, x):
    model.eval()
    with torch.no_grad():
        target = model(x)
    model.train()
    loss = (model(x + 0.1) - target).pow(2).mean()
    loss.backward()
    return loss


class Normed(nn.Module):
    """Layers with a norm deep within one that others run between."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def norm_in_eval(model, x):
    model.layers[2][1].eval()
    loss = model(x).pow(2).mean()
    loss.backward()
    model.layers[2][1].train()
    return loss


def measured_after_backward(model, x):
    loss = model(x).pow(2).mean()
    loss.backward()
    model.eval()
    with torch.no_grad():
        measured = model(x).pow(2).mean()
    model.train()
    return loss.detach() + measured


def last_layers_frozen(model, x):
    model.layers[2:].requires_grad_(False)
    loss = model(x).pow(2).mean()
    loss.backward()
    model.layers[2:].requires_grad_(True)
    return loss


def weights_lent(model, x):
    lent = {name: parameter * 1.01 for name, parameter in model.named_parameters()}
    loss = functional_call(model, lent, (x,)).pow(2).mean() + model(x).exp().mean()
    loss.backward()
    return loss


def adapters_off(model, x):
    with torch.no_grad(), model.off():
        target = model(x)
    loss = F.kl_div(model(x).log_softmax(-1), target.softmax(-1), reduction="batchmean") + model(x).pow(2).mean()
    loss.backward()
    return loss


@on_ranks(2)
@pytest.mark.parametrize(
    ("kind", "function"),
    [
        (Layers, targets_in_eval),
        (Layers, measured_after_backward),
        (Layers, last_layers_frozen),
        (Layers, weights_lent),
        (Adapters, adapters_off),
        (Normed, norm_in_eval),
    ],
    ids=lambda value: value.__name__,
)
def test_what_a_step_sets_for_a_while_is_of_its_own_micro_batch(kind, function):
    assert both(kind, IN_TURN, function)[0] < 1e-12


def unfrozen_from_now_on(model, x):
    model.layers[0].requires_grad_(True)
    model.layers[2].train(False)
    loss = model(x).pow(2).mean()
    loss.backward()
    return loss


@on_ranks(2)
def test_what_a_step_sets_for_good_stays():
    mesh, model = tulle.init(pipe=-1, timeout=8), make(Layers)
    model.layers[0].requires_grad_(False)
    pipeline.place(model, mesh["pipe"], IN_TURN)
    pipeline.step(micro_batches=4)(unfrozen_from_now_on)(model, data())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert [layer.training for layer in model.layers] == [True, True, False, True]


def frozen_for_the_second_backward(model, x):
    made = model.layers[1](model.layers[0](x))
    loss = model.layers[3](model.layers[2](made.detach())).pow(2).mean()
    loss.backward(retain_graph=True)
    model.layers[2:].requires_grad_(False)
    other = model.layers[3](model.layers[2](made)).exp().mean()
    other.backward()
    model.layers[2:].requires_grad_(True)
    return loss.detach() + other.detach()


@on_ranks(2)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_weights_may_be_frozen_between_forward_and_backward(schedule):
    mesh, model, reference = tulle.init(pipe=-1, timeout=8), make(Layers), make(Layers)
    pipeline.place(model, mesh["pipe"], IN_TURN)
    step = pipeline.step(micro_batches=4, schedule=schedule)(frozen_for_the_second_backward)
    for _ in range(2):
        assert step(model, data()).stack().tolist() == step(reference, data()).stack().tolist()
    assert worst_gradient(model, reference) < 1e-12


class Auxiliary(nn.Linear):
    def forward(self, x):
        y = super().forward(x).tanh()
        return (y, y.mean()) if self.training else (y, None)


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Auxiliary(WIDTH, WIDTH)

    def forward(self, x):
        return self.inner(x)


class WithAuxiliary(nn.Module):
    """What a module within a placed one gives depends on whether it trains."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Outer(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y, mean = self.first(x)
        return self.second(y) if mean is None else self.second(y) + mean


def with_means_now_and_then(model, x):
    model.first.inner.train(not model.first.inner.training)
    loss = model(x).pow(2).mean()
    loss.backward()
    return loss


@on_ranks(2)
def test_what_a_module_gives_may_depend_on_whether_one_within_trains():
    assert both(WithAuxiliary, {"first": 0, "second": 1}, with_means_now_and_then, micro_batches=1)[0] < 1e-12


def by_one_kernel(model, x):
    seen = []
    with sdpa_kernel(SDPBackend.MATH), default_dtype(torch.float32), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for layer in model.layers:
            x = layer(x).tanh()
            x.sum().item()  # micro-batches pass one another here
            seen.append(len(_cur_sdpa_kernel_backends()) + (torch.get_default_dtype() == torch.float64))
    seen.append(len(warnings.filters))
    loss = x.pow(2).mean()
    loss.backward()
    return loss, seen


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(before)


def what_holds():
    return _cur_sdpa_kernel_backends(), torch.get_default_dtype(), [*warnings.filters]


@on_ranks(2)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_what_holds_for_the_whole_process_is_of_its_own_micro_batch(schedule):
    mesh = tulle.init(pipe=-1)
    model = pipeline.place(make(Layers), mesh["pipe"], IN_TURN)
    step = pipeline.step(micro_batches=4, schedule=schedule)(by_one_kernel)
    before = what_holds()
    for _ in range(3):
        _, seen = step(model, data())
        assert {tuple(one.outputs) for one in seen[:-1]} == {(1, 1, 1, 1)}
        assert set(seen[-1].outputs) == {len(before[-1])}
        assert what_holds() == before


class Normalized(Layers):
    """Layers whose weights are computed anew where they are read."""

    def __init__(self):
        super().__init__()
        for layer in self.layers:
            parametrizations.weight_norm(layer)


def with_weights_cached(model, x):
    with parametrize.cached():
        loss = (model(x) + model(x + 1)).pow(2).mean()
        loss.item()
        loss.backward()
    return loss


@on_ranks(2)
def test_weights_that_are_cached_for_a_while_are_each_micro_batchs_own():
    worst, _, _ = both(Normalized, IN_TURN, with_weights_cached)
    assert worst < 1e-12


class Unchecked(nn.Linear):
    """Turns off what distributions check, as torch does where something is compiled for the first time."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.found = []

    def forward(self, x):
        self.found.append(Distribution._validate_args)
        Distribution.set_default_validate_args(value=False)
        return super().forward(x)


class Likely(nn.Module):
    """Makes distributions between modules."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), Unchecked()])

    def forward(self, x):
        given = self.layers[0](x)
        made = self.layers[1](given)
        return Normal(given, 1 + given.detach().abs()).log_prob(made)


@on_ranks(2)
def test_distributions_check_alike_on_all_ranks_though_a_module_has_turned_that_off_on_one():
    axis = tulle.init(pipe=-1, timeout=8)["pipe"]
    model = pipeline.place(make(Likely), axis, {"layers.0": 0, "layers.1": 1})
    step = pipeline.step(micro_batches=4)(loss_of)
    losses = [step(model, data()).stack() for _ in range(2)]
    assert Distribution._validate_args
    assert model.layers[1].found == ([True, *7 * [False]] if axis.rank == 1 else [])
    reference = make(Likely)
    for one in losses:
        torch.testing.assert_close(one, step(reference, data()).stack().detach(), rtol=1e-12, atol=0)
    assert worst_gradient(model, reference) < 1e-12
