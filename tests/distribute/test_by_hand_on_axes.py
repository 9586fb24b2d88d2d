"""Gradients that the program sets past backward, on meshes that split the model, give the numbers of one process."""

import pytest
import torch
from axes_models import MICRO_BATCHES, STEPS, batch_of, build, distributed, optimizers, train_step, worst_difference

import tulle
from ranks import on_ranks
from tulle.errors import ModelError


def halves(model, batch):
    """Gradients that are others than those that backward gave."""
    train_step(model, batch)
    for p in model.parameters():
        if p.grad is not None:
            p.grad = p.grad * 0.5


def writes(model, batch):
    """The same, in place."""
    train_step(model, batch)
    for p in model.parameters():
        if p.grad is not None:
            p.grad.copy_(p.grad * 0.5)


def adds_up(model, batch):
    """Sums of two backwards, kept aside in between."""
    train_step(model, batch)
    kept = {p: p.grad for p in model.parameters() if p.grad is not None}
    for p in model.parameters():
        p.grad = None
    train_step(model, {name: value.flip(0) for name, value in batch.items()})
    for p, before in kept.items():
        p.grad = before if p.grad is None else before + p.grad


@tulle.step(micro_batches=MICRO_BATCHES)
def grad_step(model, batch):
    loss = model(batch)
    parameters = [p for p in model.parameters() if p.requires_grad]
    for p, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        p.grad = gradient / MICRO_BATCHES if p.grad is None else p.grad + gradient / MICRO_BATCHES
    return loss


def asks(model, batch):
    """Without backward."""
    grad_step(model, batch)


def trained(model, several, habit, rank=0, size=1):
    norms = []
    for step in range(STEPS):
        habit(model, batch_of(step, rank, size))
        norms.append(float(tulle.clip_grad_norm_(model, 0.5)))
        for one in several:
            one.step()
            one.zero_grad()
    return norms


@on_ranks(4)
@pytest.mark.parametrize(
    ("shape", "kind", "habits"),
    [
        ({"data": 2, "model": 2}, "stack", [writes, asks]),
        ({"data": 2, "pipe": 2}, "dense words", [halves, adds_up]),
        ({"pipe": 2, "model": 2}, "stack", [halves]),
    ],
    ids=["model", "pipe", "both"],
)
def test_gradients_set_by_hand_on_a_mesh_are_those_of_one_process(shape, kind, habits):
    for habit in habits:
        model, several, place = distributed(kind, shape)
        norms = trained(model, several, habit, *place)
        reference = build(kind)
        expected = trained(reference, optimizers(reference), habit)
        assert norms == pytest.approx(expected, rel=1e-12, abs=0), habit
        whole = tulle.full_state_dict(model, everywhere=True)
        assert worst_difference(whole, reference.state_dict()) < 1e-12, habit


@on_ranks(2)
def test_of_a_pipeline_gradients_are_asked_for_by_backward():
    model, _, place = distributed("dense words", {"pipe": 2})
    with pytest.raises(ModelError, match=r"torch.autograd.grad.* take loss.backward\(\), and set .grad afterwards"):
        grad_step(model, batch_of(0, *place))
