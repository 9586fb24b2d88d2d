"""Ways to call a distributed model: by its parts, with checkpoints and hooks, as a copy, with attributes that raise."""

import copy
import gc

import pytest
import torch
from plain_training import dummy, train
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import models
import tulle
from models import Words, batches, build, worst_difference
from ranks import on_ranks
from tulle.engine import ends, engine_of
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
