"""Updates that wait until parameters are read: the numbers of one process, whoever looks at what and when."""

import atexit
import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
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
import mortal
import tulle
from gigabit import give_network
from models import Dense, Words, batches, build, worst_difference
from ranks import on_ranks
from tulle.comm import barrier, lane
from tulle.comm.pending import Pending
from tulle.engine import engine_of
from tulle.engine.late_tensors import LateGradient, LateParameter
from tulle.engine.late_updates import LateUpdates
from tulle.errors import CommunicationError, PlanError
from tulle.plan import TablePlan

STEPS = 7  # more than after which the order of pieces is changed
SAMPLES = 12
TOLERANCE = 1e-12


class Deep(nn.Module):
    """Many layers: an attention and an LSTM, which read their weights by functions, and a bias that is read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(models.WORDS, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.memory = nn.LSTM(8, 8, batch_first=True)
        self.out = nn.Linear(8, 1)

    def forward(self, ids: Tensor) -> Tensor:
        """Mean loss of a batch `[samples, length]`."""
        hidden = self.words(ids)
        hidden = hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        for layer in self.layers:
            hidden = layer(hidden).tanh() + self.layers[0].bias
        return self.out(self.memory(hidden)[0]).pow(2).mean()


class Normed(nn.Module):
    """Batch norm between layers: buffers that follow rank 0."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(models.WORDS, 8)
        self.norm = nn.BatchNorm1d(8)
        self.out = nn.Linear(8, 1)

    def forward(self, ids: Tensor) -> Tensor:
        """Mean loss of a batch `[samples, length]`."""
        return self.out(self.norm(self.words(ids).mean(1))).pow(2).mean()


def late(model: nn.Module, optimizer: Any, mesh: tulle.Mesh) -> LateUpdates:
    """Distribute a model so that its updates wait, in many small buckets cut into smaller pieces."""
    plan = replace(tulle.plan(model, optimizer, mesh), schedule="read", bucket_bytes=300)
    tulle.distribute(model, optimizer, mesh, plan=plan)
    updates = engine_of(model).late
    assert updates is not None
    return updates


def late_names(model: nn.Module) -> list[str]:
    """Parameters whose update waits."""
    return [name for name, parameter in model.named_parameters() if type(parameter) is LateParameter]


def step(optimizers: Sequence[Optimizer]) -> None:
    """One step of each, and no gradients."""
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def states_differ(ours: Sequence[Optimizer], theirs: Sequence[Optimizer]) -> float:
    """The largest difference of two optimizers' states, relative to the largest number of that state."""
    worst = 0.0
    for mine, other in zip(ours, theirs, strict=True):
        first, second = mine.state_dict()["state"], other.state_dict()["state"]
        assert first.keys() == second.keys()
        for number, state in second.items():
            assert first[number].keys() == state.keys()
            for name, value in state.items():
                difference = torch.as_tensor(first[number][name] - value).abs().max().item()
                worst = max(worst, difference / max(torch.as_tensor(value).abs().max().item(), 1e-6))
    return worst


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


def held_back(mesh: tulle.Mesh, act: Callable[[], None]) -> None:
    """On rank 0 `act` before, on the others after rank 0 has done so: what rank 0 does cannot have waited for them."""
    aside = lane(mesh["data"], "held back")
    if mesh.rank:
        barrier(aside)
    act()
    if not mesh.rank:
        barrier(aside)


def after_a_step(mesh: tulle.Mesh) -> tuple[nn.Module, Optimizer, nn.Module, Optimizer]:
    """A model with late updates and its reference, both after a first step, which fixes the order of buckets."""
    model, reference = build(Deep, 0), build(Deep, 0)
    [ours], [theirs] = models.momentum(model), models.momentum(reference)
    late(model, ours, mesh)
    one_step(model, ours, reference, theirs, mesh)
    dict(model.state_dict())  # reads all
    return model, ours, reference, theirs


def one_step(model: nn.Module, ours: Optimizer, reference: nn.Module, theirs: Optimizer, mesh: tulle.Mesh) -> None:
    ids = batches(1, SAMPLES)[0]
    model(ids.chunk(mesh.size)[mesh.rank]).backward()
    reference(ids).backward()
    step([ours])
    step([theirs])


@on_ranks(2, 3)
def test_a_step_returns_before_the_other_ranks_have_their_gradients():
    mesh = tulle.init(data=-1)
    model, *others = after_a_step(mesh)
    held_back(mesh, lambda: one_step(model, *others, mesh))
    assert len(late_names(model)) == len(list(model.parameters()))
    assert worst_difference(model, others[1])[0] < TOLERANCE
    assert not late_names(model)


@on_ranks(2)
def test_the_comparison_can_fail_where_a_read_does_not_wait():
    mesh = tulle.init(data=-1)
    model, ours, reference, theirs = after_a_step(mesh)
    found: list[float] = []

    def act() -> None:
        one_step(model, ours, reference, theirs, mesh)
        if not mesh.rank:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Pending, "wait", lambda pending: None)
                found.append(worst_difference(model, reference)[0])

    held_back(mesh, act)
    assert all(difference > 1e-6 for difference in found)
    assert mesh.rank or found


@on_ranks(2)
def test_a_read_waits_for_its_bucket_only():
    mesh = tulle.init(data=-1)
    model, ours, reference, theirs = after_a_step(mesh)
    one_step(model, ours, reference, theirs, mesh)
    before = late_names(model)
    assert torch.allclose(model.layers[2].weight, reference.layers[2].weight, rtol=TOLERANCE, atol=0)
    assert 0 < len(before) - len(late_names(model)) <= 2
    assert set(late_names(model)) < set(before)


def read_by_copy(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def read_by_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def read_by_parameter(model: nn.Module) -> nn.Module:
    copied = build(Deep, 0)
    for (_, mine), (_, other) in zip(copied.named_parameters(), model.named_parameters(), strict=True):
        mine.data = copy.deepcopy(other)
    return copied


def read_by_numpy(model: nn.Module) -> nn.Module:
    copied = build(Deep, 0)
    for mine, other in zip(copied.parameters(), model.parameters(), strict=True):
        mine.data = torch.from_numpy(other.data.numpy())
    return copied


def read_in_inference(model: nn.Module) -> nn.Module:
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        model(batches(1, 2)[0])
    return model


def read_by_function(model: nn.Module) -> nn.Module:
    copied = build(Deep, 0)
    copied.load_state_dict({name: torch.add(input=p, other=0) for name, p in model.named_parameters()})
    return copied


@on_ranks(2)
@pytest.mark.parametrize(
    "read", [read_by_copy, read_by_pickle, read_by_parameter, read_by_numpy, read_in_inference, read_by_function]
)
def test_whoever_reads_sees_the_truth(read):
    mesh = tulle.init(data=-1)
    model, ours, reference, theirs = after_a_step(mesh)
    for _ in range(2):
        one_step(model, ours, reference, theirs, mesh)
        assert late_names(model)
        copied = read(model)
        assert not late_names(model)
        assert all(type(parameter) is nn.Parameter for parameter in copied.parameters())
        assert worst_difference(copied, reference)[0] < TOLERANCE


@on_ranks(2)
def test_an_optimizers_state_is_true_where_it_is_asked_for():
    mesh = tulle.init(data=-1)
    model, ours, reference, theirs = after_a_step(mesh)
    one_step(model, ours, reference, theirs, mesh)
    assert late_names(model)
    assert states_differ([ours], [theirs]) < TOLERANCE
    assert not late_names(model)
    one_step(model, ours, reference, theirs, mesh)
    copied = copy.deepcopy(ours)
    assert states_differ([copied], [theirs]) < TOLERANCE


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
def test_a_backward_that_reads_nothing_new_finds_all_done():
    mesh = tulle.init(data=-1)
    model, ours, reference, theirs = after_a_step(mesh)
    for keeps in (True, False, True):
        losses = [one.out(torch.ones(1, 8, dtype=torch.float64)).sum() for one in (model, reference)]
        one_step(model, ours, reference, theirs, mesh)
        if keeps:
            one_step(model, ours, reference, theirs, mesh)
        for loss in losses:  # of a bias and a weight: neither gradient needs the parameter
            loss.backward()
    assert torch.allclose(model.out.bias.grad, reference.out.bias.grad)
    step([ours])
    step([theirs])
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


@on_ranks(2)
def test_after_a_read_that_failed_no_old_value_is_taken_for_a_new_one():
    def fail(pending: object) -> None:
        raise CommunicationError("a rank is gone")

    mesh = tulle.init(data=-1)
    model, ours, reference, theirs = after_a_step(mesh)
    one_step(model, ours, reference, theirs, mesh)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pending, "wait", fail)
        for _ in range(2):
            with pytest.raises(CommunicationError, match="a rank is gone"):
                model.state_dict()
    assert worst_difference(model, reference)[0] < TOLERANCE


@on_ranks(2)
def test_a_compiled_model_is_refused_before_it_computes():
    mesh = tulle.init(data=-1)
    model = build(Normed, 0)
    [optimizer] = models.sgd(model)
    late(model, optimizer, mesh)
    compiled = torch.compile(model, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        compiled(batches(1, 4)[0]).backward()
        optimizer.step()
        with pytest.raises(Exception, match=r"compiled code does unseen: give tulle\.distribute the plan with"):
            compiled(batches(1, 4)[0])
    torch.compiler.reset()


@on_ranks(2)
def test_a_model_that_is_dropped_while_it_waits_is_freed():
    mesh = tulle.init(data=-1)

    def use() -> weakref.ref[nn.Module]:
        model, ours, reference, theirs = after_a_step(mesh)
        one_step(model, ours, reference, theirs, mesh)
        return weakref.ref(model)

    left = use()
    gc.collect()
    assert left() is None
    torch.distributed.barrier()


@on_ranks(2)
@pytest.mark.parametrize("is_stepped", [False, True])
def test_gradients_that_nobody_reads_hold_no_model_and_one_that_is_kept_is_true(is_stepped):
    mesh = tulle.init(data=-1)
    model, ours, reference, _ = after_a_step(mesh)
    ids = batches(1, SAMPLES)[0]
    model(ids.chunk(mesh.size)[mesh.rank]).backward()
    reference(ids).backward()
    if is_stepped:
        ours.step()
    gradient = model.out.weight.grad
    assert type(gradient) is LateGradient
    held = [weakref.ref(parameter) for parameter in model.parameters()]
    del model, ours
    gc.collect()
    assert [parameter() for parameter in held] == [None] * len(held)
    assert type(gradient) is LateGradient
    assert (gradient - reference.out.weight.grad).abs().max() < TOLERANCE
    assert type(gradient) is Tensor


@on_ranks(2)
def test_a_schedule_that_is_unknown_or_cannot_be_kept_is_refused():
    mesh = tulle.init(data=-1)
    model = nn.Sequential(nn.Linear(2, 2))
    optimizer = SGD(model.parameters(), lr=0.1)
    plan = replace(tulle.plan(model, optimizer, mesh), schedule="sometime")
    with pytest.raises(PlanError, match="the plan has the schedule 'sometime', expected one of step, read"):
        tulle.distribute(model, optimizer, mesh, plan=plan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit's own
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


def leave_with_an_update_on_the_way(folder: Path) -> None:
    mesh = tulle.init(data=-1)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tulle.distribute(model, optimizer, mesh, plan=tulle.Plan(mesh.shape, schedule="read"))
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    make_all_true = LateUpdates.make_all_true

    def note(updates: LateUpdates) -> None:
        (folder / f"left-{mesh.rank}").write_text(f"{len(updates._waiting)} on the way, {dist.is_initialized()}")
        make_all_true(updates)

    LateUpdates.make_all_true = note
    atexit._run_exitfuncs()  # as the interpreter's end does, which a forked process does not come to


def test_what_is_on_the_way_at_the_end_is_awaited_before_process_groups_end(tmp_path):
    with mortal.start(leave_with_an_update_on_the_way, tmp_path, ranks=2) as processes:
        assert mortal.join(processes) == [0, 0]
    assert [(tmp_path / f"left-{rank}").read_text() for rank in (0, 1)] == ["1 on the way, True"] * 2
