"""torch's own clipping, gradient scaler and schedules work on models that are split over ranks."""

import copy
import math
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from axes_models import MICRO_BATCHES, batch_of, build, distributed, optimizers, train, train_step, worst_difference
from torch import nn

import tulle
from ranks import on_ranks
from tulle.clip import ProxyGradient
from tulle.distribute.replicas import Replicas
from tulle.errors import GradientError
from tulle.plan import Plan, TablePlan, plan_for_later

SHAPES = [
    {"pipe": 2, "model": 2},
    pytest.param({"data": 2, "pipe": 2}, marks=pytest.mark.slow),
    pytest.param({"data": 2, "model": 2}, marks=pytest.mark.slow),
]


def torchs(model):
    return nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()


@on_ranks(4)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_torchs_own_clipping_is_that_of_one_process(shape):
    reference = build("stack")
    wanted = train(reference, optimizers(reference), clip=torchs)
    model, several, place = distributed("stack", shape)
    found = train(model, several, *place, clip=torchs)
    assert found[1::2] == pytest.approx(wanted[1::2], rel=1e-12), "norms"
    assert worst_difference(tulle.full_state_dict(model, everywhere=True), reference.state_dict()) < 1e-12


@on_ranks(2)
def test_the_proxy_is_looked_for_once_a_backward(monkeypatch):
    model, _, _ = distributed("stack", {"model": 2})
    marked = []
    mark_proxies = Replicas.mark_proxies
    monkeypatch.setattr(Replicas, "mark_proxies", lambda engine: (marked.append(engine), mark_proxies(engine)))
    for number in range(1, 3):
        train_step(model, batch_of(0))
        assert len(marked) == number * MICRO_BATCHES
        assert sum(isinstance(p.grad, ProxyGradient) for p in model.parameters()) == 1


class Later(nn.Module):
    """Its first norm is of use in some calls only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.layer = nn.LayerNorm(8), nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x, is_all):
        y = self.second(self.layer(x))
        return y + self.first(x) if is_all else y


@on_ranks(2)
def test_there_is_one_proxy_also_when_a_gradient_before_it_comes_later():
    mesh, model = tulle.init(model=-1), Later()
    tulle.distribute(model, torch.optim.SGD(model.parameters()), mesh, plan=Plan(mesh.shape))
    for is_all in (False, True):
        model(torch.arange(16.0).view(2, 8), is_all).pow(2).sum().backward()
        assert sum(isinstance(p.grad, ProxyGradient) for p in model.parameters()) == 1


@on_ranks(2)
@pytest.mark.parametrize("foreach", [None, True])
def test_clipping_takes_a_part_of_one_row_beside_a_whole_as_long_as_the_layer(foreach):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Bilinear(4, 4, 2), nn.Linear(2, 2)).double()  # the first stays whole, the second is [1, 2]
    model[0].register_parameter("scale", nn.Parameter(torch.ones(2, 3, dtype=torch.float64)))
    reference, mesh = copy.deepcopy(model), tulle.init(model=2)
    tulle.distribute(model, torch.optim.SGD(model.parameters()), mesh)
    x, norms = torch.arange(8.0, dtype=torch.float64).view(2, 4), []
    for one in (reference, model):
        (one[1](one[0](x, x)).pow(2).sum() + one[0].scale.pow(3).sum()).backward()
        norms.append(nn.utils.clip_grad_norm_(one.parameters(), 0.1, foreach=foreach).item())
    assert norms[1] == pytest.approx(norms[0], rel=1e-12)


@on_ranks(4)
def test_clipping_some_parameters_is_tulles_alone():
    reference = build("stack")
    train_step(reference, batch_of(0))
    wanted = [nn.utils.clip_grad_norm_(part.parameters(), 0.1).item() for part in reference.children()]
    stages = {"words": 0, "encoder.layers.0": 0, "encoder.layers.1": 1, "out": 1}  # several gradients on each
    plan = tulle.Plan({"pipe": 2, "model": 2}, stages=stages)
    model, _, place = distributed("stack", {"pipe": 2, "model": 2}, plan)
    train_step(model, batch_of(0, *place))
    for clip in (nn.utils.clip_grad_norm_, partial(nn.utils.clip_grad_norm_, foreach=True)):
        with pytest.raises(
            GradientError, match=r"^the norm of 1 of this rank's \d+ gradients was asked for, but the mo"
        ):
            clip(next(p for p in model.parameters() if isinstance(p.grad, ProxyGradient)), 0.1)
    found = [tulle.clip_grad_norm_(part, 0.1).item() for part in model.children()]
    assert found == pytest.approx(wanted, rel=1e-12)


@on_ranks(4)
@pytest.mark.parametrize("how", ["rows", pytest.param("columns", marks=pytest.mark.slow)])
def test_torchs_own_clipping_knows_the_other_parts_of_a_split_table(how):
    def clip(model):
        return nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()

    reference = build("dense words")
    wanted = train(reference, optimizers(reference), clip=clip)
    model, several, place = distributed("dense words", {"data": 2, "pipe": 2}, plan={"words.weight": how})
    found = train(model, several, *place, clip=clip)
    assert found[1::2] == pytest.approx(wanted[1::2], rel=1e-12), "norms"


@on_ranks(4)
@pytest.mark.slow
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("ours", [True, False])
def test_norms_of_any_order_are_those_of_one_process(norm_type, ours):
    reference = build("gpt2")
    train_step(reference, batch_of(0))
    wanted = nn.utils.clip_grad_norm_(reference.parameters(), 1.0, norm_type)
    model, _, place = distributed("gpt2", {"pipe": 2, "model": 2})
    train_step(model, batch_of(0, *place))
    if ours:
        assert tulle.clip_grad_norm_(model, 1.0, norm_type).item() == pytest.approx(wanted.item(), rel=1e-6)
    else:
        found = nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type)
        assert found.item() == pytest.approx(wanted.item(), rel=1e-6)


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 1])
def test_an_infinite_gradient_of_one_stage_is_an_infinite_norm_on_all_ranks(stage):
    """Were it NaN where it lies, a step left out for that would be left out on one rank."""
    plan = tulle.Plan({"pipe": 2}, stages={"words": 0, "encoder.layers.0": 0, "encoder.layers.1": 1, "out": 1})
    model, _, place = distributed("stack", {"pipe": 2}, plan)
    train_step(model, batch_of(0, *place))
    mine = [p for p in model.parameters() if p.grad is not None and not isinstance(p.grad, ProxyGradient)]
    if torch.distributed.get_rank() == stage:
        mine[0].grad.view(-1)[0] = math.inf
    assert nn.utils.clip_grad_norm_(model.parameters(), 1.0).item() == math.inf
    finite = [p.grad for p in mine if p.grad.isfinite().all()]
    assert not any(gradient.any() for gradient in finite), "scaled by 1 / inf, as in one process"


@on_ranks(2)
@pytest.mark.parametrize("norm_type", [0.0, -math.inf])
def test_an_order_that_is_not_put_together_from_parts_is_refused(norm_type):
    model, _, place = distributed("stack", {"model": 2})
    train_step(model, batch_of(0, *place))
    for clip in (tulle.clip_grad_norm_, lambda model, *given: nn.utils.clip_grad_norm_(model.parameters(), *given)):
        with pytest.raises(GradientError, match=f"no norm of order {norm_type} is taken over ranks"):
            clip(model, 1.0, norm_type)


@on_ranks(4)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_scaler_skips_on_all_ranks_or_none(shape):
    def scaled(model, several, place):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
        schedules = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in several]

        @tulle.step(micro_batches=MICRO_BATCHES)
        def step(model, batch):
            loss = model(batch)
            scaler.scale(loss).backward()
            return loss

        scales = []
        for number in range(4):
            step(model, batch_of(number, *place))
            if number == 1 and torch.distributed.get_rank() % (4 // place[1]) == 0:  # on one rank of each replica
                broken = next(p for p in reversed([*model.parameters()]) if p.grad is not None)
                broken.grad.view(-1)[0] = float("inf")
            for one in several:
                scaler.step(one)
                one.zero_grad()
            scaler.update()
            for schedule in schedules:
                schedule.step()
            scales.append(scaler.get_scale())
        return scales

    reference = build("stack")
    wanted = scaled_alone(reference)
    model, several, place = distributed("stack", shape)
    assert scaled(model, several, place) == wanted
    if shape.get("data", 1) == 1:
        plain = tulle.full_state_dict(model, everywhere=True)
        assert worst_difference(plain, reference.state_dict()) < 1e-12


def scaled_alone(reference):
    """What one process does that skips the second step."""
    [optimizer] = optimizers(reference)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for number in range(4):
        train_step(reference, batch_of(number))
        if number != 1:
            optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return [16.0, 8.0, 16.0, 32.0]


def scaled_with_a_broken_step(model, several, place):
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    @tulle.step(micro_batches=MICRO_BATCHES)
    def step(model, batch):
        loss = model(batch)
        scaler.scale(loss).backward()
        return loss

    for number in range(3):
        step(model, batch_of(number, *place))
        if number == 1 and model.out.bias.grad is not None:  # at the last stage only
            model.out.bias.grad[0] = float("inf")
        for one in several:
            scaler.step(one)
            one.zero_grad()
        scaler.update()


@on_ranks(2)
def test_a_scaler_takes_optimizers_without_parameters_at_a_stage():
    reference = build("words")
    of_table, of_output = reference.words.weight, reference.out.bias  # each at one stage only, and all others
    others = [p for p in reference.parameters() if all(p is not own for own in (of_table, of_output))]
    scaled_with_a_broken_step(reference, by_stage(reference), (0, 1))
    mesh = tulle.init(pipe=2)
    model = build("words")
    several = by_stage(model)
    stages = {"words": 0, "tags": 0, "layers.0": 0, "layers.1": 0, "layers.2": 1, "layers.3": 1, "out": 1}
    tulle.distribute(
        model, several, mesh, plan=replace(plan_for_later(mesh.shape, {"words.weight": (40, 8)}), stages=stages)
    )
    scaled_with_a_broken_step(model, several, (0, 1))
    assert worst_difference(tulle.full_state_dict(model, everywhere=True), reference.state_dict()) < 1e-12
    assert len(others) == len(several[2].param_groups[0]["params"])


@on_ranks(4)
def test_a_stage_that_has_a_split_table_alone_steps_whichever_hook_of_steps_comes_first():
    shape, hooks = {"data": 2, "pipe": 2}, sys.modules["torch.optim.optimizer"]._global_optimizer_pre_hooks
    stages = {"words": 0, "tags": 1, "out": 1} | {f"layers.{number}": 1 for number in range(4)}
    plan = tulle.Plan(shape, tables=(TablePlan("words.weight", 40, 8, "rows", "given"),), stages=stages)
    model, [optimizer], place = distributed("dense words", shape, plan)
    for step in range(2):
        train(model, [optimizer], *place, steps=[step], clip=torchs)
        for number in reversed([*hooks]):
            hooks.move_to_end(number)


@on_ranks(2)
@pytest.mark.parametrize("kind", ["Rprop", "Adam"])
def test_an_optimizer_that_is_made_later_steps_nothing_of_other_stages(kind):
    reference = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double()
    model, mesh = copy.deepcopy(reference), tulle.init(pipe=2)
    plan = tulle.Plan(mesh.shape, stages={"0": 0, "1": 1})  # no parameter at the second stage
    tulle.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), mesh, plan=plan)

    @tulle.step(micro_batches=2)
    def step(model, batch):
        model(batch).pow(2).mean().backward()

    for one in (reference, model):
        optimizer = getattr(torch.optim, kind)(one.parameters(), lr=0.1)
        for number in range(2):
            step(one, torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(number)))
            optimizer.step()
            optimizer.zero_grad()
    assert worst_difference(tulle.full_state_dict(model, everywhere=True), reference.state_dict()) < 1e-12
    assert mesh.rank == 0 or not optimizer.state


def by_stage(model):
    """Optimizers of a table, of the last layer's bias, and of all else."""
    table, bias = model.words.weight, model.out.bias
    others = [p for p in model.parameters() if p is not table and p is not bias]
    return [torch.optim.SGD([table], lr=0.1), torch.optim.Adam([bias], lr=0.1), torch.optim.AdamW(others, lr=0.1)]


@on_ranks(2)
@pytest.mark.parametrize("shape", [{"pipe": 2}, {"model": 2}], ids=str)
def test_what_is_unfrozen_later_counts_where_torch_clips(shape):
    def unfrozen_later(model, place):
        model.encoder.layers[0].requires_grad_(True)
        return train(model, [torch.optim.SGD(model.parameters(), lr=0.1)], *place, steps=[0], clip=torchs)

    def frozen():
        model = build("stack")
        model.encoder.layers[0].requires_grad_(False)
        return model

    wanted = unfrozen_later(frozen(), (0, 1))
    mesh, model = tulle.init(**shape), frozen()
    stages = {"words": 0, "encoder.layers.0": 0, "encoder.layers.1": 1, "out": 1} if "pipe" in shape else {}
    tulle.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), mesh, plan=Plan(shape, stages=stages))
    assert unfrozen_later(model, (0, 1)) == pytest.approx(wanted, rel=1e-12)
