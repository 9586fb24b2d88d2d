"""Step functions that run backward in other ways than once, from one loss: equal to one process, or refused."""

import copy
import time

import pytest
import torch
from pipeline_networks import WIDTH, make, worst_gradient
from torch import Tensor, nn
from torch.nn.utils import prune

import tulle
from ranks import on_ranks
from tulle import pipeline


class Heads(nn.Module):
    """Two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.one, self.other = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 3)
        self.shift = nn.Parameter(torch.linspace(0, 1, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(x).tanh()
        return self.one(x), self.other(x + self.shift)  # a parameter that is read between modules


def placed() -> tuple[nn.Module, nn.Module, tulle.Mesh]:
    mesh = tulle.init(pipe=-1)
    model = make(Heads)
    reference = copy.deepcopy(model)
    return pipeline.place(model, mesh["pipe"], {"body": 0, "one": 1, "other": 1}), reference, mesh


def in_turn(model: nn.Module, x: Tensor, wait_s: float) -> Tensor:
    """The first rank comes late to two gradients of one value."""
    one, other = model(x)
    time.sleep(wait_s)
    one.pow(2).mean().backward(retain_graph=True)
    other.pow(2).mean().backward()
    return one.sum()


def and_forward_again(model: nn.Module, x: Tensor) -> Tensor:
    model(x)[0].pow(2).mean().backward()
    loss = model(x * 2)[1].pow(2).mean()
    loss.backward()
    return loss


def one_by_one(model: nn.Module, x: Tensor) -> Tensor:
    first, second, third = (model(x * number)[1].pow(2).mean() for number in (1, 2, 3))
    second.backward()
    third.backward()
    model(x * 4)[1].pow(2).mean().backward()
    first.backward()
    return second


def by_a_critic(model: nn.Module, x: Tensor) -> Tensor:
    made = model.body(x)
    made = made + model.other(made).sum()  # made at both stages
    (model.one(made.detach()).mean() - model.one(x).mean()).backward()
    loss = model.one(made).pow(2).mean()
    loss.backward()
    return loss


def through_what_is_gone(model: nn.Module, x: Tensor) -> None:
    one, other = model(x)
    one.pow(2).mean().backward()
    other.pow(2).mean().backward()


def together(model: nn.Module, x: Tensor) -> Tensor:
    one, other = model(x)
    torch.autograd.backward([one.pow(2).mean(), other], [None, torch.ones_like(other)])
    torch.autograd.backward(model.body(x).sum())
    return one.sum()


def checked(function, *args, micro_batches: int = 1, schedule: str = "1f1b") -> float:
    model, reference, mesh = placed()
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    step = pipeline.step(micro_batches=micro_batches, schedule=schedule)(function)
    losses = step(model, x, *(arg(mesh.rank) for arg in args))
    expected = step(reference, x, *(0.0 for _ in args))
    torch.testing.assert_close(losses.stack(), expected.stack().detach(), rtol=1e-12, atol=0)
    return worst_gradient(model, reference)


def only_the_first_waits(rank: int) -> float:
    return 0.0 if rank else 0.2


@on_ranks(2)
def test_gradients_of_two_backwards_may_be_under_way_at_once():
    assert checked(in_turn, only_the_first_waits) < 1e-12


@on_ranks(2)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_forward_and_backward_again_equal_one_process(schedule):
    assert checked(and_forward_again, micro_batches=4, schedule=schedule) < 1e-12


@on_ranks(2)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("function", [one_by_one, by_a_critic])
def test_what_a_backward_does_not_come_to_is_left_for_another(function, schedule):
    assert checked(function, micro_batches=2, schedule=schedule) < 1e-12


@on_ranks(2)
def test_a_second_backward_through_one_graph_is_refused():
    model, _, _ = placed()
    with pytest.raises((tulle.TulleError, RuntimeError), match="retain_graph=True"):
        pipeline.step(micro_batches=1)(through_what_is_gone)(model, torch.ones(2, WIDTH, dtype=torch.float64))


@on_ranks(2)
def test_backward_of_several_losses_at_once_equals_one_process():
    assert checked(together, micro_batches=2) < 1e-12


def asks_for_a_gradient(model: nn.Module, x: Tensor) -> None:
    x = x.clone().requires_grad_()
    torch.autograd.grad(model(x)[0].sum(), x, create_graph=True)


def reads_a_gradient(model: nn.Module, x: Tensor) -> None:
    x = x.clone().requires_grad_()
    model(x)[0].sum().backward()
    x.grad.sign()


def reads_a_parameters_gradient(model: nn.Module, x: Tensor) -> Tensor:
    model(x)[0].sum().backward()
    assert model.other.weight.grad is None
    return model.body.weight.grad.norm() + model.one.bias.grad.sum()


@on_ranks(2)
@pytest.mark.parametrize("function", [asks_for_a_gradient, reads_a_gradient])
def test_gradients_of_which_ranks_have_a_part_are_refused(function):
    model, _, _ = placed()
    with pytest.raises(tulle.TulleError, match="between modules of a pipeline asks for gradients by"):
        pipeline.step(micro_batches=1)(function)(model, torch.ones(2, WIDTH, dtype=torch.float64))


def clips_them_all_at_once(model: nn.Module, x: Tensor) -> Tensor:
    sum(output.pow(2).mean() for output in model(x)).backward()
    return nn.utils.clip_grad_norm_(model.parameters(), 0.01, foreach=True)


@on_ranks(2)
def test_gradients_of_parameters_are_read_and_written_in_a_step():
    assert checked(reads_a_parameters_gradient) < 1e-12
    assert checked(clips_them_all_at_once) < 1e-12


def with_an_optimizer_of_its_own(model: nn.Module, x: Tensor) -> Tensor:
    assert all(one.is_leaf and one.grad_fn is None for one in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in range(2):
        loss = sum(output.pow(2).mean() for output in model(x))
        loss.backward()
        optimizer.step()
    return loss


@on_ranks(2)
def test_an_optimizer_is_made_in_a_step():
    assert checked(with_an_optimizer_of_its_own) < 1e-12


@on_ranks(2)
def test_a_pruned_model_is_placed():
    models = []
    for _ in range(2):
        models.append(make(Heads))
        for layer in (models[-1].body, models[-1].other):
            prune.l1_unstructured(layer, "weight", 0.5)
    model, reference = models
    pipeline.place(model, tulle.init(pipe=-1)["pipe"], {"body": 0, "one": 1, "other": 1})
    for one in models:
        pipeline.step(micro_batches=2)(and_forward_again)(one, torch.ones(4, WIDTH, dtype=torch.float64))
    assert worst_gradient(model, reference) < 1e-12
