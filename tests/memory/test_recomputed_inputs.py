"""A module that runs again in backward finds the tensors that it was given as they were, whoever wrote in them."""

import pytest
import torch
from saving_models import alike
from torch import nn
from torch.utils._pytree import tree_leaves

from tulle.errors import GradientError, ModelError
from tulle.memory import inputs, recompute


class Adding(nn.Module):
    """Adds a control to what it is given, in place, as blocks of diffusers' ControlNet-XS do."""

    def __init__(self):
        super().__init__()
        self.control, self.linear, self.adds = nn.Linear(4, 4), nn.Linear(4, 4), True

    def forward(self, hidden, controls, scale=1.0):
        for control in controls if self.adds else []:
            hidden += self.control(control) * scale
        return self.linear(hidden.tanh())


def added(*, recomputed, is_keyword=False, backwards=1):
    torch.manual_seed(0)
    model, found = nn.ModuleList(Adding() for _ in range(2)).double(), []
    recompute(model, ["0", "1"] if recomputed else [])
    for _ in range(2):
        x, controls = (torch.randn(3, 4, dtype=torch.double, requires_grad=True) for _ in range(2))
        hidden = x * 1.0
        for block in model:
            given = (controls, controls.sin())
            hidden = block(hidden=hidden, controls=given) if is_keyword else block(hidden, given)
        for turn in range(backwards):
            hidden.pow(2).sum().backward(retain_graph=turn + 1 < backwards)
        found += [x.grad, controls.grad, *(p.grad.clone() for p in model.parameters())]
    return dict(enumerate(found))


@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("is_keyword", [False, True])
def test_a_tensor_that_forward_writes_in_is_as_it_was_when_it_runs_again(is_keyword, backwards):
    options = {"is_keyword": is_keyword, "backwards": backwards}
    assert alike(added(recomputed=True, **options), added(recomputed=False, **options))


def test_the_twin_that_leaves_tensors_as_they_were_written_in_is_found(monkeypatch):
    monkeypatch.setattr(inputs.Inputs, "as_they_were", lambda _self, arguments, keywords: (arguments, keywords))
    with pytest.raises((AssertionError, RuntimeError)):
        assert alike(added(recomputed=True), added(recomputed=False))


def test_what_is_written_in_later_calls_alone_or_by_others_after_forward_is_refused():
    block, x = Adding(), torch.randn(3, 4)
    recompute(block, [""])
    block.adds = False
    late = block(x, (x,)).sum()
    x.add_(1)
    with pytest.raises(GradientError, match=r"shape \[3, 4\] that a .*Adding was given, which runs again in backward"):
        late.backward()
    block = Adding()
    recompute(block, [""])
    block.adds = False
    block(x, (x,)).sum().backward()
    block.adds = True
    with pytest.raises(
        ModelError, match=r"Adding, which is to run again in backward, has written in place in a tensor"
    ):
        block(x, (x,))


class Doubling(nn.Module):
    def forward(self, x, y):
        x += 1
        return x * y


def test_a_tensor_that_was_given_twice_and_is_written_in_is_one_when_forward_runs_again():
    grads = []
    for recomputed in (False, True):
        model, x = nn.Sequential(Doubling()), torch.arange(3.0, requires_grad=True)
        recompute(model, ["0"] if recomputed else [])
        given = x * 1.0
        model[0](given, given).sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


def test_torch_is_told_of_all_tensors_whose_device_draws_for_them(monkeypatch):
    told, own = [], inputs.checkpoint

    def telling(function, *arguments, **options):
        told.append(sum(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(arguments)))
        return own(function, *arguments, **options)

    monkeypatch.setattr(inputs, "checkpoint", telling)
    block, x = Adding(), torch.randn(3, 4)
    recompute(block, [""])
    block.adds = False
    for _ in range(2):
        block(hidden=x, controls=(x, x)).sum().backward()
    assert told == [3, 3]
