"""Tensors of the user's own that need a gradient have that of one process on all ranks, wherever stages read them."""

import pytest
import torch
from beside_one_process import DTYPE, data
from pipeline_networks import WIDTH, Chain, make
from torch import Tensor, nn

import tulle
from ranks import on_ranks
from tulle import pipeline
from tulle.errors import ModelError

STAGES = {f"layers.{number}": number % 2 for number in range(6)}


def both() -> tuple[nn.Module, nn.Module]:
    return pipeline.place(make(Chain), tulle.init(pipe=-1, timeout=8)["pipe"], STAGES), make(Chain)


def leaf(value: float) -> Tensor:
    return torch.full((2, WIDTH), value, dtype=DTYPE, requires_grad=True)


def worst(one: Tensor, other: Tensor) -> float:
    assert one.grad is not None
    assert other.grad is not None
    return ((one.grad - other.grad).abs().max() / other.grad.abs().max()).item()


def added_at_both_ends(model: nn.Module, x: Tensor, shift: Tensor) -> Tensor:
    loss = (model(x + shift.sin()) * shift).pow(2).mean()
    loss.backward()
    return loss.detach()


@on_ranks(2)
def test_what_stages_read_in_a_step_has_the_gradient_of_one_process_on_all_ranks():
    """A batch that is attacked, and what all micro-batches are given and two stages read; added to what was there."""
    step = pipeline.step(micro_batches=4, split={"shift": None})(added_at_both_ends)
    seen = []
    for model in both():
        x, shift = data().requires_grad_(), leaf(0.5)
        for _ in range(2):
            step(model, x, shift)
        seen.append((x, shift))
    assert max(worst(*pair) for pair in zip(*seen, strict=True)) < 1e-14


@on_ranks(2)
def test_what_stages_read_outside_of_steps_has_the_gradient_of_one_process_on_all_ranks():
    """Samples that follow the gradient of an energy; between forward and backward the last gradient is zeroed."""
    seen = []
    for model in both():
        x = data(2).requires_grad_()
        for _ in range(3):
            loss = model(x).pow(2).mean()
            if x.grad is not None:
                x.grad.zero_()
            loss.backward()
            with torch.no_grad():
                x -= 0.1 * x.grad
        seen.append(x)
    assert worst(*seen) < 1e-14
    assert torch.allclose(*seen, rtol=1e-14)


@on_ranks(2)
def test_a_latent_that_is_learned_stays_the_same_on_all_ranks():
    step = pipeline.step(micro_batches=2, split={"shift": None})(added_at_both_ends)
    latents = []
    for model in both():
        latents.append(leaf(0.1))
        optimizer = torch.optim.Adam([latents[-1]], lr=0.1)
        for _ in range(3):
            step(model, data(4), latents[-1])
            optimizer.step()
            optimizer.zero_grad()
    assert torch.allclose(*latents, rtol=1e-12)


class Scaled(nn.Module):
    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(WIDTH, WIDTH, dtype=DTYPE), scale

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * self.scale).tanh()


@on_ranks(2)
@pytest.mark.parametrize("is_given", [False, True])
def test_an_attribute_that_placed_modules_read_has_the_gradient_of_one_process_on_all_ranks(is_given):
    def step(model, x):
        loss = (model(x) * (model[0].scale if is_given else 1)).pow(2).mean()
        loss.backward()
        return loss.detach()

    seen = []
    for is_placed in (True, False):
        torch.manual_seed(0)
        scale = leaf(0.5)
        model = nn.Sequential(Scaled(scale), Scaled(scale))
        if is_placed:
            pipeline.place(model, tulle.init(pipe=-1, timeout=8)["pipe"], {"0": 0, "1": 1})
        for _ in range(2):
            pipeline.step(micro_batches=2)(step)(model, data(4))
        seen.append(scale)
    assert worst(*seen) < 1e-14


@on_ranks(2)
def test_a_transform_around_placed_modules_is_refused_on_all_ranks():
    model, _ = both()
    with pytest.raises(
        ModelError, match=r"'layers.0' is called within a transform of torch.func .*: do both inside one"
    ):
        torch.func.grad(lambda x: model(x).sum())(data(2))
    with pytest.raises(ModelError, match="within a transform"):
        torch.func.vmap(model)(data(2))
    assert torch.isfinite(model(data(2))).all()


@on_ranks(2)
def test_a_backward_of_all_ranks_to_what_stages_read_is_refused():
    model, _ = both()

    @pipeline.step(micro_batches=1, split={"shift": None})
    def step(model, x, shift):
        added_at_both_ends(model, x, shift)
        shift.pow(2).sum().backward()

    with pytest.raises(
        ModelError, match=r"a loss that no stage computes, of a tensor of shape \[2, 6\].*add that loss"
    ):
        step(model, data(2), leaf(0.5))
