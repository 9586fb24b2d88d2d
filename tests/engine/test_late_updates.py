"""Updates that wait until parameters are read: the numbers of one process, whatever is done to gradients and when."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from late_networks import SAMPLES, STEPS, TOLERANCE, Deep, Normed, late, late_names, states_differ, step
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import (
    ASGD,
    LBFGS,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

import models
import tulle
from gigabit import give_network
from models import Dense, Words, batches, build, worst_difference
from ranks import on_ranks
from tulle.engine import engine_of
from tulle.engine.late_tensors import LateGradient
from tulle.errors import PlanError
from tulle.plan import TablePlan


def every(kind: type[Optimizer], **options: Any) -> Callable[[nn.Module], list[Optimizer]]:
    """A recipe: one optimizer with two groups of parameters that it treats differently."""

    def make(model: nn.Module) -> list[Optimizer]:
        weights = [p for p in model.parameters() if p.dim() > 1]
        biases = [p for p in model.parameters() if p.dim() <= 1]
        return [kind([{"params": weights}, {"params": biases, "lr": 0.003}], lr=0.01, **options)]

    return make


RECIPES = {
    "sgd": every(SGD),
    "momentum": every(SGD, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": every(Adam, amsgrad=True),
    "adam by foreach": every(Adam, foreach=True),
    "adamw": every(AdamW, weight_decay=0.1),
    "adagrad": every(Adagrad, lr_decay=0.01, initial_accumulator_value=0.1),
    "others": lambda model: [
        kind([p], lr=0.01)
        for kind, p in zip(
            [ASGD, Adadelta, Adamax, NAdam, RAdam, RMSprop, Rprop, *[SGD] * 50], model.parameters(), strict=False
        )
    ],
    "fused adam": every(Adam, fused=True),
    "for sparse and dense": models.sparse_adam_and_adam,
}
QUICK = {"momentum", "adam by foreach", "others", "for sparse and dense"}


@on_ranks(2, 3)
@pytest.mark.parametrize(
    "recipe", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in RECIPES]
)
def test_parameters_and_state_are_those_of_one_process(recipe):
    mesh = tulle.init(data=-1)
    for kind in (Words,) if recipe == "for sparse and dense" else (Deep, Dense):
        model, reference = build(kind, mesh.rank), build(kind, 0)
        ours, theirs = RECIPES[recipe](model), RECIPES[recipe](reference)
        late(model, ours, mesh)
        seen = 0
        schedulers = [LambdaLR(one, lambda step: 1 / (1 + step)) for one in (*ours, *theirs)]
        for ids in batches(STEPS, SAMPLES):
            model(ids.chunk(mesh.size)[mesh.rank]).backward()
            reference(ids).backward()
            step(ours)
            step(theirs)
            seen += len(late_names(model))
            for scheduler in schedulers:
                scheduler.step()
        assert seen >= STEPS, "something waited in every step"
        assert worst_difference(model, reference)[0] < TOLERANCE
        assert states_differ(ours, theirs) < TOLERANCE


CLIPS: dict[str, Callable[[nn.Module], object]] = {
    "torch's clip": lambda model: clip_grad_norm_(model.parameters(), 0.01),
    "tulle's clip": lambda model: tulle.clip_grad_norm_(model, 0.01),
    "by value": lambda model: nn.utils.clip_grad_value_(model.parameters(), 1e-3),
    "by hand": lambda model: [p.grad.mul_(0.1) for p in model.parameters()],
    "one dropped": lambda model: setattr(model.layers[1].weight, "grad", None),
    "one replaced": lambda model: setattr(model.layers[1].weight, "grad", torch.ones(8, 8, dtype=torch.float64)),
}


@on_ranks(2)
@pytest.mark.parametrize("clip", CLIPS)
def test_what_is_done_to_gradients_before_a_step_is_done_to_the_mean(clip):
    mesh = tulle.init(data=-1)
    model, reference = build(Deep, 0), build(Deep, 0)
    [ours], [theirs] = models.adam(model), models.adam(reference)
    late(model, ours, mesh)
    for ids in batches(STEPS, SAMPLES):
        model(ids.chunk(mesh.size)[mesh.rank]).backward()
        reference(ids).backward()
        for one in (model, reference):
            CLIPS[clip](one)
        step([ours])
        step([theirs])
    assert worst_difference(model, reference)[0] < TOLERANCE


@on_ranks(2)
def test_a_rate_that_changes_after_the_step_changes_the_next_one_only():
    mesh = tulle.init(data=-1)
    model, reference = build(Deep, 0), build(Deep, 0)
    [ours], [theirs] = models.momentum(model), models.momentum(reference)
    late(model, ours, mesh)
    cycles = [OneCycleLR(one, 0.1, total_steps=STEPS + 1, cycle_momentum=True) for one in (ours, theirs)]
    for ids in batches(STEPS, SAMPLES):
        model(ids.chunk(mesh.size)[mesh.rank]).backward()
        reference(ids).backward()
        step([ours])
        step([theirs])
        for one in (ours, theirs):
            one.param_groups[0]["weight_decay"] += 0.01
        for cycle in cycles:
            cycle.step()
    assert worst_difference(model, reference)[0] < TOLERANCE


@on_ranks(2)
@pytest.mark.parametrize("sets_to_none", [True, False, None], ids=["none", "zeroed", "kept"])
def test_gradients_that_stay_after_a_step_add_up(sets_to_none):
    mesh = tulle.init(data=-1)
    model, reference = build(Deep, 0), build(Deep, 0)
    [ours], [theirs] = models.momentum(model), models.momentum(reference)
    late(model, ours, mesh)
    for ids in batches(STEPS, SAMPLES):
        mine = ids.chunk(mesh.size)[mesh.rank]
        model(mine).backward()
        reference(ids).backward()
        for one in (ours, theirs):
            one.step()
            if sets_to_none is not None:
                one.zero_grad(set_to_none=sets_to_none)
        for (_, p), (_, other) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
            assert (p.grad is None) == (other.grad is None)
    for p, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert p.grad is None or torch.allclose(p.grad, other.grad, rtol=1e-10)
    assert worst_difference(model, reference)[0] < TOLERANCE


@on_ranks(2)
def test_accumulation_several_backwards_and_several_steps_add_up():
    mesh = tulle.init(data=-1)
    model, reference = build(Deep, 0), build(Deep, 0)
    [ours], [theirs] = models.momentum(model), models.momentum(reference)
    late(model, ours, mesh)
    for ids in batches(STEPS, SAMPLES):
        first, second = ids.chunk(mesh.size)[mesh.rank].chunk(2)
        with model.no_sync():
            (model(first) / 2).backward()
        (model(second) / 2).backward()
        reference(ids).backward()
        model.out(torch.ones(1, 8, dtype=torch.float64)).sum().backward()  # reaches one layer, whose bucket is late
        reference.out(torch.ones(1, 8, dtype=torch.float64)).sum().backward()
        for one in (ours, theirs):
            one.step()
            one.step()  # again, on the same gradients
            one.zero_grad()
    assert worst_difference(model, reference)[0] < TOLERANCE


@on_ranks(2)
def test_a_closure_and_an_optimizer_of_ones_own_are_as_ever():
    class Mine(SGD):
        """Not known to treat every element by itself."""

    mesh = tulle.init(data=-1)
    for kind in (SGD, Mine, torch.optim.LBFGS):
        model, reference = build(Deep, 0), build(Deep, 0)
        ours, theirs = kind(model.parameters(), lr=0.01), kind(reference.parameters(), lr=0.01)
        late(model, ours, mesh)
        for ids in batches(3, SAMPLES):
            for optimizer, one, share in ((ours, model, ids.chunk(2)[mesh.rank]), (theirs, reference, ids)):

                def closure(optimizer=optimizer, one=one, share=share, whole=ids) -> Tensor:
                    optimizer.zero_grad()
                    loss = one(share)
                    loss.backward()
                    total = loss.detach().clone()
                    if share is not whole:
                        torch.distributed.all_reduce(total)
                        total /= mesh.size
                    return total

                if kind is Mine:
                    closure()
                    optimizer.step()
                else:
                    optimizer.step(closure)
        assert worst_difference(model, reference)[0] < (1e-8 if kind is torch.optim.LBFGS else TOLERANCE)


@on_ranks(2)
def test_a_part_that_only_one_rank_uses_gets_the_mean():
    mesh = tulle.init(data=-1)
    model, reference = build(Words, 0), build(Words, 0)
    [ours], [theirs] = models.momentum(model), models.momentum(reference)
    late(model, ours, mesh)
    ids = batches(1, SAMPLES)[0]
    for number in range(STEPS):
        loss, expected = model(ids), reference(ids)
        if number % 3:
            expected = expected + reference.unused(reference.words(ids)).sum() / mesh.size
            if mesh.rank:
                loss = loss + model.unused(model.words(ids)).sum()
        loss.backward()
        expected.backward()
        assert (model.unused.weight.grad is None) == (reference.unused.weight.grad is None)
        step([ours])
        step([theirs])
    assert worst_difference(model, reference)[0] < TOLERANCE


@on_ranks(2, 3)
def test_buffers_follow_rank_0_at_once():
    mesh = tulle.init(data=-1)
    model = build(Normed, 0)
    [ours] = models.momentum(model)
    late(model, ours, mesh)
    for ids in batches(STEPS, SAMPLES):
        model(ids.chunk(mesh.size)[mesh.rank]).backward()
        theirs = model.norm.running_mean.clone()
        torch.distributed.broadcast(theirs, src=0)
        assert torch.equal(model.norm.running_mean, theirs)
        assert isinstance(model.out.weight.grad, LateGradient)
        step([ours])
        assert late_names(model)


@on_ranks(2)
@pytest.mark.parametrize("placement", ["rows", "columns"])
def test_split_tables_and_late_updates_are_those_of_one_process(placement):
    mesh = tulle.init(data=-1)
    model, reference = build(Deep, 0), build(Deep, 0)
    [ours], [theirs] = models.adam(model), models.adam(reference)
    words = TablePlan("words.weight", models.WORDS, 8, placement, "given")
    plan = tulle.Plan({"data": 2}, (words,), bucket_bytes=300, schedule="read")
    tulle.distribute(model, ours, mesh, plan=plan)
    for ids in tulle.lookahead(batches(STEPS, SAMPLES)):
        model(ids.chunk(mesh.size)[mesh.rank]).backward()
        reference(ids).backward()
        norms = [tulle.clip_grad_norm_(one, 0.01).item() for one in (model, reference)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-10)
        step([ours])
        step([theirs])
    del model.words, reference.words
    assert worst_difference(model, reference)[0] < TOLERANCE


@pytest.mark.filterwarnings("ignore:`torch.jit")
@on_ranks(2)
def test_a_schedule_that_is_unknown_or_cannot_be_kept_is_refused():
    mesh = tulle.init(data=-1)
    model = nn.Sequential(nn.Linear(2, 2))
    optimizer = SGD(model.parameters(), lr=0.1)
    plan = replace(tulle.plan(model, optimizer, mesh), schedule="sometime")
    with pytest.raises(PlanError, match="the plan has the schedule 'sometime', expected one of step, read"):
        tulle.distribute(model, optimizer, mesh, plan=plan)
    model.append(torch.jit.script(nn.Linear(2, 2)))
    optimizer = SGD(model.parameters(), lr=0.1)
    with pytest.raises(PlanError, match="the scripted module '1' reads its own unseen: give the plan with schedule="):
        tulle.distribute(model, optimizer, mesh, plan=replace(plan, schedule="read"))


@on_ranks(2)
@pytest.mark.parametrize(
    ("width", "kind", "is_compiled", "expected"),
    [(900, Adam, False, "read"), (9, Adam, False, "step"), (900, LBFGS, False, "step"), (900, Adam, True, "step")],
    ids=["much to wait for", "little", "an optimizer that mixes elements", "compiled"],
)
def test_a_schedule_is_chosen_by_what_there_is_to_wait_for(width, kind, is_compiled, expected):
    mesh = tulle.init(data=-1)
    give_network(mesh["data"])
    model = nn.Linear(width, width)
    if is_compiled:
        model.compile(backend="eager")
    optimizer = kind(model.parameters())
    asked = replace(tulle.plan(model, optimizer, mesh), schedule="auto")
    tulle.distribute(model, optimizer, mesh, plan=asked)
    assert tulle.plan(model, optimizer, mesh).schedule == expected
    assert (engine_of(model).late is None) == (expected == "step")


def test_a_plan_keeps_its_schedule():
    plan = tulle.Plan({"data": 2}, schedule="read")
    assert tulle.Plan.from_json(plan.to_json()) == plan
    assert "replicas are updated when they are read" in plan.explain()
    assert tulle.Plan.from_json(tulle.Plan({"data": 2}).to_json()).schedule == "step"
    older = {name: value for name, value in plan.to_json().items() if name != "schedule"}
    assert tulle.Plan.from_json(older).schedule == "step"


@on_ranks(1)
def test_one_rank_has_nothing_to_wait_for():
    mesh = tulle.init(data=-1)
    model = build(Deep, 0)
    [optimizer] = models.sgd(model)
    tulle.distribute(model, optimizer, mesh, plan=replace(tulle.plan(model, optimizer, mesh), schedule="read"))
    assert engine_of(model).late is None


@on_ranks(2)
@pytest.mark.parametrize("is_done_again", [False, True])
def test_a_step_that_fails_has_done_nothing_and_can_be_done_again(is_done_again):
    mesh = tulle.init(data=-1)
    model, reference = build(Deep, 0), build(Deep, 0)
    [ours], [theirs] = models.momentum(model), models.momentum(reference)
    late(model, ours, mesh)
    for number, ids in enumerate(batches(STEPS, SAMPLES)):
        model(ids.chunk(mesh.size)[mesh.rank]).backward()
        reference(ids).backward()
        if number in (3, 5):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(ours, "_init_group", fail_of_memory)
                with pytest.raises(RuntimeError, match="out of memory"):
                    ours.step()
        if is_done_again or number not in (3, 5):
            ours.step()
            theirs.step()
        ours.zero_grad()
        theirs.zero_grad()
    assert worst_difference(model, reference)[0] < TOLERANCE


def fail_of_memory(*_: object) -> None:
    raise RuntimeError("out of memory")


@on_ranks(2)
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_a_parameter_that_an_optimizer_has_twice_is_stepped_twice():
    mesh = tulle.init(data=-1)

    def trained(*, is_distributed: bool) -> nn.Module:
        torch.manual_seed(0)
        shared = nn.Linear(4, 4)
        model = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), shared) for _ in range(2)]).double()
        optimizer = SGD([*model[0].parameters(), *model[1].parameters()], lr=0.1, momentum=0.9)
        if is_distributed:
            tulle.distribute(model, optimizer, mesh, plan=tulle.Plan({"data": 2}, schedule="read"))
        for batch in torch.linspace(-1, 1, 3 * 4 * 4, dtype=torch.float64).view(3, 4, 4):
            optimizer.zero_grad()
            share = batch.chunk(2)[mesh.rank] if is_distributed else batch
            model[1](model[0](share).tanh()).sub(1).pow(2).mean().backward()
            optimizer.step()
        return model

    difference, name = worst_difference(trained(is_distributed=True), trained(is_distributed=False))
    assert difference < TOLERANCE, name
