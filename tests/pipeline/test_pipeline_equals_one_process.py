"""The promise: on any number of stages, in any order, loss and gradients of one process, without changing the model."""

import copy

import pipeline_networks as networks
import pytest
import torch
from pipeline_networks import (
    ALL,
    WIDTH,
    Chain,
    Drops,
    Norms,
    TiedEnds,
    Translator,
    batches,
    compare,
    make,
    spread,
    train,
)

import tulle
from crossing import crossed
from ranks import on_ranks
from tulle import pipeline
from tulle.pipeline import placement_of

TOLERANCE = 1e-14


@on_ranks(1, 2, 3, 4)
def test_every_network_on_every_number_of_stages():
    mesh = tulle.init(pipe=-1)
    for kind in ALL:
        difference = compare(kind, mesh, spread(make(kind), mesh.size))
        assert difference < TOLERANCE, f"{kind.__name__} differs by {difference:.1e}"


@on_ranks(2, 3)
def test_modules_dealt_against_the_order_in_which_they_run():
    mesh = tulle.init(pipe=-1)
    for kind in ALL:
        forward = spread(make(kind), mesh.size)
        backward = {name: mesh.size - 1 - stage for name, stage in forward.items()}
        assert compare(kind, mesh, backward) < TOLERANCE, kind.__name__


@on_ranks(3)
@pytest.mark.parametrize(("schedule", "stages_a_rank"), crossed(["gpipe", "1f1b", "zb-h1"], [2, 1]))
def test_every_schedule(schedule, stages_a_rank):
    mesh = tulle.init(pipe=-1)
    for kind in (Chain, Translator, TiedEnds):
        assignment = spread(make(kind), stages_a_rank * mesh.size, depth=4)
        assert compare(kind, mesh, assignment, schedule=schedule, micro_batches=7) < TOLERANCE, kind.__name__


@on_ranks(3)
def test_no_partition_at_all_runs_operation_by_operation():
    """Parameters alone have owners: every operation is between modules."""
    mesh = tulle.init(pipe=-1)
    assert compare(Chain, mesh, {"layers.0": 0, "layers.3": 1, "layers.5": 2}) < TOLERANCE


@on_ranks(2)
def test_lengths_that_differ_from_step_to_step_and_sizes_within():
    mesh = tulle.init(pipe=-1)
    model = make(Translator)
    reference = copy.deepcopy(model)
    pipeline.place(model, mesh["pipe"], spread(model, 2, depth=4))
    step = pipeline.step(micro_batches=3)(train)
    for length, samples in ((5, 7), (9, 3), (5, 8)):
        x = torch.randn(samples, length, dtype=torch.float64, generator=torch.Generator().manual_seed(length))
        losses = step(model, x)
        one = networks.one_process(reference, x, 3, 0, 0)
        assert losses.stack().tolist() == one
        shares = [len(part) / samples for part in x.tensor_split(3)]
        assert losses.mean().item() == pytest.approx(sum(a * b for a, b in zip(one, shares, strict=True)), rel=1e-14)
    assert networks.worst_gradient(model, reference) < TOLERANCE


def masks_of_dropout(assignment_of_ranks: dict[int, int]) -> list[float]:
    mesh = tulle.init(pipe=-1)
    model = make(Drops)
    assignment = {f"layers.{layer}": assignment_of_ranks[layer] for layer in range(6)} | {"dropout": 0}
    pipeline.place(model, mesh["pipe"], assignment)
    step = pipeline.step(micro_batches=3)(train)
    return [loss for x in batches(3, 6) for loss in step(model, x).stack().tolist()]


def drawn_on_ranks() -> list[float]:
    return masks_of_dropout({layer: layer * tulle.init(pipe=-1).size // 6 for layer in range(6)})


def test_dropout_draws_the_same_on_any_number_of_ranks():
    from ranks import run_on_ranks

    alone = run_on_ranks(1, drawn_on_ranks)[0]
    for ranks in (2, 3):
        assert run_on_ranks(ranks, drawn_on_ranks) == [alone] * ranks
    assert len(set(alone)) == len(alone), "each micro-batch draws numbers of its own"


@on_ranks(2)
def test_outside_of_steps_and_without_gradients():
    mesh = tulle.init(pipe=-1)
    model = make(Norms)
    reference = copy.deepcopy(model)
    pipeline.place(model, mesh["pipe"], {"first": 0, "norm": 0, "last": 1})
    for x in batches(2, 5):
        for one in (model, reference):
            loss = one(x).pow(2).mean() + one(x + 1).sum()  # two calls before one backward
            loss.backward()
    assert networks.worst_gradient(model, reference) < TOLERANCE
    for one in (model, reference):
        one.eval()
    x = torch.ones(3, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        given, expected = model(x), reference(x)
    assert not given.requires_grad
    assert given.shape == expected.shape
    assert given.tolist() == expected.tolist()
    assert float(given.sum()) == expected.sum().item()


@on_ranks(2)
def test_gradients_add_up_over_backwards_and_steps_of_an_optimizer():
    mesh = tulle.init(pipe=-1)
    model = make(TiedEnds)
    reference = copy.deepcopy(model)
    optimizers = [torch.optim.Adam(one.parameters(), lr=0.1) for one in (model, reference)]
    pipeline.place(model, mesh["pipe"], {"embed": 0, "middle": 0, "other": 1, "head": 1})
    step = pipeline.step(micro_batches=2)(train)
    for number, x in enumerate(batches(6, 4)):
        step(model, x)
        networks.one_process(reference, x, 2, 0, 0)
        if number % 2:  # every other: gradients of two steps add up
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    ours, theirs = dict(model.named_parameters()), dict(reference.named_parameters())
    for name, parameter in ours.items():
        if not parameter.is_meta:
            assert torch.allclose(parameter, theirs[name], rtol=1e-10, atol=1e-12), name
    held = [state for state in optimizers[0].state.values() if state]
    assert len(held) == sum(not parameter.is_meta for parameter in model.parameters())


def autocast(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x)
        loss = (out * out).mean()
    loss.backward()
    return loss


@on_ranks(2)
def test_autocast_around_and_within_a_step():
    mesh = tulle.init(pipe=-1)
    torch.manual_seed(0)
    model = Chain()
    reference = copy.deepcopy(model)
    pipeline.place(model, mesh["pipe"], spread(model, 2))
    x = torch.randn(4, WIDTH)
    for function in (autocast, train):
        with torch.autocast("cpu", torch.bfloat16, enabled=function is train):
            losses = pipeline.step(micro_batches=2)(function)(model, x)
            assert losses.stack().tolist() == pipeline.step(micro_batches=2)(function)(reference, x).stack().tolist()
    assert networks.worst_gradient(model, reference) == 0.0


@on_ranks(2)
def test_a_frozen_module_and_one_unfrozen_later():
    mesh = tulle.init(pipe=-1)
    model = make(Chain)
    for parameter in model.layers[:4].parameters():
        parameter.requires_grad_(requires_grad=False)
    reference = copy.deepcopy(model)
    pipeline.place(model, mesh["pipe"], spread(model, 2))
    step = pipeline.step(micro_batches=2)(train)
    for number, x in enumerate(batches(4, 4)):
        if number == 2:
            for one in (model, reference):
                one.layers[1].weight.requires_grad_()
        step(model, x)
        networks.one_process(reference, x, 2, 0, 0)
        assert networks.worst_gradient(model, reference) < TOLERANCE


@on_ranks(2)
def test_what_a_step_returns_is_known_on_all_ranks():
    mesh = tulle.init(pipe=-1)
    model = make(Chain)
    pipeline.place(model, mesh["pipe"], spread(model, 2))

    @pipeline.step(micro_batches=2, split={"batch.scale": None, "batch.late": 1})
    def evaluate(model, batch, name):
        with torch.no_grad():
            y = model(batch["x"]) * batch["scale"] + batch["late"].T
        return {"y": y, "name": name, "sum": y.sum()}

    x, late = torch.randn(5, WIDTH, dtype=torch.float64), torch.zeros(WIDTH, 5, dtype=torch.float64)
    found = evaluate(model, {"x": x, "scale": torch.ones(1, WIDTH), "late": late}, name="held out")
    assert type(found["y"].concat()) is torch.Tensor
    assert found["y"].concat().shape == (5, WIDTH)
    assert found["name"].outputs == ["held out"] * 2
    assert found["sum"].sum().item() == pytest.approx(found["y"].concat().sum().item())
    assert placement_of(model) is not None
    assert placement_of(copy.deepcopy(model)) is None


class Masked(Chain):
    """A buffer that was expanded, as masks are: one number in many places."""

    def __init__(self) -> None:
        super().__init__(2)
        self.register_buffer("mask", torch.linspace(1, 2, WIDTH).mul(1 + torch.distributed.get_rank()).expand(3, WIDTH))


@on_ranks(2)
def test_buffers_that_were_expanded_start_as_the_first_ranks_too():
    mesh = tulle.init(pipe=-1, timeout=8)
    model = pipeline.place(Masked(), mesh["pipe"], {"layers.0": 0, "layers.1": 1})
    assert model.mask.stride(0) == 0
    assert model.mask.equal(torch.linspace(1, 2, WIDTH).expand(3, WIDTH))
