"""What the ranks of each host share out, with hosts as replicas, trains, clips, saves and loads as one process does."""

import os
from unittest.mock import Mock, patch

import pytest
import torch
from axes_models import MICRO_BATCHES, batch_of, build, distributed, optimizers, train, worst_difference

import tulle
from ranks import on_ranks, run_on_ranks
from tulle.errors import ModelError, PlanError
from tulle.memory import Memory, named_shards, unit
from tulle.plan import Plan, TablePlan

HOST = Memory(full_shard="host")
ROWS = (TablePlan("words.weight", 40, 8, "rows"),)


def on_hosts(kind, shape, *, memory=HOST, tables=(), ranks_a_host=2):
    """A model on hosts of so many ranks each, as a launcher would have said."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank % ranks_a_host, "MASTER_ADDR": "", "MASTER_PORT": 0}
    with patch.dict(os.environ, {name: str(value) for name, value in place.items()}):
        return distributed(kind, shape, plan=Plan(shape, memory=memory, tables=tables))


def clip(model):
    return tulle.clip_grad_norm_(model, 0.1).item()


def torchs_clip(model):
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()


@on_ranks(4)
@pytest.mark.parametrize("clip", [clip, torchs_clip])
@pytest.mark.parametrize("kind", ["dense words", "stack"])
def test_replicas_of_shares_are_one_process(kind, clip):
    reference = build(kind)
    train(reference, optimizers(reference), clip=clip)
    model, several, place = on_hosts(kind, {"data": 4})
    train(model, several, *place, clip=clip)
    assert worst_difference(tulle.full_state_dict(model, everywhere=True), reference.state_dict()) < 1e-12
    assert {shard.axis.size for shard in named_shards(model).values()} == {2}


@on_ranks(4)
@pytest.mark.parametrize(
    ("kind", "shape", "tables", "ranks_a_host"),
    [
        ("words", {"data": 4}, (), 2),
        ("words", {"data": 4}, ROWS, 2),
        ("words", {"data": 4}, ROWS, 4),
        ("words", {"data": 2, "pipe": 2}, (), 4),
        ("stack", {"data": 2, "model": 2}, (), 4),
    ],
    ids=str,
)
def test_with_tables_and_other_axes_too(kind, shape, tables, ranks_a_host):
    reference = build(kind)
    wanted = train(reference, optimizers(reference), clip=clip)
    model, several, place = on_hosts(kind, shape, tables=tables, ranks_a_host=ranks_a_host)
    found = train(model, several, *place, clip=clip)
    assert found[1::2] == pytest.approx(wanted[1::2], rel=1e-12)
    assert worst_difference(tulle.full_state_dict(model, everywhere=True), reference.state_dict()) < 1e-12


@on_ranks(4)
def test_only_sums_of_shares_travel_between_hosts():
    model, several, place = on_hosts("stack", {"data": 4})
    exchanges = ("all_gather_parts", "scatter_sums", "all_reduce")
    with patch.multiple(unit, **{name: Mock(wraps=getattr(unit, name)) for name in exchanges}):
        train(model, several, *place, steps=range(1))
        called = {name: [call.args for call in getattr(unit, name).call_args_list] for name in exchanges}
    rank = torch.distributed.get_rank()
    within, between = tuple(range(rank // 2 * 2, rank // 2 * 2 + 2)), (rank % 2, rank % 2 + 2)
    assert {axis.ranks for _, _, axis in called["all_gather_parts"] + called["scatter_sums"]} == {within}
    assert {axis.ranks for _, axis in called["all_reduce"]} == {between}
    parts = sum(model.get_parameter(name).to_local().numel() for name in named_shards(model))
    flags = len(named_shards(model))
    assert sum(summed.numel() for summed, _ in called["all_reduce"]) == MICRO_BATCHES * (parts + flags)


def penalized(model, several, rank, size):
    for step in range(3):
        (model(batch_of(step, rank, size)) + 0.1 * model.out.weight.norm()).backward()
        for one in several:
            one.step()
            one.zero_grad()


@on_ranks(4)
def test_numbers_of_a_weight_are_those_of_the_whole():
    reference = build("stack")
    penalized(reference, optimizers(reference), 0, 1)
    model, several, place = on_hosts("stack", {"data": 4})
    penalized(model, several, *place)
    assert worst_difference(tulle.full_state_dict(model, everywhere=True), reference.state_dict()) < 1e-12


@on_ranks(4)
def test_hosts_that_weigh_such_numbers_differently_are_told():
    model, _, place = on_hosts("stack", {"data": 4})
    with pytest.raises(ModelError, match="weigh"):
        (model(batch_of(0, *place)) + (1 + place[0] // 2) * model.out.weight.norm()).backward()


def save(path, shape, memory):
    model, several, place = on_hosts("words", shape, memory=memory)
    train(model, several, *place, steps=range(2))
    tulle.save(path, model, several)


def go_on(path, shape, memory):
    model, several, place = on_hosts("words", shape, memory=memory)
    tulle.load(path, model, several)
    train(model, several, *place, steps=range(2, 4))
    return tulle.full_state_dict(model)


@pytest.mark.parametrize(
    ("saved", "loaded"), [((4, HOST), (2, Memory())), ((2, Memory(full_shard=True)), (4, HOST))], ids=["from", "to"]
)
def test_a_checkpoint_has_each_share_once(saved, loaded, tmp_path):
    reference = build("words")
    train(reference, optimizers(reference), steps=range(4))
    for (ranks, memory), do in ((saved, save), (loaded, go_on)):
        found = run_on_ranks(ranks, do, path=tmp_path / "checkpoint", shape={"data": ranks}, memory=memory)
    assert worst_difference(found[0], reference.state_dict()) < 1e-12


@on_ranks(3)
@pytest.mark.parametrize(("ranks_a_host", "why"), [(1, "each of 3 hosts has one rank"), (2, "hosts have 1 to 2 ranks")])
def test_hosts_that_cannot_are_refused(ranks_a_host, why):
    with pytest.raises(PlanError, match=f"full_shard='host', but {why}"):
        on_hosts("stack", {"data": 3}, ranks_a_host=ranks_a_host)
