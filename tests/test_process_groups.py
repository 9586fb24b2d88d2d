"""Groups that their members alone make."""

from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tulle
from ranks import on_ranks
from tulle.plan import Plan
from tulle.process_groups import backend_of, new_group


@on_ranks(3)
def test_members_find_each_other_whatever_groups_some_of_them_have_made_before():
    mesh = tulle.init(data=-1, timeout=5.0)
    dist.new_group([0, 1])
    if mesh.rank:
        new_group([1, 2], 5.0, purpose="a test")
    model = nn.EmbeddingBag(100, 4, sparse=True)
    plan = tulle.plan(model, torch.optim.SGD(model.parameters(), lr=0.1), mesh)
    assert isinstance(plan, Plan)
    plan = plan.with_rows_split({"weight": (100, 4)}, "a test")
    model, optimizer = tulle.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), mesh, plan=plan)
    for _ in range(2):
        model(torch.tensor([[1, 2, mesh.rank]])).sum().backward()
        optimizer.step()
    several = [new_group([0, 1, 2], 5.0, purpose=purpose) for purpose in ("one", "one", "another")]
    for group in (*several, dist.new_group([0, 1, 2])):
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        assert total.item() == 3


@on_ranks(3)
def test_a_group_that_its_members_alone_make_is_not_split_off_that_of_all(monkeypatch):
    mesh, seen = tulle.init(data=-1), []
    world, made = dist.group.WORLD, dist.new_group
    monkeypatch.setattr(dist, "new_group", lambda *a, **k: (seen.append(world.bound_device_id), made(*a, **k))[1])
    world.bound_device_id = torch.device("cpu", 0)  # what init_process_group(device_id=...) sets
    try:
        if mesh.rank:
            group = new_group([1, 2], 20.0, purpose="a test")
            total = torch.ones(1)
            dist.all_reduce(total, group=group)
            assert total.item() == 2
            assert seen == [None]
        assert world.bound_device_id == torch.device("cpu", 0)
    finally:
        world.bound_device_id = None


@pytest.mark.parametrize("backend", [None, "gloo", "cpu:gloo"], ids=repr)
def test_a_group_is_of_its_backend_however_it_was_named(backend):
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    assert backend_of(dist.group.WORLD, "cpu") == "gloo"
    assert tulle.init(data=-1).device.type == "cpu"


def test_a_group_of_several_backends_has_one_for_each_type_of_device(monkeypatch):
    monkeypatch.setattr(dist, "get_backend", lambda _: dist.Backend.UNDEFINED)
    monkeypatch.setattr(dist, "get_backend_config", lambda _: "cpu:gloo,cuda:nccl")
    group = cast("dist.ProcessGroup", object())
    assert [backend_of(group, kind) for kind in ("cpu", "cuda")] == ["gloo", "nccl"]
