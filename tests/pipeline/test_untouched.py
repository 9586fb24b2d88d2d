"""What a trial run leaves in a model: nothing, not even a write that changes nothing."""

from __future__ import annotations

import torch
from torch import nn

from tulle.pipeline.untouched import undoing, untouched


def test_batch_norms_statistics_are_put_back_though_their_version_does_not_tell_of_the_write():
    model = nn.BatchNorm1d(3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with untouched(model):
        model(torch.randn(5, 3))
        assert model.num_batches_tracked == 1
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_buffer_that_was_not_written_in_can_still_be_read_in_backward():
    model = nn.Module()
    scale = torch.tensor([2.0, 3.0])
    model.register_buffer("scale", scale)
    x = torch.ones(2, requires_grad=True)
    undo = undoing(model)
    y = x * scale
    undo()
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 3.0]


def test_attributes_that_need_a_gradient_have_the_one_of_before():
    model = nn.Sequential(nn.Module(), nn.Linear(2, 1))
    model[0].latent = latent = torch.ones(2, requires_grad=True)
    latent.grad = torch.full((2,), 3.0)
    with untouched(model):
        model[1](latent).sum().backward()
    assert latent.grad.tolist() == [3.0, 3.0]


class Registering(nn.Module):
    """Registers a buffer and a parameter when it is first called, and sets a parameter anew."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.late = nn.Parameter(torch.ones(2)), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.register_buffer("mean", x.mean(0), persistent=False)
        self.scale, self.late = nn.Parameter(x.mean(0)), nn.Parameter(x.mean(0))
        return x


def test_what_a_forward_registers_goes_with_the_trial():
    model = Registering()
    scale = model.scale
    with untouched(model):
        model(torch.randn(3, 2))
        assert model.late is not None
        assert hasattr(model, "mean")
    assert list(model.state_dict()) == ["scale"]
    assert model.scale is scale
    assert model.late is None
    model.register_buffer("mean", torch.zeros(2))
    assert list(model.state_dict()) == ["scale", "mean"]


class Observing(nn.Module):
    """Gives its buffer a number for each channel that it sees, in place, as observers of quantization do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("least", torch.tensor([]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        least = x.detach().amin(0)
        self.least.resize_(least.shape)
        self.least.copy_(least)
        return x


def test_a_buffer_that_forward_resizes_has_its_shape_again():
    model = Observing()
    with untouched(model):
        model(torch.randn(4, 3))
        assert model.least.shape == (3,)
    assert model.least.shape == (0,)
