"""What a plan does to save memory leaves the numbers as they are, along any axes."""

import pytest
import torch
from axes_models import batch_of, build, distributed, optimizers, train, worst_difference
from torch import nn

import tulle
from ranks import on_ranks
from tulle.errors import PlanError
from tulle.plan import Memory, Plan

LAYERS = ("encoder.layers.0", "encoder.layers.1")
SAVINGS = {
    "optimizer": Memory(shard_optimizer=True),
    "recompute": Memory(recompute=LAYERS),
    "offload": Memory(offload=LAYERS),
    "everything": Memory(shard_optimizer=True, recompute=LAYERS[:1], offload=LAYERS),
}


def compare(shape, memory):
    reference = build("stack")
    train(reference, optimizers(reference))
    plan = Plan(shape, memory=memory)
    model, several, place = distributed("stack", shape, plan=plan)
    train(model, several, *place)
    assert worst_difference(tulle.full_state_dict(model, everywhere=True), reference.state_dict()) < 1e-12
    return several


@on_ranks(4)
@pytest.mark.parametrize(
    "shape", [{"data": 2, "pipe": 2}, pytest.param({"data": 2, "model": 2}, marks=pytest.mark.slow)], ids=str
)
def test_all_savings_together_are_one_process(shape):
    [optimizer] = compare(shape, SAVINGS["everything"])
    mine = sum(value.numel() for state in optimizer.state.values() for value in state.values() if value.ndim)
    held = sum(p.numel() for group in optimizer.param_groups for p in group["params"] if not p.is_meta)
    assert mine <= 2 * (held // 2 + 1), "two moments of half of what this rank holds"


@on_ranks(4)
@pytest.mark.slow
@pytest.mark.parametrize("saving", ["optimizer", "recompute", "offload"])
@pytest.mark.parametrize("shape", [{"data": 2, "pipe": 2}, {"data": 2, "model": 2}, {"pipe": 2, "model": 2}], ids=str)
def test_each_saving_is_one_process(saving, shape):
    compare(shape, SAVINGS[saving])


@on_ranks(8, deadline_s=240.0)
@pytest.mark.slow
def test_all_savings_on_three_axes_are_one_process():
    compare({"data": 2, "pipe": 2, "model": 2}, SAVINGS["everything"])


@on_ranks(4)
@pytest.mark.parametrize("shared", [{"shard_optimizer": True}, {"full_shard": True}], ids=str)
@pytest.mark.parametrize(
    "shape", [pytest.param({"data": 2, "pipe": 2}, marks=pytest.mark.slow), {"data": 2, "model": 2}], ids=str
)
def test_narrow_parameters_with_masters_come_near(shape, shared):
    reference = build("stack").float()
    train(reference, optimizers(reference))
    mesh = tulle.init(**shape)
    model = build("stack").float()
    several = optimizers(model)
    plan = Plan(shape, memory=Memory(**shared, precision="bf16"))
    place = mesh["data"].rank, mesh["data"].size
    tulle.distribute(model, several, mesh, plan=plan, sample=(batch_of(0, *place),))
    train(model, several, *place)
    assert {p.dtype for p in model.parameters() if not p.is_meta} == {torch.bfloat16}
    found = tulle.full_state_dict(model, everywhere=True)
    assert 0 < worst_difference(found, reference.state_dict()) < 0.05


@on_ranks(2)
@pytest.mark.parametrize(
    ("memory", "kind", "text"),
    [(Memory(recompute=("encoder.layers.9",)), "stack", "the plan's memory names 'encoder.layers.9'")],
)
def test_what_cannot_be_done_is_refused(memory, kind, text):
    with pytest.raises(PlanError, match=text):
        distributed(kind, {"data": 2}, plan=Plan({"data": 2}, memory=memory))


class Mixed(nn.Module):
    """A table with sparse gradients, a layer that is not trained, a norm, and positions that are no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 8, sparse=True)
        self.register_buffer("positions", torch.linspace(-1, 1, 8))
        self.frozen, self.hidden, self.out = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8), nn.Linear(8, 10)
        self.norm = nn.LayerNorm(8)

    def forward(self, batch):
        x = self.hidden(self.frozen(self.words(batch["words"]).mean(1)) + self.positions)
        return nn.functional.cross_entropy(self.out(self.norm(x)), batch["targets"])


def mixed():
    torch.manual_seed(0)
    model = Mixed()
    dense = [p for p in model.parameters() if p.requires_grad and p is not model.words.weight]
    return model, [torch.optim.AdamW(dense, lr=0.01), torch.optim.SGD([model.words.weight], lr=0.1)]


@on_ranks(2)
@pytest.mark.parametrize("shared", [{}, {"full_shard": True}], ids=str)
def test_what_stays_wide_and_narrow_parameters_go_together(shared):
    mesh = tulle.init(data=-1)
    reference, theirs = mixed()
    wanted = train(reference, theirs)
    model, ours = mixed()
    tulle.distribute(model, ours, mesh, plan=Plan(mesh.shape, memory=Memory(**shared, precision="bf16")))
    found = train(model, ours)  # all ranks have the whole batch
    assert found == pytest.approx(wanted, rel=0.02)
    assert {name for name, p in model.named_parameters() if p.dtype != torch.bfloat16} == {"words.weight"}
