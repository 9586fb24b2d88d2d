"""What loops do to gradients besides reading them gives the numbers of one process, or is refused."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import tulle
from gigabit import give_network
from raised_alike import every_rank_raises
from ranks import on_ranks
from tulle.errors import GradientError, ModelError
from tulle.plan import Plan
from tulle.tensor_parallel.linear import _watch_places

STEPS = 4
TOLERANCE = 1e-12
Loop = Callable[[nn.Module, Optimizer, Tensor], None]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 96), nn.Tanh(), nn.Linear(96, 96)).double()


def masks(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    """Gives gradients other memory, as programs of before `torch.no_grad()` do."""
    model(x).pow(2).mean().backward()
    for parameter in model.parameters():
        parameter.grad.data = parameter.grad.data * (parameter.data > 0)
    optimizer.step()
    optimizer.zero_grad()


def masks_and_zeroes(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    model(x).pow(2).mean().backward()
    for parameter in model.parameters():
        parameter.grad.data = torch.where(parameter.data > 0, parameter.grad.data, 0.0)
    optimizer.step()
    for parameter in model.parameters():
        parameter.grad.detach_()
        parameter.grad.zero_()


def keeps_what_shares_memory(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    """Gradients of two tasks in the layers that these share, as views, while those of the head stay."""
    shared = [*model[:3].parameters()]
    out = model(x)
    out[:, 0].pow(2).mean().backward(retain_graph=True)
    first = [parameter.grad.detach().view(-1) for parameter in shared]
    for parameter in shared:
        parameter.grad = None
    out[:, 1].mean().backward()
    second = [parameter.grad.detach().view(-1) for parameter in shared]
    agree = sum((one * other).sum() for one, other in zip(first, second, strict=True))
    for parameter, one, other in zip(shared, first, second, strict=True):
        parameter.grad.copy_((agree * one + 2 * other).view_as(parameter))
    optimizer.step()
    optimizer.zero_grad()


def trained(loop: Loop, mesh: tulle.Mesh | None, schedule: str) -> nn.Module:
    model = network()
    optimizer: Optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
    if mesh is not None:
        give_network(mesh["data"])
        model, optimizer = tulle.distribute(model, optimizer, mesh, plan=Plan(mesh.shape, schedule=schedule))
    for step in range(STEPS):
        x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        loop(model, optimizer, x.chunk(mesh.size)[mesh.rank] if mesh else x)
    return model


@on_ranks(2, 3)
@pytest.mark.parametrize("schedule", ["step", "read"])
@pytest.mark.parametrize("loop", [masks, masks_and_zeroes, keeps_what_shares_memory])
def test_gradients_that_move_or_are_kept_are_those_of_one_process(loop, schedule):
    model, reference = trained(loop, tulle.init(data=-1), schedule), trained(loop, None, schedule)
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(mine, theirs, rtol=TOLERANCE, atol=TOLERANCE)


def longer(model: nn.Module) -> None:
    model[4].weight.data = torch.cat([model[4].weight.data] * 2)
    model[4].bias.data = torch.cat([model[4].bias.data] * 2)


def shorter(model: nn.Module) -> None:
    """By what torch would broadcast to all of the gradient that there was."""
    model[4].bias.data = model[4].bias.data[:1].clone()


@on_ranks(2)
@pytest.mark.parametrize(("change", "now"), [(longer, r"\w+' is .*\[192"), (shorter, r"bias' is float64 \[1\]")])
def test_a_parameter_of_another_shape_is_named(change, now):
    mesh, model = tulle.init(data=-1), network()
    model, _ = tulle.distribute(model, SGD(model.parameters(), 0.1), mesh)
    model(torch.ones(2, 4).double()).mean().backward()
    model.zero_grad()
    change(model)
    with pytest.raises(ModelError, match=rf"the parameter '4.{now}"):
        model(torch.ones(2, 4).to(model[0].weight.dtype)).mean().backward()


@torch.no_grad()
def takes_away(parameter: Tensor) -> None:
    parameter.add_(parameter.grad, alpha=-0.1)
    parameter.grad = None


@on_ranks(2)
def test_a_hook_that_takes_gradients_of_one_rank_away_is_refused():
    mesh, model = tulle.init(data=-1), network()
    model, optimizer = tulle.distribute(model, SGD(model.parameters(), 0.1), mesh)
    x = torch.full((2, 4), 1.0 + mesh.rank, dtype=torch.float64)
    for is_first in (True, False):
        if not is_first:
            model(x).mean().backward()
            optimizer.zero_grad()
        put = copy.deepcopy(model) if is_first else model
        if is_first:
            put, _ = tulle.distribute(put, SGD(put.parameters(), 0.1), mesh)
        for parameter in put.parameters():
            parameter.register_post_accumulate_grad_hook(takes_away)
        with every_rank_raises(GradientError, "the gradient of '4.bias' was taken away by a hook within backward"):
            put(x).mean().backward()


@on_ranks(2)
def test_gradients_of_means_are_refused():
    mesh, model = tulle.init(data=-1), network()
    model, _ = tulle.distribute(model, SGD(model.parameters(), 0.1), mesh)
    x = torch.full((2, 4), 1.0 + mesh.rank, dtype=torch.float64)
    with every_rank_raises(
        GradientError, "gradients were asked for with create_graph=True, but the means over the ranks"
    ):
        model(x).pow(2).mean().backward(create_graph=True)
    gradients = torch.autograd.grad(model(x).pow(2).mean(), [*model.parameters()], create_graph=True)
    sum(gradient.pow(2).sum() for gradient in gradients).backward()


@on_ranks(2)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_backward_that_is_compiled_as_a_whole_is_refused():
    _watch_places()  # as where a layer was split: torch registers a module while it compiles
    mesh, model = tulle.init(data=-1), network()
    model, _ = tulle.distribute(model, SGD(model.parameters(), 0.1), mesh)

    def work() -> None:
        model(torch.ones(2, 4).double()).mean().backward()

    with torch._dynamo.config.patch(compiled_autograd=True), pytest.raises(GradientError, match="compiled as a whole"):
        torch.compile(work, backend="eager")()
