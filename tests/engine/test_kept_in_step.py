"""Parameters are kept in step, or the step raises: two models in one backward; what is dropped, thawed or replaced."""

import copy
import gc
import weakref

import pytest
import torch
from plain_training import dummy
from torch import Tensor, nn

import models
import tulle
from models import Words, batches, build
from ranks import on_ranks
from tulle.errors import GradientError, ModelError


class Half(nn.Module):
    """One of two models of which each rank uses another part."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.into, self.out, self.extra = nn.Linear(4, inner), nn.Linear(inner, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, *, skips: bool) -> Tensor:
        """`[samples, 4]` to the same."""
        hidden = self.out(self.into(x))
        return hidden if skips else self.extra(hidden)


@on_ranks(2)
@pytest.mark.parametrize("inner", [(7, 7), (7, 11)], ids=["alike", "unlike"])
def test_two_models_in_one_backward_do_not_cross_their_messages(inner):
    mesh = tulle.init(data=-1)
    pair = [build(lambda size=size: Half(size), size) for size in inner]
    references = copy.deepcopy(pair)
    for model in pair:
        tulle.distribute(model, dummy(model), mesh)
    x = torch.randn(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for step in range(4):
        skips = [[rank == step % 2, rank == 0] for rank in range(2)]  # the first model's, then the second's

        def loss(models_: list[nn.Module], rank: int, skips: list[list[bool]] = skips) -> Tensor:
            first, second = models_
            return second(first(x[rank], skips=skips[rank][0]), skips=skips[rank][1]).pow(2).mean()

        for one in (*pair, *references):
            one.zero_grad()
        loss(pair, mesh.rank).backward()
        (sum(loss(references, rank) for rank in range(2)) / 2).backward()
        for model, reference in zip(pair, references, strict=True):
            for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
                assert torch.allclose(mine.grad, theirs.grad, rtol=1e-12)


@on_ranks(2)
def test_parts_of_a_container_that_was_dropped_are_still_kept_in_step():
    mesh = tulle.init(data=-1)
    parts = [nn.Linear(3, 3), nn.Linear(3, 1)]
    tulle.distribute(nn.ModuleList(parts), torch.optim.SGD([*parts[0].parameters(), *parts[1].parameters()], 0.1), mesh)
    gc.collect()
    parts[1](parts[0](torch.full((2, 3), float(mesh.rank)))).mean().backward()
    assert parts[0].bias.grad is not None
    alone = parts[0].weight.grad.clone()
    torch.distributed.broadcast(alone, src=0)
    assert torch.equal(alone, parts[0].weight.grad)


@on_ranks(1, 2)
def test_a_distributed_model_that_is_dropped_is_freed():
    mesh = tulle.init(data=-1)

    def use() -> weakref.ref[nn.Module]:
        model = build(Words, 0)
        model, _ = tulle.distribute(model, models.sgd(model), mesh)
        model(batches(1, 4)[0]).backward()
        return weakref.ref(model)

    left = use()
    gc.collect()
    assert left() is None


@on_ranks(2)
def test_a_parameter_that_is_unfrozen_later_is_not_trained_apart_in_silence():
    mesh = tulle.init(data=-1)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].requires_grad_(requires_grad=False)
    model, optimizer = tulle.distribute(model, torch.optim.SGD(model.parameters(), 0.1), mesh)
    model[0].requires_grad_(requires_grad=True)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ModelError, match=r"the parameter '0.weight', of shape \[2, 2\], has a gradient that is not"):
        optimizer.step()
    optimizer.zero_grad()


def replaced(model: nn.Module) -> None:
    model[1] = nn.Linear(2, 1)


def assigned(model: nn.Module) -> None:
    model.load_state_dict(model.state_dict(), assign=True)


@on_ranks(2)
def test_parameters_that_take_the_place_of_others_are_not_trained_apart_in_silence():
    mesh = tulle.init(data=-1)
    for change, name in ((replaced, "1.weight"), (assigned, "0.weight")):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        tulle.distribute(model, torch.optim.SGD(model.parameters(), 0.1), mesh)
        change(model)
        trained = model[1:] if change is replaced else model
        optimizer = torch.optim.SGD(trained.parameters(), 0.1)
        model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(ModelError, match=f"SGD was to step '{name}' with the gradient of one rank"):
            optimizer.step()
    alone = nn.Linear(2, 1)  # of no model that was distributed
    alone(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(alone.parameters(), 0.1).step()


@on_ranks(2)
def test_of_two_models_in_one_backward_both_end_where_one_has_a_gradient_that_is_not_finite():
    mesh = tulle.init(data=-1)
    pair = [nn.Linear(2, 2), nn.Linear(2, 1)]
    for model in pair:
        tulle.distribute(model, dummy(model), mesh, check_finite=True)
    x = torch.ones(1, 2)
    with pytest.raises(GradientError, match="'weight' has 4 NaN"):
        pair[1](pair[0](x * float("nan"))).sum().backward()
    for model in pair:
        model.zero_grad()
    pair[1](pair[0](x)).sum().backward()


def mean_gradient(weight: nn.Parameter, mesh: tulle.Mesh) -> float:
    """Of a loss whose gradient is the rank."""
    weight.grad = None
    (weight * mesh.rank).sum().backward()
    assert weight.grad is not None
    return weight.grad.mean().item()


@on_ranks(2)
def test_parameters_are_kept_in_step_as_long_as_their_optimizer_is_there_and_not_trained_apart_afterwards():
    mesh = tulle.init(data=-1)
    weight = nn.Parameter(torch.ones(2, 2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    tulle.distribute(nn.ParameterList([weight]), optimizer, mesh)
    gc.collect()
    assert mean_gradient(weight, mesh) == 0.5
    optimizer.step()
    del optimizer
    gc.collect()
    assert mean_gradient(weight, mesh) == mesh.rank
    with pytest.raises(ModelError, match=r"SGD was to step a parameter of shape \[2, 2\] .* nobody holds any more"):
        torch.optim.SGD([weight], lr=0.1).step()


@on_ranks(2)
def test_a_model_of_another_dtype_by_now_is_kept_in_step():
    """As `model.float()` makes it, with gradients from before, too; parts of one are refused by name."""
    mesh = tulle.init(data=-1)
    model, reference = (build(lambda: Half(7), 0) for _ in range(2))
    tulle.distribute(model, dummy(model), mesh)
    x = torch.randn(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float64, torch.float32, torch.float64):
        for one in (model, reference):
            one.to(dtype)
        for _ in range(2):
            model(x[mesh.rank].to(dtype), skips=False).pow(2).mean().backward()
            (sum(reference(x[rank].to(dtype), skips=False).pow(2).mean() for rank in range(2)) / 2).backward()
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            assert mine.grad.dtype == dtype
            assert torch.allclose(mine.grad, theirs.grad, rtol=1e-12 if dtype == torch.float64 else 1e-4, atol=1e-6)
        for one in (model, reference):
            one.zero_grad(set_to_none=dtype == torch.float64)
    model.out.float()
    with pytest.raises(GradientError, match=r"torch\.float(32|64) by now, but their gradients travel"):
        (model.into(x[mesh.rank]).sum() + model.out(torch.ones(2, 7)).sum() + model.extra(x[0]).sum()).backward()
