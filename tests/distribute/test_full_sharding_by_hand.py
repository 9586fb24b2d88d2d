"""What loops do by hand to parameters and gradients that are shared out gives the numbers of one process."""

import copy
import pickle
import sys

import axes_models
import pytest
import torch
from axes_models import build, distributed, worst_difference
from sharded_plans import FULL, planned
from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import tulle
from ranks import on_ranks
from tulle.errors import GradientError, ModelError
from tulle.memory.shards import SHARDABLE
from tulle.plan import Plan
from tulle.tables import ShardGradient


def perturbed(model, x):
    """Gradients at weights a small step away, as sharpness-aware minimization takes them."""
    kept = [p.data.clone() for p in model.parameters()]
    model(x).pow(2).mean().backward()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.sign(p.grad), alpha=0.01)
    model.zero_grad()
    model(x).pow(2).mean().backward()
    for p, before in zip(model.parameters(), kept, strict=True):
        p.data = before


def loop(model, optimizer, rank=0, size=1):
    """What people do to parameters, one by one, besides stepping them."""
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    shadow = [p.data.clone() for p in model.parameters()]
    for step in range(3):
        x = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step)).chunk(size)[rank]
        perturbed(model, x)
        sum(0.01 * p.norm(1) + 0.01 * (p**2).sum() for p in model.parameters()).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.02)
        for p in model.parameters():
            assert torch.isfinite(p).all()
            assert torch.isfinite(p.grad).all()
            assert p.grad.norm() >= 0.0
            assert p.to(p.device).numel() == p.shape.numel() == p.detach().reshape(-1).size(0)
            assert p.is_contiguous()
            assert p.stride() == p.grad.stride()
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        average.update_parameters(model)
        with torch.no_grad():
            for p, kept in zip(model.parameters(), shadow, strict=True):
                p.data.clamp_(-0.4, 0.4)
                p[p.abs() < 0.02] = 0.0
                p.data[torch.isnan(p.data)] = 0.0
                kept.lerp_(p, 0.1)
    averaged = average.module.state_dict()
    for p, kept in zip(model.parameters(), shadow, strict=True):
        p.data.copy_(kept)
    return {f"average {name}": value for name, value in averaged.items()} | dict(model.state_dict())


@on_ranks(2)
def test_what_loops_do_to_parameters_number_by_number_is_one_process():
    def made():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()
        return model, torch.optim.Adam(model.parameters(), lr=0.05, eps=1e-3)

    mesh = tulle.init(data=-1)
    model, optimizer = made()
    tulle.distribute(model, optimizer, mesh, plan=Plan(mesh.shape, memory=FULL))
    assert worst_difference(loop(model, optimizer, mesh.rank, mesh.size), loop(*made())) < 1e-12


@on_ranks(2)
def test_one_rank_may_copy_the_model_alone():
    mesh = tulle.init(data=-1)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tulle.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), mesh, plan=Plan(mesh.shape, memory=FULL))
    copied = copy.deepcopy(model) if mesh.rank == 0 else None
    model(torch.ones(2, 4)).sum().backward()
    assert model[0].weight.grad is not None
    assert copied is None or copied[0].weight.grad is None


@on_ranks(2)
def test_optimizers_made_later_are_one_process_or_refused():
    mesh, kinds = tulle.init(data=-1), [*vars(torch.optim).values()]
    for kind in [one for one in kinds if isinstance(one, type) and issubclass(one, Optimizer)]:
        if kind in (Optimizer, torch.optim.SparseAdam):  # takes sparse gradients only, and says so
            continue
        torch.manual_seed(0)
        reference = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, 4, bias=False)).double()
        model = copy.deepcopy(reference)
        tulle.distribute(model, torch.optim.SGD(model.parameters()), mesh, plan=Plan(mesh.shape, memory=FULL))
        x = torch.randn(4, 4, dtype=torch.float64)
        for one, mine in ((model, x.chunk(2)[mesh.rank]), (reference, x)):
            optimizer = kind(one.parameters(), lr=0.01)
            for _ in range(2):
                one(mine).pow(2).mean().backward()
                if one is model and kind not in SHARDABLE:
                    with pytest.raises(ModelError, match=f"^{kind.__name__} does not treat every element by itself"):
                        optimizer.step(lambda: 0.0)
                    break
                optimizer.step()
                optimizer.zero_grad()
            if kind not in SHARDABLE:
                break
        else:
            assert worst_difference(model.state_dict(), reference.state_dict()) < 1e-12, kind


ASKED = {
    "norm": lambda g: g.norm(),
    "torch.norm, 1": lambda g: torch.norm(g, p=1),
    "vector_norm": lambda g: torch.linalg.vector_norm(g),
    "linalg.norm": lambda g: torch.linalg.norm(g),
    "the usual snippet": lambda g: g.detach().data.norm(2),
    "inf": lambda g: g.norm(float("inf")),
    "pow": lambda g: g.pow(2).sum(),
    "**": lambda g: (g**2).sum().sqrt(),
    "product": lambda g: (g * g).sum(),
    "max": lambda g: g.detach().abs().max(),
    "mean": lambda g: g.mean(),
    "min": lambda g: g.min(),
    "std": lambda g: g.std(),
    "var": lambda g: torch.var(g, unbiased=False) + g.var(False) + g.var(correction=0),
    "all": lambda g: torch.isfinite(g).all(),
    "any": lambda g: (g / 0).isinf().any(),
    "flat": lambda g: g.view(-1).norm() + g.reshape(-1).abs().max() + torch.dot(g.ravel(), 2 * g.flatten()),
    "put together": lambda g: torch.cat([g.flatten(), g.abs().view(-1)]).norm() + torch.stack([g, 2 * g]).sum(),
    "as they are": lambda g: torch.tensor(0.0) if g.add(1.0).tolist() and g.clone().dim() else g,
}


@on_ranks(2)
def test_gradients_are_plain_within_a_step_and_not_to_hooks(monkeypatch):
    mesh, model, module = tulle.init(data=-1), nn.Linear(4, 4), sys.modules[torch.optim.SGD.__module__]
    kernel = module.sgd
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    within, around = [], []

    def look(*_):
        around.append(type(model.weight.grad))

    def step(parameters, gradients, *args, **kwargs):
        within.append(type(gradients[0]))
        return kernel(parameters, gradients, *args, **kwargs)

    monkeypatch.setattr(module, "sgd", step)
    optimizer.register_step_post_hook(look)
    tulle.distribute(model, optimizer, mesh, plan=Plan(mesh.shape, memory=FULL))
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.register_step_pre_hook(look)
    optimizer.step()
    optimizer.step()
    assert within == [torch.Tensor, ShardGradient, torch.Tensor], "of a new hook it is known after one step"
    assert around == [ShardGradient] * 5


def by_hand(parameters):
    total = torch.norm(torch.stack([p.grad.norm() for p in parameters if p.grad is not None]))
    for p in parameters:
        p.grad.mul_((0.1 / (total + 1e-6)).clamp(max=1.0))
    return total.item()


@on_ranks(2)
@pytest.mark.parametrize("how", ["full_shard", "rows", "columns"])
def test_norms_of_gradients_are_those_of_the_whole(how):
    mesh, reference = tulle.init(data=-1), build("dense words")
    plan = planned("words", mesh.shape, FULL) if how == "full_shard" else {"words.weight": how}
    model, _, place = distributed("dense words", mesh.shape, plan=plan)
    for one, at in ((model, place), (reference, (0, 1))):
        batch = axes_models.batch_of(0, *at)
        one(batch).backward()
    for (name, mine), (_, theirs) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        for asked, ask in ASKED.items():
            if how == "full_shard" or asked not in (
                "mean",
                "min",
                "std",
                "var",
            ):  # some places of a part of rows stay empty
                assert ask(mine.grad).item() == pytest.approx(ask(theirs.grad).item(), rel=1e-10), (name, asked)
    assert by_hand([*model.parameters()]) == pytest.approx(by_hand([*reference.parameters()]), rel=1e-12)
    gradient = next(p.grad for p in model.parameters() if type(p.grad) is not torch.Tensor and p.dim() == 2)
    for along in (lambda g: g.norm(dim=gradient.cut), lambda g: (g**2).mean(gradient.cut, keepdim=True)):
        with pytest.raises(
            GradientError, match=f"was asked of a gradient along dimension {gradient.cut}, of which this"
        ):
            along(gradient)
    joined = torch.cat([gradient.flatten(), torch.ones(1).to(gradient)])
    for of_all in (torch.Tensor.norm, torch.sum, lambda g: nn.utils.get_total_norm([2 * g])):
        with pytest.raises(GradientError, match="of some of which this rank has a part and of others all"):
            of_all(joined)
    assert gradient.norm(dim=1 - gradient.cut).shape == gradient.shape[gradient.cut : gradient.cut + 1]
    for plain in (copy.deepcopy(gradient), pickle.loads(pickle.dumps(gradient)), gradient + 0):
        assert type(plain) is torch.Tensor
        assert plain.tolist() == gradient.tolist()
