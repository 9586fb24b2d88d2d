"""Activations that wait on the host: bitwise the same numbers, and nothing left behind."""

import gc
import weakref

import pytest
import torch
from saving_models import alike, batch, gradients, layers
from torch import nn

from tulle.errors import GradientError, ModelError
from tulle.memory import offload, recompute

NAMES = ["0", "1", "2", "3"]


@pytest.mark.parametrize("horizon", [0, 1, 4])
def test_gradients_are_bitwise_the_same(horizon):
    model = layers()
    expected = gradients(model, batch(0))
    offloading = offload(model, NAMES, horizon=horizon, smallest_bytes=0)
    assert alike(gradients(model, batch(0)), expected)
    assert offloading.moved_bytes > 4 * 12 * 16 * 8  # more than each layer's input
    assert alike(gradients(model, batch(0)), expected)


def test_with_recomputation_only_inputs_move():
    model = layers()
    expected = gradients(model, batch(0))
    recompute(model, NAMES)
    offloading = offload(model, NAMES, smallest_bytes=0)
    assert alike(gradients(model, batch(0)), expected)
    assert offloading.moved_bytes == 4 * 12 * 16 * 8


def test_what_two_operations_save_moves_once_and_parameters_stay():
    model = layers(1)
    moved = {}
    for samples in (8, 16):
        model = layers(1)
        offloading = offload(model, ["0"], smallest_bytes=0)
        gradients(model, batch(0, samples=samples))
        moved[samples] = offloading.moved_bytes
    assert moved[16] == 2 * moved[8]  # nothing that does not grow with the batch


class Conjugating(nn.Module):
    """Saves one memory twice, the second time with the other sign."""

    def forward(self, x):
        numbers = torch.complex(x, x.sin())
        return numbers.imag * x.cos() + numbers.conj().imag.exp() * numbers.conj().imag


def test_one_memory_that_is_saved_with_either_sign_comes_back_so():
    model, x = nn.Sequential(Conjugating()), torch.randn(5, dtype=torch.double, requires_grad=True)
    expected = torch.autograd.grad(model(x).sum(), x)
    offload(model, ["0"], smallest_bytes=0)
    assert torch.equal(*torch.autograd.grad(model(x).sum(), x), *expected)


def test_calls_let_go_of_what_they_saved_when_the_graph_goes():
    model = layers()
    offloading = offload(model, NAMES, smallest_bytes=0)
    output = model(batch(0))
    last = offloading._last
    assert last is not None
    assert last() is not None
    del output
    gc.collect()
    assert last() is None
    assert isinstance(last, weakref.ref)


def test_small_tensors_stay():
    model = layers()
    offloading = offload(model, NAMES)
    gradients(model, batch(0))
    assert offloading.moved_bytes == 0


def test_a_name_that_is_not_there_is_refused():
    with pytest.raises(ModelError, match=r"memory\.offload was given 'x', but the Sequential has no module"):
        offload(layers(), ["x"])


@pytest.mark.gpu
def test_on_a_gpu_what_forward_keeps_is_on_the_host():
    expected = gradients(layers(8, 256).cuda(), batch(0, 4096, 256).cuda())
    model, x = layers(8, 256).cuda(), batch(0, 4096, 256).cuda()
    plain = layers(8, 256).cuda()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    kept = plain(x)
    whole = torch.cuda.memory_allocated() - before
    del kept
    offload(model, [str(number) for number in range(8)])
    assert alike(gradients(model, x), expected)
    model.zero_grad()
    before = torch.cuda.memory_allocated()
    kept = model(x)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < 0.3 * whole
    del kept


def test_memory_of_parameters_stays_where_it_has_become_another():
    model = layers()
    expected = gradients(model, batch(0))
    offloading = offload(model, NAMES, smallest_bytes=0)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    moved = []
    for samples in (8, 16):
        offloading.moved_bytes = 0
        gradients(model, batch(0, samples=samples))
        moved.append(offloading.moved_bytes)
    assert moved[1] == 2 * moved[0]  # nothing that does not grow with the batch
    assert alike(gradients(model, batch(0)), expected)


def test_what_is_changed_between_forward_and_backward_is_found():
    model = layers(1)
    offload(model, ["0"], smallest_bytes=0)
    loss = model(batch(0)).sum()
    with torch.no_grad():
        model[0].down.weight.mul_(2)
    with pytest.raises(GradientError, match="was changed in place after forward"):
        loss.backward()


def test_a_graph_whose_backward_nobody_asked_for_goes_with_what_it_gave():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())  # tanh saves what it gives
    offload(model, ["1"])
    model(torch.ones(2, 4))
    weight = weakref.ref(model[0].weight)
    del model
    gc.collect()
    assert weight() is None
