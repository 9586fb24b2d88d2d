"""What loops do by hand to parameters and gradients that are shared out gives the numbers of one process."""

import copy
import pickle
import sys
import weakref
from dataclasses import replace

import axes_models
import pytest
import torch
import torch.distributed.checkpoint as dcp
from axes_models import build, distributed, worst_difference
from sharded_plans import FULL, planned
from torch import nn
from torch.distributed.checkpoint import state_dict
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import tulle
from ranks import on_ranks
from tulle import tensor_parallel
from tulle.errors import CheckpointError, GradientError, ModelError
from tulle.parts import Part
from tulle.plan import Memory, Plan
from tulle.tables import ShardGradient
from tulle.traits import SHARDABLE


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
            assert p.to(p.device).shape.numel() == p.shape.numel() == p.detach().reshape(-1).size(0)
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
def test_averages_that_write_into_states_are_one_process():
    """The habit of timm and of detectors: of a plain model a state is the parameters' own memory, by all names."""

    def trained(model, optimizer, rank=0, size=1):
        average = copy.deepcopy(model)
        for step in range(3):
            x = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step)).chunk(size)[rank]
            model(x).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            ours, theirs = average.state_dict(), model.state_dict()
            torch._foreach_lerp_([*ours.values()], [*theirs.values()], weight=0.2)
            for name, value in average.state_dict().items():
                value *= 0.9
                value += 0.1 * theirs[name].detach()
            theirs["0.weight"].data[1:].chunk(2, dim=1)[1].clamp_(max=0.1)  # a view, past the counter
        return {f"average {name}": value for name, value in average.state_dict().items()} | model.state_dict()

    def made():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()
        return model.append(model[0]), torch.optim.SGD(model.parameters(), lr=0.1)

    expected = trained(*made())
    for axes, memory in (({"data": 2}, FULL), ({"data": 1, "model": 2}, Memory())):
        mesh, (model, optimizer) = tulle.init(**axes), made()
        tulle.distribute(model, optimizer, mesh, plan=Plan(mesh.shape, memory=memory))
        assert any(isinstance(p, Part) for p in model.parameters())
        assert worst_difference(trained(model, optimizer, mesh["data"].rank, mesh["data"].size), expected) < 1e-12
        plain = made()[0]
        plain.load_state_dict(model.state_dict(), assign=True)
        assert {type(p) for p in plain.parameters()} == {nn.Parameter}
        copied, kept = copy.deepcopy(model.state_dict()), pickle.loads(pickle.dumps(model.state_dict()))
        assert {type(value) for value in (*copied.values(), *kept.values())} == {torch.Tensor}
        forgotten = [weakref.ref(value) for value in model.state_dict().values()]
        assert not any(reference() is not None for reference in forgotten)


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
            optimizer = kind(one.parameters(), lr=0.01, **{"fused": True} if kind is torch.optim.AdamW else {})
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


@on_ranks(2)
@pytest.mark.parametrize("how", ["full_shard", "model", "pipe", "rows"])
def test_an_optimizer_that_is_made_later_loads_states_of_wholes(how):
    shape = {how: 2} if how in ("model", "pipe") else {"data": 2}
    reference = build("dense words")
    kept = train(reference, torch.optim.Adam(reference.parameters(), 0.01, eps=1e-2))
    mesh, model = tulle.init(**shape), build("dense words")
    stages = {"words": 0, "tags": 0, "out": 1} | {f"layers.{n}": n // 2 for n in range(4)} if how == "pipe" else {}
    plan = (
        {"words.weight": "rows"}
        if how == "rows"
        else planned("dense words", shape, FULL if how == "full_shard" else Memory())
    )
    plan = replace(plan, stages=stages) if stages else plan
    tulle.distribute(model, torch.optim.SGD(model.parameters(), 0.1), mesh, plan=plan)
    place = (mesh["data"].rank, 2) if "data" in shape else (0, 1)
    for loads in range(2):
        model.load_state_dict(kept["model"])
        reference.load_state_dict(kept["model"])
        if not loads:
            ours = torch.optim.Adam(model.parameters(), 0.01, eps=1e-2)
            theirs = torch.optim.Adam(reference.parameters(), 0.01, eps=1e-2)
        for one, optimizer, at in ((model, ours, place), (reference, theirs, (0, 1))):
            optimizer.load_state_dict(copy.deepcopy(kept["optimizer"]))
            train(one, optimizer, *at)
        assert worst_difference(tulle.full_state_dict(model, everywhere=True), reference.state_dict()) < 1e-12


class Lookahead(Optimizer):
    """Half-way back every other step, as a wrapper that makes hooks of steps alone (timm's)."""

    def __init__(self, base):
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}
        self.base, self.param_groups, self.defaults, self.state = base, base.param_groups, base.defaults, {}
        self.slow, self.steps = [p.detach().clone() for group in base.param_groups for p in group["params"]], 0
        self._patch_step_function()

    @torch.no_grad()
    def step(self):
        self.base.step()
        self.steps += 1
        for fast, slow in zip([p for group in self.param_groups for p in group["params"]], self.slow, strict=True):
            if self.steps % 2 == 0:
                slow.lerp_(fast, 0.5)
                fast.copy_(slow)

    def state_dict(self):
        return self.base.state_dict()


@on_ranks(2)
def test_a_wrapper_without_hooks_may_be_put_around_an_optimizer_afterwards():
    for shape, memory in (({"data": 2}, Memory()), ({"data": 2}, FULL), ({"model": 2}, Memory())):
        reference, model, mesh = build("dense words"), build("dense words"), tulle.init(**shape)
        theirs, ours = (torch.optim.Adagrad(one.parameters(), 0.1) for one in (reference, model))
        tulle.distribute(model, ours, mesh, plan=planned("dense words", shape, memory))
        train(model, Lookahead(ours), *((mesh["data"].rank, 2) if "data" in shape else (0, 1)))
        train(reference, Lookahead(theirs), 0, 1)
        assert worst_difference(tulle.full_state_dict(model, everywhere=True), reference.state_dict()) < 1e-12


def train(model, optimizer, *place):
    """Two steps; copies of the states after them."""
    for step in range(2):
        axes_models.train_step(model, axes_models.batch_of(step, *place))
        optimizer.step()
        optimizer.zero_grad()
    return {"model": copy.deepcopy(model.state_dict()), "optimizer": copy.deepcopy(optimizer.state_dict())}


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
    "difference": lambda g: (g - g.mean()).std() + (0.5 * g.sign() - g.clone()).norm() + (1 - g).exp().sum(),
    "to nothing": lambda g: torch.zeros(g.shape, dtype=g.dtype).add_(g).norm(),
    "under a mask": lambda g: g[g > 0].sum() + g[g > 1e-3].mean() + (g + 1).masked_select(g <= 0).count_nonzero(),
    "alike": lambda g: torch.tensor(float(torch.equal(g.abs(), g))),
    "foreach": lambda g: torch._foreach_sub([g], [2 * g])[0].norm(),
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
    assert within == [torch.Tensor] * 3
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
            assert ask(mine.grad).item() == pytest.approx(ask(theirs.grad).item(), rel=1e-10), (name, asked)
    assert by_hand([*model.parameters()]) == pytest.approx(by_hand([*reference.parameters()]), rel=1e-12)
    norms = []
    for one in (model, reference):  # of gradients that were added up by hand
        several = [torch.zeros_like(p).add_(p.grad, alpha=0.5) for p in one.parameters()]
        for number, p in enumerate(one.parameters()):
            p.grad = several[number] + p.grad if number % 2 else several[number]
        norms.append(nn.utils.clip_grad_norm_(one.parameters(), 0.1).item())
    assert norms[0] == pytest.approx(norms[1], rel=1e-12)
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    gradient, whole = next((p.grad, q.grad) for p, q in pairs if type(p.grad) is not torch.Tensor and p.dim() == 2)
    [cut] = gradient.cuts
    for name, ask in ASKED.items():  # of what is made of each row, or column
        found, wanted = (ask(g.norm(dim=1 - cut)) + ask(g.abs().sum(1 - cut, keepdim=True)) for g in (gradient, whole))
        assert found.item() == pytest.approx(wanted.item(), rel=1e-10), name
    for along in (lambda g: g.norm(dim=cut), lambda g: (g**2).mean(cut, keepdim=True)):
        with pytest.raises(GradientError, match=f"was asked of a gradient along dimension {cut}, of which this"):
            along(gradient)
    joined = torch.cat([gradient.flatten(), torch.ones(1).to(gradient)])
    for of_all in (torch.Tensor.norm, torch.sum, lambda g: nn.utils.get_total_norm([2 * g])):
        with pytest.raises(GradientError, match="of some of which this rank has a part and of others all"):
            of_all(joined)
    for plain in (copy.deepcopy(gradient), pickle.loads(pickle.dumps(gradient)), gradient.as_subclass(torch.Tensor)):
        assert type(plain) is torch.Tensor
        assert torch.equal(plain, gradient)


@on_ranks(4)
@pytest.mark.parametrize("shape", [{"data": 2, "model": 2}, {"pipe": 2, "model": 2}], ids=str)
def test_norms_of_gradients_of_split_layers_are_those_of_the_whole(shape):
    def looked_at(model, place):
        numbers = []
        several = axes_models.optimizers(model)
        for step in range(3):
            axes_models.train_step(model, axes_models.batch_of(step, *place))
            if step == 1:  # upon what is there
                axes_models.train_step(model, axes_models.batch_of(7, *place))
            here = {name: p.grad for name, p in model.named_parameters() if p.grad is not None and not p.is_meta}
            numbers.append({name: [g.norm().item()] for name, g in here.items()})
            if step == 1:
                asked = [ask for name, ask in ASKED.items() if name != "vector_norm"]  # which torch's clipping asks for
                numbers.append({n: [ask(g).item() for ask in asked] for n, g in here.items() if ".linear1." in n})
            numbers.append({"": [nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()]})
            for one in several:
                one.step()
                one.zero_grad(set_to_none=step == 0)
        return numbers

    reference = build("stack")
    wanted = looked_at(reference, (0, 1))
    for memory in (None, FULL) if "data" in shape else (None,):
        plan = planned("stack", shape, memory or Memory())
        if "pipe" in shape:
            plan = replace(plan, stages={"words": 0, "encoder.layers.0": 0, "encoder.layers.1": 1, "out": 1})
        model, _, place = distributed("stack", shape, plan=plan)
        for found, theirs in zip(looked_at(model, place), wanted, strict=True):
            for name, numbers in found.items():
                assert numbers == pytest.approx(theirs[name], rel=1e-9, abs=1e-14), name
        assert worst_difference(tulle.full_state_dict(model, everywhere=True), reference.state_dict()) < 1e-12


@on_ranks(2)
def test_clipping_that_knows_split_layers_alone_knows_what_distribute_puts_on_them():
    reference, (model, _, _) = build("stack"), distributed("stack", {"model": 2})
    for one in (reference, model):
        axes_models.train_step(one, axes_models.batch_of(0))
    wanted = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    assert tensor_parallel.gradient_norm(model).item() == pytest.approx(wanted.item(), rel=1e-12)


@on_ranks(2)
def test_what_torchs_own_checkpoints_would_take_for_wholes_is_refused(tmp_path):
    whole = build("dense words").state_dict()
    for how in ("full_shard", "model", "pipe", "rows"):
        mesh = tulle.init(**({how: 2} if how in ("model", "pipe") else {"data": 2}))
        plan = (
            {"words.weight": "rows"}
            if how == "rows"
            else tulle.Plan(mesh.shape, memory=Memory(full_shard=how == "full_shard"))
        )
        if how == "pipe":
            plan = replace(plan, stages={"words": 0, "tags": 0, "layers": 1, "out": 1})
        model = build("dense words")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        tulle.distribute(model, optimizer, mesh, plan=plan)
        with pytest.raises(CheckpointError, match=r"asked for the state of .* tulle\.save and tulle\.load"):
            state_dict.get_state_dict(model, optimizer)
        with pytest.raises(CheckpointError, match=r"^torch.distributed.checkpoint asked for the state of"):
            dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path / how)
        if how in ("full_shard", "model"):
            found = state_dict.get_model_state_dict(model)
            assert worst_difference(found, whole) == 0.0
            state_dict.set_model_state_dict(model, {name: value + 1 for name, value in found.items()})
            assert worst_difference(model.state_dict(), {name: value + 1 for name, value in whole.items()}) == 0.0
