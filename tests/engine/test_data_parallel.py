"""Ways to call a distributed model: by its parts, with checkpoints and hooks, as a copy, with attributes that raise."""

import copy
import gc
import warnings
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from plain_training import dummy, train
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import models
import tulle
from models import Words, batches, build, worst_difference
from ranks import on_ranks
from tulle.engine import ends, engine_of, lookup_gradients
from tulle.errors import ModelError


class Checkpointed(nn.Module):
    """Layers whose activations are computed again in backward."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.words = nn.Embedding(models.WORDS, models.WIDTH, sparse=True)
        self.layers = nn.ModuleList(nn.Linear(models.WIDTH, models.WIDTH) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        """Mean loss of a batch `[samples, length]`."""
        hidden = self.words(ids).mean(1)
        for layer in self.layers:
            hidden = checkpoint(lambda x, layer=layer: layer(x).tanh(), hidden, use_reentrant=self.use_reentrant)
        return hidden.pow(2).mean()


@on_ranks(2)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_of_both_kinds_gives_the_numbers_of_one_process(use_reentrant):
    mesh = tulle.init(data=-1)
    reference = build(lambda: Checkpointed(use_reentrant=use_reentrant), 0)
    model, _ = tulle.distribute(copy.deepcopy(reference), dummy(reference), mesh)
    train(model, mesh)
    train(reference, None)
    assert worst_difference(model, reference)[0] < 1e-12


@on_ranks(2)
def test_a_model_called_by_its_parts_is_kept_in_step():
    mesh = tulle.init(data=-1)
    model = build(Words, 0)
    model, _ = tulle.distribute(model, dummy(model), mesh)
    reference = build(Words, 0)
    ids = batches(1, 12)[0]
    model.out(model.words(ids.chunk(2)[mesh.rank]).mean(1)).mean().backward()
    reference.out(reference.words(ids).mean(1)).mean().backward()
    assert torch.allclose(model.words.weight.grad.to_dense(), reference.words.weight.grad.to_dense(), atol=1e-15)
    assert torch.allclose(model.out.weight.grad, reference.out.weight.grad, atol=1e-15)


@on_ranks(2)
def test_gradients_travel_if_their_forward_lay_outside_of_no_sync_as_under_ddp():
    mesh = tulle.init(data=-1)
    model, ids = build(Words, 0), batches(1, 12)[0]
    model, _ = tulle.distribute(model, dummy(model), mesh)
    mine, means = ids.chunk(2)[mesh.rank], []
    for first, second in [(nullcontext, model.no_sync), (model.no_sync, model.no_sync)]:
        model.zero_grad()
        model(mine)  # whose backward never comes
        with first():
            loss = model(mine)
        with second():
            loss.backward()
        means.append(model.out.weight.grad.clone())
    for seen, whose in zip(means, (ids, mine), strict=True):
        reference = build(Words, 0)
        reference(whose).backward()
        assert torch.allclose(seen, reference.out.weight.grad, atol=1e-15)


@on_ranks(2)
def test_a_traced_model_is_distributed_by_a_module_around_it():
    mesh, ids = tulle.init(data=-1), batches(1, 12)[0]
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        traced = torch.jit.trace(build(Words, 0), ids[:6])
    with pytest.raises(ModelError, match=r"or give a module around it \(torch.nn.Sequential\(model\)\)"):
        tulle.distribute(traced, dummy(traced), mesh)
    model, _ = tulle.distribute(model := nn.Sequential(traced), dummy(model), mesh)
    reference = build(Words, 0)
    model(ids.chunk(2)[mesh.rank]).backward()
    reference(ids).backward()
    assert torch.allclose(traced.out.weight.grad, reference.out.weight.grad, atol=1e-15)


@on_ranks(1, 2)
def test_a_copy_of_a_distributed_model_is_a_plain_model():
    mesh = tulle.init(data=-1)
    model = build(Words, 0)
    names = list(model.state_dict())
    model, _ = tulle.distribute(model, dummy(model), mesh)
    assert isinstance(model, Words)
    assert list(model.state_dict()) == names
    copied = copy.deepcopy(model)
    assert type(copied) is Words
    assert engine_of(copied) is None
    copied(batches(1, 4)[0]).backward()  # on one rank's own: nobody has to join
    assert not hasattr(copied, "no_sync")


@on_ranks(2)
def test_hooks_that_come_after_ours_see_this_ranks_gradient_and_change_it_before_the_mean():
    mesh = tulle.init(data=-1)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model, _ = tulle.distribute(model, dummy(model), mesh)
    seen: list[float] = []

    def clip(parameter: Tensor) -> None:
        seen.append(parameter.grad.abs().max().item())
        parameter.grad.clamp_(max=0.5 + mesh.rank)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(clip)
    for _ in range(3):
        model.zero_grad()
        seen.clear()
        model(torch.ones(1, 2)).sum().mul(100 * (1 + mesh.rank)).backward()
        assert seen[0] == 100.0 * (1 + mesh.rank), "of the last bias"
        assert model[1].bias.grad.item() == 1.0, "the mean of what each rank's hook has left, 0.5 and 1.5"


@on_ranks(2)
def test_an_optimizer_that_steps_in_backward_is_told_that_gradients_are_no_means_yet():
    mesh = tulle.init(data=-1)
    model = nn.Linear(2, 1)
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}
    for parameter, optimizer in optimizers.items():
        parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    model, _ = tulle.distribute(model, [*optimizers.values()], mesh)
    with pytest.raises(ModelError, match="an optimizer was to step within a backward, when gradients are those of"):
        model(torch.ones(1, 2)).sum().backward()


@on_ranks(2)
def test_a_backward_that_fails_leaves_nothing_behind(monkeypatch):
    mesh = tulle.init(data=-1)
    model = nn.Linear(2, 1)
    tulle.distribute(model, dummy(model), mesh)
    before = {*ends._joined}  # what is left of a test in which the end of a backward failed
    under_way: list[int] = []

    def fail(parameter: Tensor) -> None:
        under_way.append(len({*ends._joined} - before))
        raise ValueError("a user's own")

    model.bias.register_post_accumulate_grad_hook(fail)
    with pytest.raises(ValueError, match="a user's own"):
        model(torch.ones(1, 2)).sum().backward()
    assert under_way == [1]
    assert {*ends._joined} <= before


@on_ranks(2)
@pytest.mark.parametrize("plan", ["auto", {"words.weight": "rows"}])
def test_models_that_follow_each_other_share_process_groups(plan):
    mesh = tulle.init(data=-1)
    numbers: list[int] = []
    gc.disable()  # among many objects that last it seldom comes to those that are dropped in circles
    try:
        for _ in range(3):
            model = build(Words, 0)
            tulle.distribute(model, dummy(model), mesh, plan=plan)
            train(model, mesh)
            numbers.append(engine_of(model).number)
    finally:
        gc.enable()
    assert numbers == [0, 0, 0]


class Wrapper(nn.Module):
    """Looks attributes up in a way of its own, with errors of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(2, 1)

    def __getattr__(self, name: str) -> nn.Module:
        return self._modules[name]  # a KeyError, where there is none

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


@on_ranks(2)
def test_a_model_whose_attributes_raise_errors_of_their_own(tmp_path):
    mesh = tulle.init(data=-1)
    model = Wrapper()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    tulle.distribute(model, optimizer, mesh)
    before = model.body.weight.detach().clone()
    model(torch.full((1, 2), float(mesh.rank))).sum().backward()
    optimizer.step()
    torch.testing.assert_close(before - model.body.weight, torch.full((1, 2), 0.5))
    tulle.save(tmp_path / "checkpoint", model, optimizer)
    tulle.load(tmp_path / "checkpoint", model, optimizer)


class GivesNone(torch.autograd.Function):
    """Passes a tensor on, and has no gradient for it."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor.clone()

    @staticmethod
    def backward(ctx, *gradients):
        return None


class Stopped(nn.Module):
    """Gradients of two tables and a layer are none in some steps; `bags` are pooled by our own code where split."""

    def __init__(self, *, sparse):
        super().__init__()
        self.words = nn.Embedding(20, 4, sparse=sparse)
        self.bags = nn.EmbeddingBag(20, 4, mode="sum", sparse=sparse)
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, ids, *, is_stopped):
        hidden = self.inner(self.words(ids)) + self.bags(ids.unsqueeze(1))
        return self.outer(GivesNone.apply(hidden) if is_stopped else hidden).pow(2).mean()


def train_stopped(model, optimizer, shares, stopped):
    """Steps over the shares that there are here; in every other one gradients of some shares are none."""
    for number in range(4):
        ids = torch.randint(20, (8,), generator=torch.Generator().manual_seed(number)).chunk(2)
        sum(model(ids[n], is_stopped=number % 2 == 1 and n in stopped) / len(shares) for n in shares).backward()
        if number % 2 == 1 and stopped == (0, 1):
            assert [name for name, p in model.named_parameters() if p.grad is not None] == [
                "outer.weight",
                "outer.bias",
            ]
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("stopped", [(0, 1), (0,)], ids=["on all", "on one"])
@pytest.mark.parametrize("plan", ["auto", "rows", "columns"])
def test_a_gradient_that_a_function_gives_as_none_is_none_and_steps_nothing(plan, stopped, sparse, monkeypatch):
    """It arrives at the parameter all the same: no hook has taken it away, and it is no zero, which Adam would step."""
    monkeypatch.setattr(lookup_gradients, "_MANY", 1)
    mesh = tulle.init(data=-1)

    def make():
        torch.manual_seed(0)
        model = Stopped(sparse=sparse).double()
        kind = partial(torch.optim.SGD, lr=0.1) if sparse else partial(torch.optim.Adam, lr=0.1, eps=1e-2)
        return model, kind(model.parameters())

    reference, expected = make()
    train_stopped(reference, expected, [0, 1], stopped)
    tables = plan if plan == "auto" else {"words": plan, "bags": plan}
    model, optimizer = tulle.distribute(*make(), mesh, plan=tables)
    train_stopped(model, optimizer, [mesh.rank], stopped)
    found = tulle.full_state_dict(model, everywhere=True)
    assert all((found[name] - wanted).abs().max() < 1e-12 for name, wanted in reference.state_dict().items())
