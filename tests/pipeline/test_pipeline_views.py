"""Views of what forwards leave on modules, beside recomputing, hooks, profiles, several models, and steps that fail."""

import pytest
import torch
from beside_one_process import data
from pipeline_networks import WIDTH, make, worst_gradient
from torch import nn
from torch.utils.checkpoint import checkpoint

import tulle
from ranks import on_ranks
from tulle import pipeline

STAGES = {f"layers.{number}": number % 2 for number in range(4)}


class Leaves(nn.Linear):
    def __init__(self, losses=None):
        super().__init__(WIDTH, WIDTH)
        self.losses, self.loss, self.calls = losses, None, 0

    def forward(self, x):
        y = super().forward(x).tanh()
        self.loss = y.abs().mean()
        if self.losses is not None:
            self.losses.append(y.pow(2).mean())
        return y


class Recomputed(nn.Module):
    """Layers are recomputed in backward, by code around them or within them."""

    def __init__(self, inner=False):
        super().__init__()
        self.layers = nn.ModuleList(Leaves() for _ in range(4))
        self.sum = None

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        self.sum = sum(layer.loss.detach() for layer in self.layers)
        return x


class Within(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Leaves()

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


class RecomputedWithin(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Within() for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        self.sum = sum(layer.inner.loss.detach() for layer in self.layers)
        return x


class Hooked(nn.Module):
    """A hook puts features into a dictionary on the model."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Leaves() for _ in range(4))
        self.features = {}
        for n, layer in enumerate(self.layers):
            layer.register_forward_hook(lambda _, __, out, n=n: self.features.__setitem__(n, out.detach().mean()))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    @property
    def sum(self):
        return sum(self.features.values())


class Listed(nn.Module):
    """One list hangs on all modules, which they fill."""

    def __init__(self):
        super().__init__()
        self.losses = []
        self.layers = nn.ModuleList(Leaves(self.losses) for _ in range(4))

    def forward(self, x):
        self.losses.clear()
        for layer in self.layers:
            x = layer(x)
        return x + sum(self.losses)

    @property
    def sum(self):
        return sum(self.losses).detach() * len(self.losses)


def with_sum(model, x):
    loss = model(x).pow(2).mean()
    loss.backward()
    return loss, model.sum * 1.0


def with_loss_of_each(model, x):
    loss = model(x).pow(2).mean()
    loss.backward()
    layers = [getattr(layer, "inner", layer) for layer in model.layers]
    return loss, sum(layer.loss.detach() * n for n, layer in enumerate(layers, 1))


def results_of(step, model, x):
    losses, values = step(model, x)
    return losses.stack().tolist(), values.stack().tolist()


@on_ranks(2)
@pytest.mark.parametrize(
    ("kind", "by_profile"),
    [(kind, by_profile) for kind in (Recomputed, RecomputedWithin, Hooked) for by_profile in (False, True)]
    + [(Listed, True)],  # by hand a list of several modules is refused
)
@pytest.mark.parametrize("function", [with_sum, with_loss_of_each])
@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("gpipe", marks=pytest.mark.slow)])
def test_views_hold_beside_all_that_forwards_do(kind, by_profile, function, schedule):
    axis = tulle.init(pipe=-1, timeout=8)["pipe"]
    model, reference = make(kind), make(kind)
    if by_profile:
        pipeline.place(model, axis, sample=data(4))
    else:
        pipeline.place(model, axis, STAGES)
    step = pipeline.step(micro_batches=4, schedule=schedule)(function)
    for n in range(3):
        x = data(8 + 3 * n) * (n + 1)
        assert results_of(step, model, x) == results_of(step, reference, x), f"step {n}"
    assert worst_gradient(model, reference) < 1e-12
    for layer in (one for one in model.modules() if isinstance(one, Leaves)):
        layer.loss = None  # its graph recomputes the layer, and so would hold it, and the ranks' groups, for good


class Adversaries(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Leaves() for _ in range(4))
        self.aux = None

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        self.aux = x.detach().mean()
        return x


def generated(generator, critic, x):
    made = generator(x)
    loss = critic(made).mean()
    loss.backward()
    first = generator.aux - critic.aux
    return loss, first


def judged(generator, critic, x):
    loss = critic(x).mean() - critic(generator(x).detach()).mean()
    loss.backward()
    return loss, generator.aux + critic.aux


@on_ranks(2)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_each_of_two_models_has_its_own(schedule):
    axis = tulle.init(pipe=-1, timeout=8)["pipe"]
    models, references = [make(Adversaries) for _ in range(2)], [make(Adversaries) for _ in range(2)]
    for model in models:
        pipeline.place(model, axis, STAGES)
    for n in range(2):
        for function in (generated, judged):
            step = pipeline.step(micro_batches=4, schedule=schedule)(function)
            ours, theirs = step(*models, data(8 + n)), step(*references, data(8 + n))
            for one, other in zip(ours, theirs, strict=True):
                assert one.stack().tolist() == other.stack().tolist()


def failing(model, x):
    loss = model(x).pow(2).mean()
    loss.backward()
    if x.abs().max() > 50:
        raise ValueError("too large")
    return loss, model.aux * 1.0


@on_ranks(2)
def test_after_a_step_that_failed_views_are_right_again():
    axis = tulle.init(pipe=-1, timeout=8)["pipe"]
    model, reference = make(Adversaries), make(Adversaries)
    pipeline.place(model, axis, STAGES)
    step, alone = pipeline.step(micro_batches=4)(failing), pipeline.step(micro_batches=4)(failing)
    assert results_of(step, model, data()) == results_of(alone, reference, data())
    large = data()
    large[4] *= 1000
    with pytest.raises(ValueError, match="too large"):
        step(model, large)
    model.zero_grad()
    assert results_of(step, model, data()) == results_of(alone, reference, data())


class Adapted(nn.Module):
    """Layers that the step switches off for a while, and a name of what they do."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Leaves() for _ in range(4))
        self.is_on, self.names = True, ["on"]

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) if self.is_on and getattr(layer, "is_on", True) else layer(x) * 0.5
        return x


def switched(model, x):
    model.is_on = model.layers[1].is_on = False
    model.names.append("off")
    target = model(x).detach()
    model.is_on = model.layers[1].is_on = True
    model.names.pop()
    loss = (model(x) - target).pow(2).mean()
    loss.backward()
    state = torch.tensor([len(model.names), model.is_on, model.layers[1].is_on]).double()
    return loss, state + model(x).detach().mean()


@on_ranks(2)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_what_the_step_switches_for_a_while_is_so_for_its_own_micro_batch(schedule):
    axis = tulle.init(pipe=-1, timeout=8)["pipe"]
    model, reference = make(Adapted), make(Adapted)
    pipeline.place(model, axis, STAGES)
    step, alone = (pipeline.step(micro_batches=6, schedule=schedule)(switched) for _ in range(2))
    for n in range(3):
        x = data(12 + 3 * n) * (n + 1)
        assert results_of(step, model, x) == results_of(alone, reference, x), f"step {n}"
