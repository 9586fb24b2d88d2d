"""Parameters that are shared out over axis `data` train to the numbers of one process, along any other axes."""

import copy
import io
import math
import pickle
import sys
from dataclasses import replace

import axes_models
import pytest
import torch
from axes_models import build, distributed, optimizers, train, worst_difference
from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import tulle
from ranks import on_ranks, run_on_ranks
from tulle.errors import GradientError, ModelError, PlanError
from tulle.memory import named_shards
from tulle.memory.shards import SHARDABLE
from tulle.memory.unit import Unit
from tulle.plan import Memory, Plan, plan_for_later
from tulle.tables import ShardGradient

LAYERS = ("encoder.layers.0", "encoder.layers.1")
FULL = Memory(full_shard=True)
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


def planned(kind, shape, memory):
    tables = {"words.weight": (40, 8)} if kind == "words" else {}
    return replace(plan_for_later(shape, tables), memory=memory)


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
    assert sum(p.numel() for p in held.values()) == sum(shards[name].shape.numel() for name in held) / 2


@on_ranks(2)
def test_a_part_is_not_taken_for_the_whole():
    model, _, _ = distributed("stack", {"data": 2}, plan=planned("stack", {"data": 2}, FULL))
    weight = model.encoder.layers[0].linear1.weight
    shard = named_shards(model)["encoder.layers.0.linear1.weight"]
    wrong = {
        "T": lambda: torch.ones(2, shard.shape[1]).double() @ weight.T,
        "__getitem__": lambda: weight[0],
        "normal_": lambda: nn.init.normal_(weight),
        "mean": lambda: (weight * weight).mean().backward(),
    }
    for taker, read in wrong.items():
        with pytest.raises(ModelError, match=rf"^{taker} was given 'encoder\.layers\.0\.linear1\.weight' as if all"):
            read()
    (gradient,) = torch.autograd.grad((weight**2).sum(), [weight])
    assert torch.equal(gradient, 2 * weight.detach())
    kept = io.BytesIO()
    torch.save(weight, kept)
    kept.seek(0)
    loaded = torch.load(kept)
    assert type(loaded) is nn.Parameter
    assert torch.equal(loaded, weight.detach())


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
    assert model.layer.weight_ih_l0.grad.shape == model.layer.weight_ih_l0.shape == (12, 3)
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
def test_what_cannot_be_shared_out_is_refused():
    mesh = tulle.init(data=-1)
    model = build("stack")
    namesake = type("Adam", (torch.optim.SGD,), {})
    for optimizer in (torch.optim.LBFGS(model.parameters()), namesake(model.parameters())):
        refused = f"full_shard, but {type(optimizer).__name__} is not known to treat every number of a parameter by"
        with pytest.raises(PlanError, match=refused):
            tulle.distribute(model, optimizer, mesh, plan=Plan(mesh.shape, memory=FULL))


@on_ranks(2)
def test_gradients_that_are_to_have_gradients_are_refused():
    mesh = tulle.init(data=-1)
    model = nn.Linear(4, 4)
    tulle.distribute(model, torch.optim.SGD(model.parameters()), mesh, plan=Plan(mesh.shape, memory=FULL))
    with pytest.raises(ModelError, match=r"of Linear were asked for with create_graph=True, .* without full_shard"):
        model(torch.ones(1, 4)).pow(2).sum().backward(create_graph=True)


@on_ranks(2)
def test_parameters_that_others_take_the_place_of_are_named_before_anything_is_sent():
    mesh = tulle.init(data=-1)

    def take_away(model):
        model[1] = nn.Tanh()

    def replace_bias(model):
        model[1].bias = nn.Parameter(torch.zeros(4))

    for change, name in ((take_away, "1.weight"), (replace_bias, "1.bias")):
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        tulle.distribute(model, torch.optim.SGD(model.parameters()), mesh, plan=Plan(mesh.shape, memory=FULL))
        model(torch.ones(1, 4)).sum().backward()
        change(model)
        with pytest.raises(
            ModelError, match=f"^'{name}' of Sequential was shared out by full_shard, and has been taken"
        ):
            model(torch.ones(1, 4))


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
    assert [name for name in ("0.weight", "1.0.weight") if model.get_parameter(name).numel() == 8] == ["0.weight"]
    assert ["leaves the parameters of '1' whole" in text for text in said] == [True] * (mesh.rank == 0)
    for network, stepped, rank, size in ((model, optimizer, mesh.rank, mesh.size), (reference, other, 0, 1)):
        for step in range(2):
            x = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            network(x.chunk(size)[rank]).pow(2).mean().backward()
            stepped.step()
            stepped.zero_grad()
    assert worst_difference(tulle.full_state_dict(model, everywhere=True), reference.state_dict()) < 1e-12


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
@pytest.mark.parametrize(("shape", "memory"), [({"data": 2}, FULL), ({"model": 2}, Memory())], ids=str)
def test_a_pickle_says_what_to_take_instead(shape, memory):
    model, _, _ = distributed("stack", shape, plan=Plan(shape, memory=memory))
    for pickled in (model, model.encoder.layers[0], nn.Sequential(model)):
        for write in (pickle.dumps, lambda one: torch.save(one, io.BytesIO())):
            with pytest.raises(ModelError, match=r"^a \w+ was to be pickled, .* take tulle\.save, or torch\.save of"):
                write(pickled)
    copied = copy.deepcopy(model)
    assert type(copied.encoder.layers[0]) is type(model.encoder.layers[0])
    assert worst_difference(copied.state_dict(), model.state_dict()) == 0.0


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
    assert gradient.norm(dim=1 - gradient.cut).shape == gradient.shape[gradient.cut : gradient.cut + 1]
    for plain in (copy.deepcopy(gradient), pickle.loads(pickle.dumps(gradient)), gradient + 0):
        assert type(plain) is torch.Tensor
        assert plain.tolist() == gradient.tolist()
