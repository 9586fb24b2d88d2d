"""Parameters that are shared out over axis `data` train to the numbers of one process, along any other axes."""

import copy
import math
import sys

import pytest
import torch
from axes_models import build, distributed, optimizers, train, worst_difference
from sharded_plans import FULL, planned
from torch import nn

import tulle
from ranks import on_ranks, run_on_ranks
from tulle.memory import named_shards
from tulle.memory.unit import Unit
from tulle.parts import Part
from tulle.plan import Memory, Plan

LAYERS = ("encoder.layers.0", "encoder.layers.1")


STEPS, MORE = range(2), range(2, 4)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.unused = nn.LSTM(3, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.layer(x)[0].sum()


def ours(model):
    return tulle.clip_grad_norm_(model, 0.1).item()


def torchs(model):
    return nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()


def compare(kind, shape, memory, clip=None):
    reference = build(kind)
    wanted = train(reference, optimizers(reference), clip=clip)
    model, several, place = distributed(kind, shape, plan=planned(kind, shape, memory))
    found = train(model, several, *place, clip=clip)
    assert found[1::2] == pytest.approx(wanted[1::2], rel=1e-12) or clip is None
    assert worst_difference(tulle.full_state_dict(model, everywhere=True), reference.state_dict()) < 1e-12
    return model


@on_ranks(4)
def test_it_is_one_process_with_a_pipeline_and_holds_half():
    model = compare("stack", {"data": 2, "pipe": 2}, FULL, clip=ours)
    held = {name: p for name, p in model.named_parameters() if not p.is_meta}
    shards = named_shards(model)
    assert sorted(shards) == sorted(held), "nothing of this model is too small"
    assert sum(p.to_local().numel() for p in held.values()) == sum(shards[name].shape.numel() for name in held) / 2


@on_ranks(4)
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "clip"), [("words", ours), ("stack", torchs), ("gpt2", None), ("gpt2", torchs)])
@pytest.mark.parametrize("shape", [{"data": 4}, {"data": 2, "pipe": 2}, {"data": 2, "model": 2}], ids=str)
def test_it_is_one_process_on_other_axes(kind, shape, clip):
    compare(kind, shape, FULL, clip)


@on_ranks(8, deadline_s=240.0)
@pytest.mark.slow
@pytest.mark.parametrize("saved", [Memory(full_shard=True, recompute=LAYERS[:1], offload=LAYERS[1:]), FULL], ids=str)
def test_it_is_one_process_on_three_axes(saved):
    compare("stack", {"data": 2, "pipe": 2, "model": 2}, saved, torchs)


@on_ranks(3)
@pytest.mark.slow
@pytest.mark.parametrize("recomputed", [(), ("network.transformer",), ("network.transformer.h.0.mlp",)], ids=str)
def test_what_is_recomputed_around_or_within_what_is_gathered_is_one_process(recomputed):
    reference = build("gpt2")
    train(reference, optimizers(reference), steps=STEPS)
    mesh = tulle.init(data=-1)
    model = build("gpt2")
    several = optimizers(model)
    plan = Plan(mesh.shape, memory=Memory(full_shard=True, recompute=recomputed))
    tulle.distribute(model, several, mesh, plan=plan)
    train(model, several, steps=STEPS)  # all ranks have the whole batch, which is what three of them cannot share
    assert worst_difference(tulle.full_state_dict(model, everywhere=True), reference.state_dict()) < 1e-12


def save(path, kind, shape):
    model, several, place = distributed(kind, shape, plan=planned(kind, shape, FULL))
    train(model, several, *place, steps=STEPS)
    tulle.save(path / "checkpoint", model, several)
    tulle.save_safetensors(path / "model.safetensors", model)


def go_on(path, kind, shape, memory):
    model, several, place = distributed(kind, shape, plan=planned(kind, shape, memory))
    tulle.load(path / "checkpoint", model, several)
    train(model, several, *place, steps=MORE)
    return tulle.full_state_dict(model)


def check_checkpoints(path, kind, saved_on, loaded_on):
    reference = build(kind)
    train(reference, optimizers(reference), steps=range(MORE.stop))
    run_on_ranks(math.prod(saved_on.values()), save, deadline_s=240.0, path=path, kind=kind, shape=saved_on)
    for shape, memory in loaded_on:
        found = run_on_ranks(
            math.prod(shape.values()), go_on, deadline_s=240.0, path=path, kind=kind, shape=shape, memory=memory
        )
        assert worst_difference(found[0], reference.state_dict()) < 1e-12, shape


def test_a_checkpoint_of_shards_loads_whole_and_on_other_axes(tmp_path):
    whole = {"data": 1}, Memory()
    check_checkpoints(tmp_path, "stack", {"data": 2, "model": 2}, [whole])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["stack", "gpt2", "words"])
def test_a_checkpoint_of_shards_on_three_axes_loads_on_any(kind, tmp_path):
    three = {"data": 2, "pipe": 2, "model": 2}
    loaded_on = [({"data": 1}, Memory()), ({"pipe": 2, "model": 2}, Memory()), (three, FULL), ({"data": 4}, FULL)]
    check_checkpoints(tmp_path, kind, three, loaded_on)


@on_ranks(2)
def test_states_are_whole_and_an_unused_parameter_has_no_gradient():
    mesh = tulle.init(data=-1)
    torch.manual_seed(0)
    model = Recurrent()
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters())
    tulle.distribute(model, optimizer, mesh, plan=Plan(mesh.shape, memory=FULL))
    model(torch.ones(2, 3)).backward()
    assert model.unused.weight.grad is None
    weight = model.layer.weight_ih_l0
    assert weight.grad.shape == weight.shape == (24, 3)
    assert weight.grad.to_local().shape == weight.to_local().shape == (12, 3)
    assert worst_difference(model.state_dict(), whole) == 0.0
    model.load_state_dict({name: value + 1 for name, value in whole.items()})
    assert worst_difference(model.state_dict(), {name: value + 1 for name, value in whole.items()}) == 0.0
    text = (
        r"layer.weight_ih_l0: the state has a tensor of shape \[3, 12\], expected \[24, 3\], the whole, or this rank's"
    )
    with pytest.raises(RuntimeError, match=text):
        model.load_state_dict(whole | {"layer.weight_ih_l0": torch.ones(3, 12)})


@on_ranks(2)
def test_the_twin_that_adds_up_nothing_is_found(monkeypatch):
    def only_mine(self, gradients, parts):
        return [None if g is None else shard.part(g) for g, shard in zip(gradients, self.shards, strict=True)]

    monkeypatch.setattr(Unit, "reduce", only_mine)
    with pytest.raises(AssertionError):
        compare("stack", {"data": 2}, FULL)


@on_ranks(2)
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
def test_a_layer_whose_weight_is_made_by_a_hook_is_gathered_with_what_is_around_it():
    def trained(model, distribute):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        distribute(model, optimizer)
        model(torch.ones(2, 4).double()).pow(2).mean().backward()
        optimizer.step()
        return tulle.full_state_dict(model, everywhere=True)

    def made():
        torch.manual_seed(0)
        return nn.Sequential(*(nn.utils.weight_norm(nn.Linear(4, 4).double()) for _ in range(2)))

    wanted = trained(made(), lambda *_: None)
    mesh = tulle.init(data=-1)
    plan = Plan(mesh.shape, memory=FULL)
    found = trained(made(), lambda model, optimizer: tulle.distribute(model, optimizer, mesh, plan=plan))
    assert worst_difference(found, wanted) < 1e-12


@on_ranks(2)
@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_what_torchscript_reads_stays_whole_and_is_one_process(monkeypatch):
    def made():
        torch.manual_seed(0)
        inner = torch.jit.script(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)))
        model = nn.Sequential(nn.Linear(4, 4), inner, nn.Linear(4, 4)).double()
        return model, torch.optim.Adam(model.parameters(), lr=0.05, eps=1e-3)

    mesh = tulle.init(data=-1)
    (model, optimizer), (reference, other) = made(), made()
    said = []
    monkeypatch.setattr("tulle.memory.shared_out.logger.warning", lambda text, *values: said.append(text % values))
    tulle.distribute(model, optimizer, mesh, plan=Plan(mesh.shape, memory=FULL))
    assert [name for name in ("0.weight", "1.0.weight") if type(model.get_parameter(name)) is not nn.Parameter] == [
        "0.weight"
    ]
    assert ["leaves the parameters of '1' whole" in text for text in said] == [True] * (mesh.rank == 0)
    for network, stepped, rank, size in ((model, optimizer, mesh.rank, mesh.size), (reference, other, 0, 1)):
        for step in range(2):
            x = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            network(x.chunk(size)[rank]).pow(2).mean().backward()
            stepped.step()
            stepped.zero_grad()
    assert worst_difference(tulle.full_state_dict(model, everywhere=True), reference.state_dict()) < 1e-12


class Odd(nn.Module):
    """A block of which two names are called, and weights of types that are not trained, as of what was quantized."""

    def __init__(self):
        super().__init__()
        block = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
        self.layers = nn.Sequential(nn.Linear(4, 4), block, block, nn.Linear(4, 4))
        self.narrow = nn.Parameter(torch.arange(-12, 12, dtype=torch.int8).view(4, 6), requires_grad=False)
        self.mask = nn.Parameter(torch.arange(24).view(4, 6) % 3 > 0, requires_grad=False)
        self.places = nn.Parameter(torch.arange(4).flip(0), requires_grad=False)

    def forward(self, x):
        return self.layers(x)[:, self.places] @ (self.narrow.to(x.dtype) / 12 * self.mask)


@on_ranks(2)
@pytest.mark.parametrize("recomputed", [False, True])
def test_shared_blocks_and_weights_of_any_type_are_one_process(recomputed):
    def trained(mesh=None):
        torch.manual_seed(0)
        model, rank, size = Odd().double(), 0, 1
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        if mesh is not None:
            rank, size = mesh.rank, mesh.size
            names = tuple(tulle.memory.repeated(model)) if recomputed else ()
            tulle.distribute(
                model, optimizer, mesh, plan=Plan(mesh.shape, memory=Memory(full_shard=True, recompute=names))
            )
            assert isinstance(model.narrow, Part)
        for step in range(3):
            x = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            model(x.chunk(size)[rank]).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return tulle.full_state_dict(model, everywhere=True)

    assert worst_difference(trained(tulle.init(data=-1)), trained()) < 1e-12


def norms_after_a_step_that_failed(model, optimizer, x, monkeypatch):
    """Of a parameter and of its gradient, where the step that should use it ends in an error."""

    def fail(*_, **__):
        raise FloatingPointError

    model(x).pow(2).mean().backward()
    monkeypatch.setattr(sys.modules[type(optimizer).__module__], type(optimizer).__name__.lower(), fail)
    with pytest.raises(FloatingPointError):
        optimizer.step()
    parameter = next(model.parameters())
    return torch.stack([parameter.norm(), parameter.grad.norm()]).detach()


@on_ranks(2)
def test_after_a_step_that_failed_norms_are_those_of_the_whole(monkeypatch):
    def made():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
        return model, torch.optim.Adam(model.parameters())

    mesh, x = tulle.init(data=-1), torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = norms_after_a_step_that_failed(*made(), x, monkeypatch)
    model, optimizer = tulle.distribute(*made(), mesh, plan=Plan({"data": 2}, memory=FULL))
    found = norms_after_a_step_that_failed(model, optimizer, x.chunk(2)[mesh.rank], monkeypatch)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def numbers_of_halves(model, x):
    """Gradients near the largest number of half precision, and what is made of all numbers of a parameter."""
    (model(x).sum(1).mean() * 40_000).backward()
    weight = model.weight
    numbers = [weight.mean(), weight.norm(), weight.norm(3), weight.std(), weight.grad.norm() / weight.grad.max()]
    return [number.item() for number in [*numbers, weight.grad.max(), model.bias.grad.min()]]


@on_ranks(2)
def test_what_fits_half_precision_does_so_where_it_is_shared_out():
    def made():
        torch.manual_seed(0)
        model = nn.Linear(64, 64, dtype=torch.float16)
        with torch.no_grad():
            model.weight.mul_(100).add_(20)
        return model, torch.optim.SGD(model.parameters())

    mesh, x = tulle.init(data=-1), torch.full((2, 64), 0.01, dtype=torch.float16)
    expected = numbers_of_halves(made()[0], x)
    model, _ = tulle.distribute(*made(), mesh, plan=Plan({"data": 2}, memory=FULL))
    assert numbers_of_halves(model, x.chunk(2)[mesh.rank]) == pytest.approx(expected, rel=2e-3)


@on_ranks(2)
def test_parameters_are_equal_if_wholes_are():
    mesh = tulle.init(data=-1)
    torch.manual_seed(0)
    # Rows of the second are cut, columns of the third: parts have one shape, and wholes have not.
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(2, 4), nn.Linear(4, 1, bias=False), nn.Linear(1, 4)])
    model = nn.ModuleDict({"layers": model, "same": copy.deepcopy(model)})
    nn.init.ones_(model["same"][0].bias)
    expected = [[torch.equal(one, other) for other in model.parameters()] for one in model.parameters()]
    tulle.distribute(model, torch.optim.SGD(model.parameters()), mesh, plan=Plan({"data": 2}, memory=FULL))
    assert [[torch.equal(one, other) for other in model.parameters()] for one in model.parameters()] == expected


class Attentive(nn.Module):
    """Words of a graph, whose edges are a sparse parameter that is weighed anew (KGAT, Wang et al., 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 4)
        self.edges = nn.Parameter(torch.eye(10).to_sparse_coo().double(), requires_grad=False)

    def forward(self, ids):
        return (self.edges @ self.words.weight)[ids]

    @torch.no_grad()
    def weigh(self):
        scores = torch.sparse_coo_tensor(self.edges.indices(), self.words(self.edges.indices()[1]).sum(1), (10, 10))
        self.edges.data = torch.sparse.softmax(scores.coalesce(), 1) * 0.5


@on_ranks(2)
def test_a_sparse_parameter_stays_whole_and_is_one_process(tmp_path):
    mesh = tulle.init(data=-1)

    def trained(rank=0, size=1):
        torch.manual_seed(0)
        model = Attentive().double()
        optimizer = torch.optim.Adam([model.words.weight], lr=0.05, eps=1e-3)
        if size > 1:
            tulle.distribute(model, optimizer, mesh, plan=Plan(mesh.shape, memory=FULL))
        for step in range(3):
            ids = torch.randint(10, (8,), generator=torch.Generator().manual_seed(step))
            model(ids.chunk(size)[rank]).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            model.weigh()
        return model, optimizer

    (wanted, _), (model, optimizer) = trained(), trained(mesh.rank, mesh.size)
    tulle.save(tmp_path / "checkpoint", model, optimizer)
    found = Attentive().double()
    tulle.load(tmp_path / "checkpoint", found)
    for name, value in found.state_dict().items():
        torch.testing.assert_close(value.to_dense(), wanted.state_dict()[name].to_dense(), rtol=1e-12, atol=1e-13)
