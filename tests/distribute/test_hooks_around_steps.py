"""What a user hooks around steps, and gives to them, meets parameters and gradients as in one process on any plan."""

from dataclasses import replace

import pytest
import torch
from axes_models import worst_difference
from torch import nn
from torch.optim import SGD, SparseAdam

import tulle
from models import WIDTH, WORDS, Words, batches, build
from ranks import on_ranks
from tulle.plan import Memory, plan_for_later

STEPS, SAMPLES = 3, 12


def planned(kind: str, mesh: tulle.Mesh) -> tulle.Plan:
    memory = Memory(shard_optimizer=kind == "shard_optimizer", full_shard=kind == "full_shard")
    plan = replace(plan_for_later(mesh.shape, {}), memory=memory)
    if kind == "rows":
        plan = plan.with_rows_split({f"{name}.weight": (WORDS, WIDTH) for name in ("words", "tags")}, "a test")
    return plan


def dense() -> nn.Module:
    return Words(is_sparse=False)


def clip(optimizer, *_):
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    nn.utils.clip_grad_norm_(parameters, 0.01)


@torch.no_grad()
def shrink(optimizer, *_):
    for parameter in (one for group in optimizer.param_groups for one in group["params"]):
        parameter.mul_(1 / (1 + 0.1 * parameter.norm()))


def train(model: nn.Module, optimizer, *, is_hooked_before: bool, mesh=None, plan=None):
    def hook():
        optimizer.register_step_pre_hook(clip)
        optimizer.register_step_pre_hook(shrink)
        optimizer.register_step_post_hook(shrink)

    if is_hooked_before:
        hook()
    if mesh is not None:
        tulle.distribute(model, optimizer, mesh, plan=plan)
    for step, ids in enumerate(batches(STEPS, SAMPLES)):
        if step == 1 and not is_hooked_before:
            hook()
        model(ids if mesh is None else ids.chunk(mesh.size)[mesh.rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return tulle.full_state_dict(model, everywhere=True)


@pytest.mark.parametrize("is_hooked_before", [True, False])
@pytest.mark.parametrize("kind", ["rows", "full_shard", "shard_optimizer"])
@on_ranks(3)
def test_hooks_of_steps_see_wholes_whenever_they_were_registered(kind, is_hooked_before):
    mesh, model, reference = tulle.init(data=-1), build(dense, 0), build(dense, 0)
    found, expected = (
        train(one, SGD(one.parameters(), lr=0.1, momentum=0.9), is_hooked_before=is_hooked_before, **options)
        for one, options in ((model, {"mesh": mesh, "plan": planned(kind, mesh)}), (reference, {}))
    )
    assert worst_difference(found, expected) < 1e-12


@on_ranks(3)
def test_a_sharded_optimizer_reads_what_waits_elsewhere_until_it_is_read():
    def trained(mesh=None):
        model = build(dense, 0)
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        if mesh is not None:
            plan = replace(planned("shard_optimizer", mesh), schedule="read", bucket_bytes=100)  # of which some wait
            tulle.distribute(model, optimizer, mesh, plan=plan)
        for ids in batches(STEPS, SAMPLES):
            model(ids if mesh is None else ids.chunk(mesh.size)[mesh.rank]).backward()
            optimizer.step()
            optimizer.zero_grad()
        return tulle.full_state_dict(model, everywhere=True)

    assert worst_difference(trained(tulle.init(data=-1)), trained()) < 1e-12


@pytest.mark.parametrize("how", ["rows", "columns"])
@on_ranks(3)
def test_sparse_adam_steps_split_tables_with_a_closure(how):
    def trained(mesh=None):
        model = build(Words, 0)
        optimizer = SparseAdam([model.words.weight, model.tags.weight], lr=0.1, eps=1e-3)
        if mesh is not None:
            tulle.distribute(model, optimizer, mesh, plan={"words": how, "tags": how})
        for batch in batches(STEPS, SAMPLES):
            share = batch if mesh is None else batch.chunk(mesh.size)[mesh.rank]

            def closure(ids=share):
                optimizer.zero_grad()
                loss = model(ids)
                loss.backward()
                return loss

            optimizer.step(closure)
        return tulle.full_state_dict(model, everywhere=True)

    assert worst_difference(trained(tulle.init(data=-1)), trained()) < 1e-12
