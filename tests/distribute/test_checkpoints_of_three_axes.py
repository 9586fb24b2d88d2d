"""A checkpoint that was saved on some axes loads on any others, with the optimizers' state; and is a plain one."""

from copy import deepcopy

import pytest
import torch
from axes_models import build, distributed, optimizers, train, worst_difference
from torch import nn

import tulle
from crossing import crossed
from ranks import on_ranks, run_on_ranks
from tulle.plan import Memory, Plan

STEPS, MORE = range(2), range(2, 4)
SHAPES = {"pipe": 2, "model": 2}, {"data": 2, "pipe": 2}, {"data": 2, "model": 2}, {"data": 4}, {"pipe": 2}, {"data": 1}


def save_on_ranks(kind, shape, path, plan="auto", asynchronous=False):
    model, several, place = distributed(kind, shape, plan=plan)
    train(model, several, *place, steps=STEPS)
    saved = tulle.save(path / "checkpoint", model, several, step=len(STEPS), asynchronous=asynchronous)
    if saved is not None:
        saved.result()
    tulle.save_safetensors(path / "model.safetensors", model)
    state = tulle.full_state_dict(model)
    if torch.distributed.get_rank() == 0:
        torch.save(state, path / "model.pt")


def go_on_on_ranks(kind, shape, path, plan="auto"):
    model, several, place = distributed(kind, shape, plan=plan)
    assert tulle.load(path / "checkpoint", model, several) == {"step": len(STEPS)}
    train(model, several, *place, steps=MORE)
    return tulle.full_state_dict(model)


def ranks_of(shape):
    return torch.tensor([*shape.values()]).prod().item()


def check(kind, path, saved_on, loaded_on, **plans):
    reference = build(kind)
    several = optimizers(reference)
    train(reference, several, steps=STEPS)
    run_on_ranks(ranks_of(saved_on), save_on_ranks, deadline_s=240.0, kind=kind, shape=saved_on, path=path, **plans)
    plain = torch.load(path / "model.pt")
    assert worst_difference(plain, reference.state_dict()) < 1e-12
    assert {name: value.shape for name, value in plain.items()} == {
        name: value.shape for name, value in reference.state_dict().items()
    }
    build(kind).load_state_dict(plain)
    check_safetensors(path / "model.safetensors", plain)
    train(reference, several, steps=MORE)
    for shape in loaded_on:
        found = run_on_ranks(
            ranks_of(shape), go_on_on_ranks, deadline_s=240.0, kind=kind, shape=shape, path=path, **plans
        )
        assert worst_difference(found[0], reference.state_dict()) < 1e-12, shape


def check_safetensors(path, plain):
    from safetensors.torch import load_file

    saved = load_file(path)
    assert set(saved) <= set(plain)
    assert all(torch.equal(value, plain[name]) for name, value in saved.items())


@on_ranks(4)
@pytest.mark.parametrize(
    ("shape", "memory"),
    crossed(
        [{"data": 2, "model": 2}, {"pipe": 2, "model": 2}],
        [Memory(full_shard=True), Memory(shard_optimizer=True), Memory()],
    ),
)
def test_states_of_a_plain_model_and_its_optimizer_load(shape, memory, tmp_path):
    reference = build("stack")
    theirs = optimizers(reference)
    train(reference, theirs, steps=STEPS)
    model, ours, place = distributed("stack", shape, plan=Plan(shape, memory=memory))
    model.load_state_dict(reference.state_dict())
    for one, other in zip(ours, theirs, strict=True):
        one.load_state_dict(deepcopy(other.state_dict()))
    tulle.save(tmp_path / "checkpoint", model, ours)  # what lives at other stages has no state here
    train(model, ours, *place, steps=MORE)
    train(reference, theirs, steps=MORE)
    assert worst_difference(tulle.full_state_dict(model, everywhere=True), reference.state_dict()) < 1e-12


@pytest.mark.slow
def test_what_two_axes_saved_others_load(tmp_path):
    check("stack", tmp_path, {"pipe": 2, "model": 2}, [{"data": 2, "pipe": 2}])


def test_a_split_table_is_saved_by_its_stage(tmp_path):
    check("words", tmp_path, {"data": 2, "pipe": 2}, [{"data": 2}], plan={"words.weight": "rows"})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["words", "stack", "gpt2"])
def test_what_three_axes_saved_any_others_load(kind, tmp_path):
    check(kind, tmp_path, {"data": 2, "pipe": 2, "model": 2}, SHAPES)


@pytest.mark.slow
@pytest.mark.parametrize("saved_on", SHAPES, ids=str)
def test_what_any_axes_saved_three_load(saved_on, tmp_path):
    check("stack", tmp_path, saved_on, [{"data": 2, "pipe": 2, "model": 2}])


@pytest.mark.slow
def test_stages_are_saved_while_training_goes_on(tmp_path):
    run_on_ranks(4, save_on_ranks, kind="stack", shape={"data": 2, "pipe": 2}, path=tmp_path, asynchronous=True)
    [found] = run_on_ranks(1, go_on_on_ranks, kind="stack", shape={"data": 1}, path=tmp_path)
    reference = build("stack")
    train(reference, optimizers(reference), steps=range(MORE.stop))
    assert worst_difference(found, reference.state_dict()) < 1e-12


@on_ranks(2)
def test_the_whole_may_be_asked_for_while_stages_are_saved(tmp_path):
    model, several, _ = distributed("stack", {"pipe": 2})
    saved = tulle.save(tmp_path / "checkpoint", model, several, asynchronous=True)
    wanted = build("stack").state_dict()
    assert worst_difference(tulle.full_state_dict(model, everywhere=True), wanted) == 0.0
    assert saved.done(), "both travel on one lane"
    tulle.save(tmp_path / "checkpoint", model, several, asynchronous=True)
    tulle.save_safetensors(tmp_path / "model.safetensors", model)


@on_ranks(2)
@pytest.mark.parametrize("placement", ["rows", "columns"])
def test_momentum_of_sparse_gradients_loads_into_split_tables(placement):
    def made():
        torch.manual_seed(0)
        model = nn.Embedding(10, 4, sparse=True).double()
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(model, optimizer):
        model(torch.tensor([1, 3, 3, 7])).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    reference, theirs = made()
    step(reference, theirs)
    model, ours = made()
    tulle.distribute(model, ours, tulle.init(data=-1), plan={"weight": placement})
    model.load_state_dict(reference.state_dict())
    ours.load_state_dict(deepcopy(theirs.state_dict()))
    step(model, ours)
    step(reference, theirs)
    assert worst_difference(tulle.full_state_dict(model, everywhere=True), reference.state_dict()) < 1e-12


@on_ranks(2)
def test_a_weight_that_its_module_has_made_another_dtype_is_known_to_all():
    mesh = tulle.init(pipe=2)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tulle.distribute(
        model, torch.optim.SGD(model.parameters()), mesh, plan=Plan(dict(mesh.shape), stages={"0": 0, "1": 1})
    )
    wanted = tulle.full_state_dict(model, everywhere=True)["1.weight"].double()
    if mesh.rank == 1:
        model[1].double()  # as a forward does
    state = tulle.full_state_dict(model, everywhere=True)
    torch.testing.assert_close(state["1.weight"], wanted, rtol=0, atol=0)


class Masked(nn.Linear):
    """Makes its mask when it is first called, and what its state leaves out."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("mask", None)
        self.register_buffer("left_out", None, persistent=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.mask is None:
            self.mask = torch.linspace(0, 1, input.shape[1])
            self.left_out = torch.ones(input.shape[1])
        return super().forward(input) * self.mask + self.left_out


@on_ranks(2)
def test_buffers_that_a_stage_makes_in_its_forward_are_saved_and_loaded(tmp_path):
    def called() -> nn.Sequential:
        model, plan = nn.Sequential(Masked(), Masked()), Plan(dict(mesh.shape), stages={"0": 0, "1": 1})
        tulle.distribute(model, torch.optim.SGD(model.parameters()), mesh, plan=plan)
        model(torch.zeros(1, 2))
        return model

    mesh = tulle.init(pipe=2)
    model, other = called(), called()
    state = tulle.full_state_dict(model, everywhere=True)
    assert sorted(state) == ["0.bias", "0.mask", "0.weight", "1.bias", "1.mask", "1.weight"]
    tulle.save(tmp_path / "checkpoint", model)
    tulle.load(tmp_path / "checkpoint", other)
    assert worst_difference(tulle.full_state_dict(other, everywhere=True), state) == 0.0
