"""Gradients that the program sets past backward give the numbers of one process, or are refused by name."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import models
import tulle
from gigabit import give_network
from models import Dense, Tied, Words, batches, build, worst_difference
from ranks import on_ranks
from tulle.engine import by_hand, covered, engine_of
from tulle.errors import CommunicationError, GradientError
from tulle.plan import Memory, Plan

STEPS = 3
TOLERANCE = 1e-12


@dataclass
class Loop:
    """A model that is trained on its share of each batch, or on all of it."""

    model: nn.Module
    optimizers: Sequence[Optimizer]
    size: int = 1
    rank: int = 0
    kept: dict[str, Tensor] = field(default_factory=dict)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def share(self, ids: Tensor) -> Tensor:
        return ids.chunk(self.size)[self.rank]

    def gradients(self, ids: Tensor) -> list[Tensor | None]:
        return [*torch.autograd.grad(self.model(self.share(ids)), self.parameters, allow_unused=True)]

    def step(self, *, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)


def puts(loop: Loop, ids: Tensor) -> None:
    for parameter, gradient in zip(loop.parameters, loop.gradients(ids), strict=True):
        parameter.grad = gradient
    loop.step()


def copies(loop: Loop, ids: Tensor) -> None:
    for parameter, gradient in zip(loop.parameters, loop.gradients(ids), strict=True):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if gradient is not None:
            parameter.grad.copy_(gradient.to_dense())
    loop.step(set_to_none=False)


def adds_up(loop: Loop, ids: Tensor) -> None:
    for half in (ids, ids.flip(0)):
        for parameter, gradient in zip(loop.parameters, loop.gradients(half), strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
    loop.step()


def replaces(loop: Loop, ids: Tensor) -> None:
    loop.model(loop.share(ids)).backward()
    for parameter in loop.parameters:
        if parameter.grad is not None:
            parameter.grad = parameter.grad * 0.5
    loop.step()


def goes_on_with_a_copy(loop: Loop, ids: Tensor) -> None:
    loop.model(loop.share(ids)).backward()
    [gradient] = torch.autograd.grad(loop.model(loop.share(ids.flip(1))), [loop.model.out.weight])
    loop.model.out.weight.grad = copy.deepcopy(loop.model.out.weight.grad).add_(gradient)
    loop.step()


def adds_to_backward(loop: Loop, ids: Tensor) -> None:
    loop.model(loop.share(ids)).backward()
    penalty = (loop.model.out.weight * loop.share(ids).double().mean()).sum()
    [gradient] = torch.autograd.grad(penalty, [loop.model.out.weight])
    loop.model.out.weight.grad = loop.model.out.weight.grad + gradient
    loop.step()


def clips(loop: Loop, ids: Tensor) -> None:
    for parameter, gradient in zip(loop.parameters, loop.gradients(ids), strict=True):
        parameter.grad = gradient
    loop.kept["norm"] = tulle.clip_grad_norm_(loop.model, 0.02)
    loop.step()


def takes_turns(loop: Loop, ids: Tensor) -> None:
    for number, optimizer in enumerate(loop.optimizers):
        mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for parameter, gradient in zip(loop.parameters, loop.gradients(ids.roll(number, 0)), strict=True):
            if id(parameter) in mine:
                parameter.grad = gradient
        optimizer.step()
    loop.step()  # once more, with what is there


def closes(loop: Loop, ids: Tensor) -> None:
    def closure() -> Tensor:
        puts(replace(loop, optimizers=[]), ids)
        return torch.zeros(())

    for optimizer in loop.optimizers:
        optimizer.step(closure)
        optimizer.zero_grad()


def ascends_first(loop: Loop, ids: Tensor) -> None:
    """Sharpness-aware minimization (Foret et al., 2021), with all gradients by hand."""
    for parameter, gradient in zip(loop.parameters, loop.gradients(ids), strict=True):
        parameter.grad = gradient
    tulle.clip_grad_norm_(loop.model, float("inf"))
    moved = [(p, 0.1 * p.grad.to_dense()) for p in loop.parameters if p.grad is not None]
    with torch.no_grad():
        for parameter, way in moved:
            parameter.add_(way)
    found = loop.gradients(ids)
    with torch.no_grad():
        for parameter, way in moved:
            parameter.sub_(way)
    for parameter, gradient in zip(loop.parameters, found, strict=True):
        parameter.grad = gradient
    loop.step()


def only_rank_0(loop: Loop, ids: Tensor) -> None:
    if loop.rank == 0:
        first = ids.chunk(2)[0]
        for parameter, gradient in zip(
            loop.parameters, torch.autograd.grad(loop.model(first), loop.parameters, allow_unused=True), strict=True
        ):
            parameter.grad = None if gradient is None else gradient / (2 if loop.size == 1 else 1)
    loop.step()


def by_turns(loop: Loop, ids: Tensor) -> None:
    [replaces, puts, adds_to_backward, puts][loop.kept.setdefault("turn", torch.zeros(1)).int()](loop, ids)
    loop.kept["turn"] += 1


Habit = Callable[[Loop, Tensor], None]
CASES: list[tuple[type[nn.Module], models.Recipe, list[Habit]]] = [
    (Words, models.sgd, [puts, replaces, clips, adds_up]),
    (Words, models.sgd, [closes, ascends_first, only_rank_0, by_turns]),
    (Words, models.sparse_adam_and_adam, [puts, takes_turns]),
    (Tied, models.adam, [puts, replaces]),
    (Dense, models.momentum, [puts, copies, goes_on_with_a_copy, adds_to_backward, only_rank_0]),
]


def train(kind: type[nn.Module], recipe: models.Recipe, habit: Habit, mesh: tulle.Mesh | None, plan: object) -> Loop:
    model = build(kind, seed=0)
    loop = Loop(model, recipe(model))
    if mesh is not None:
        model, optimizers = tulle.distribute(model, loop.optimizers, mesh, plan=plan)
        loop = Loop(model, optimizers, mesh["data"].size, mesh["data"].rank)
    for ids in batches(STEPS, 8):
        habit(loop, ids)
    return loop


@on_ranks(2)
@pytest.mark.parametrize("schedule", ["step", "read"])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_gradients_that_are_set_by_hand_give_the_numbers_of_one_process(case, schedule):
    mesh = tulle.init(data=-1)
    give_network(mesh["data"])
    kind, recipe, habits = CASES[case]
    for habit in habits if schedule == "step" else habits[:3]:
        loop = train(kind, recipe, habit, mesh, Plan(mesh.shape, schedule=schedule))
        reference = train(kind, recipe, habit, None, None)
        difference, name = worst_difference(loop.model, reference.model)
        assert difference < TOLERANCE, f"{habit.__name__}: {name} differs by {difference:.1e}"
        if "norm" in loop.kept:
            torch.testing.assert_close(loop.kept["norm"], reference.kept["norm"], rtol=1e-12, atol=0)


@on_ranks(2)
def test_the_comparison_can_fail_where_gradients_that_are_set_by_hand_are_not_averaged(monkeypatch):
    mesh = tulle.init(data=-1)
    monkeypatch.setattr(covered, "average_by_hand", lambda *_, **__: None)
    loop = train(Words, models.sgd, puts, mesh, "auto")
    assert worst_difference(loop.model, train(Words, models.sgd, puts, None, None).model)[0] > 1e-4


class Mixed(nn.Module):
    """A table that is split, and layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(models.WORDS, 4)
        self.hidden = nn.Linear(4, 4)
        self.out = nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.hidden(self.words(ids).mean(1)).relu()).pow(2).mean()


def penalizes(loop: Loop, ids: Tensor) -> None:
    loop.model(loop.share(ids)).backward()
    layer = loop.model.hidden.weight
    [gradient] = torch.autograd.grad(loop.model(loop.share(ids)), [layer])
    layer.grad = layer.grad - 0.5 * gradient
    loop.step()


@on_ranks(2)
def test_replicas_beside_what_is_split_are_averaged_too():
    mesh = tulle.init(data=-1)
    for plan in ({"words.weight": "rows"}, Plan(mesh.shape, memory=Memory(full_shard=True))):
        loop = train(Mixed, models.adam, penalizes, mesh, plan)
        whole = tulle.full_state_dict(loop.model, everywhere=True)
        for name, value in train(Mixed, models.adam, penalizes, None, None).model.state_dict().items():
            torch.testing.assert_close(whole[name], value, rtol=1e-12, atol=1e-14)


def two_layers(mesh: tulle.Mesh) -> tuple[nn.Module, Optimizer]:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    return tulle.distribute(model, SGD(model.parameters(), lr=0.1), mesh)


def sent_in_step(model: nn.Module, optimizer: Optimizer) -> int:
    before = tulle.comm.traffic.total.messages
    optimizer.step()
    return tulle.comm.traffic.total.messages - before


@on_ranks(2)
def test_what_came_by_backward_or_stays_on_its_rank_costs_no_message():
    mesh = tulle.init(data=-1)
    model, optimizer = two_layers(mesh)
    for set_to_none in (True, False, False):
        model(torch.ones(1, 2)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        assert sent_in_step(model, optimizer) == 0
        assert sent_in_step(model, optimizer) == 0, "once more with the same"
        optimizer.zero_grad(set_to_none=set_to_none)
    words, [steps_words] = tulle.distribute(words := build(Words, seed=0), models.sgd(words), mesh)
    for ids in batches(STEPS, 8):
        words(ids.chunk(mesh.size)[mesh.rank]).backward()
        tulle.clip_grad_norm_(words, 0.1)
        assert words.words.weight.grad.is_sparse
        assert sent_in_step(words, steps_words) == 0
        steps_words.zero_grad()
    with model.no_sync():
        model(torch.ones(1, 2)).sum().mul(mesh.rank).backward()
        model[0].weight.grad = model[0].weight.grad * 2
        assert sent_in_step(model, optimizer) == 0
    assert sent_in_step(model, optimizer) == 0
    assert model[0].weight.grad.abs().sum().item() > 0 or mesh.rank == 0


@on_ranks(2)
def test_ranks_that_disagree_on_what_was_set_by_hand_are_told_so():
    mesh = tulle.init(data=-1)
    model, optimizer = two_layers(mesh)
    model(torch.ones(1, 2)).sum().backward()
    model[mesh.rank].bias.grad = model[mesh.rank].bias.grad * 2
    text = r"the gradient of '0.bias' was set by hand on rank 0 of axis 'data', and left as .* on rank 1. Have"
    with pytest.raises(GradientError, match=text):
        optimizer.step()


@on_ranks(2)
def test_a_rank_that_sets_no_gradient_where_another_does_is_named_to_both(monkeypatch):
    monkeypatch.setattr(by_hand, "_LONG_S", 0.05)
    mesh = tulle.init(data=-1)
    model, optimizer = two_layers(mesh)
    axis = engine_of(model).axis
    group = dist.new_group(list(axis.ranks), timeout=timedelta(seconds=0.3))
    engine_of(model).axis = replace(axis, group=group, timeout_s=0.3, lanes={}, kept={})
    model(torch.ones(1, 2)).sum().backward()
    if mesh.rank == 1:
        optimizer.step()
        with pytest.raises(
            CommunicationError, match="rank 0 waits for all ranks to average gradients, as the gradient"
        ):
            tulle.comm.barrier(engine_of(model).axis)
        return
    model[0].weight.grad = model[0].weight.grad * 2
    text = "the gradient of '0.weight' was set by hand, and .* rank 1 did not come to it.* Have all ranks set the same"
    with pytest.raises(CommunicationError, match=text):
        optimizer.step()


@on_ranks(2)
@pytest.mark.parametrize("clips", [False, True])
def test_a_scaler_that_has_looked_at_each_ranks_own_gradients_is_refused(clips):
    mesh = tulle.init(data=-1)
    model, optimizer = two_layers(mesh)
    scalers = [torch.amp.GradScaler("cpu", enabled=enabled) for enabled in (False, True)]
    for scaler in scalers:
        loss = scaler.scale(model(torch.ones(1, 2)).sum())
        for parameter, gradient in zip(model.parameters(), torch.autograd.grad(loss, model.parameters()), strict=True):
            parameter.grad = gradient
        scaler.unscale_(optimizer)
        if clips:
            tulle.clip_grad_norm_(model, 1.0)
        if scaler.is_enabled():
            with pytest.raises(GradientError, match=r"'0.weight' and 3 more were set by hand, and a GradScaler has"):
                scaler.step(optimizer)
        else:
            scaler.step(optimizer)
        optimizer.zero_grad()
    scaler.update()
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    scaler.unscale_(optimizer)
    model[0].weight.grad = model[0].weight.grad * 0.5
    scaler.step(optimizer)
