"""What all ranks have alike is written by all of them where they see one folder, and by rank 0 where they do not."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import tulle
from models import build
from ranks import on_ranks
from tulle.checkpoint import dealing
from tulle.checkpoint.folder import Folder
from tulle.checkpoint.placed import Replicated, Share
from tulle.plan import Plan

STAGES = Plan(mesh={"data": 2, "pipe": 2}, stages={"0": 0, "1": 0, "2": 1})


class Norm(nn.Sequential):
    """Three layers, the middle one with buffers, which differ between ranks once it was trained."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.Linear(40, 3))


def trained(mesh: tulle.Mesh, plan: Plan | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build(Norm, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer = tulle.distribute(model, optimizer, mesh, plan=plan or "auto")
    for step in range(3):
        shares = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step)).chunk(2)
        model(shares[mesh["data"].rank % 2]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def files_of(path) -> list[str]:
    dist.barrier()
    return sorted(file.name for file in path.glob("*.distcp"))


@on_ranks(2, 3)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_each_writes_a_share_and_buffers_are_those_of_rank_0(asynchronous, tmp_path, monkeypatch):
    monkeypatch.setattr(dealing, "LEAST_BYTES", 1)
    mesh = tulle.init(data=-1)
    model, optimizer = trained(mesh)
    saved = tulle.save(tmp_path / "checkpoint", model, optimizer, asynchronous=asynchronous)
    if saved is not None:
        saved.result()
    assert files_of(tmp_path / "checkpoint") == [f"__{rank}_0.distcp" for rank in range(mesh.size)]
    expected = [{name: value.clone() for name, value in model.state_dict().items()}]
    dist.broadcast_object_list(expected)  # rank 0's: of the others buffers differ
    if mesh.rank == 0:
        dcp_to_torch_save(tmp_path / "checkpoint", tmp_path / "plain.pt")
        plain = torch.load(tmp_path / "plain.pt", weights_only=True)["model"]
        assert plain.keys() == expected[0].keys()
        assert all(torch.equal(plain[name], value) for name, value in expected[0].items())
    state = optimizer.state_dict()["state"]
    again, other = trained(mesh)
    for parameter in again.parameters():
        parameter.data.zero_()
    tulle.load(tmp_path / "checkpoint", again, other)
    assert all(torch.equal(value, expected[0][name]) for name, value in again.state_dict().items())
    for number, theirs in other.state_dict()["state"].items():
        assert all(torch.equal(value, state[number][key]) for key, value in theirs.items())


@on_ranks(2)
@pytest.mark.parametrize("what", ["no folder", "another folder", "other tensors"])
def test_where_ranks_see_or_have_other_things_rank_0_writes_all(what, tmp_path, monkeypatch):
    monkeypatch.setattr(dealing, "LEAST_BYTES", 1)
    mesh = tulle.init(data=-1)
    model, optimizer = trained(mesh)
    if mesh.rank == 1 and what == "other tensors":
        optimizer.state[model[0].weight]["seen"] = torch.zeros(3)
    elif mesh.rank == 1:
        monkeypatch.setattr(Folder, "seen", lambda folder: None if what == "no folder" else (1, 2))
    tulle.save(tmp_path / "checkpoint", model, optimizer)
    assert files_of(tmp_path / "checkpoint") == ["__0_0.distcp"]


@on_ranks(2)
def test_a_small_model_is_one_file(tmp_path):
    model, optimizer = trained(tulle.init(data=-1))
    tulle.save(tmp_path / "checkpoint", model, optimizer)
    assert files_of(tmp_path / "checkpoint") == ["__0_0.distcp"]


@on_ranks(4)
def test_replicas_of_a_stage_share_what_it_has(tmp_path, monkeypatch):
    monkeypatch.setattr(dealing, "LEAST_BYTES", 1)
    mesh = tulle.init(data=2, pipe=2)
    model, optimizer = trained(mesh, STAGES)
    expected = tulle.full_state_dict(model, everywhere=True)
    tulle.save(tmp_path / "checkpoint", model, optimizer)
    assert files_of(tmp_path / "checkpoint") == [f"__{rank}_0.distcp" for rank in range(4)]
    plain = build(Norm, 1)
    tulle.load(tmp_path / "checkpoint", plain)
    assert all(torch.equal(value, expected[name]) for name, value in plain.state_dict().items())


def test_shares_are_of_about_one_size_and_no_block_is_left_out():
    tensors = [torch.empty(rows, 512) for rows in (30_000, 1, 9_000, 70_000)]
    written: list[list[tuple[str, int]]] = []
    for rank in range(5):
        placed = [
            Replicated((str(number),), tensor, Share(is_alike=True, copies=(rank, 5)))
            for number, tensor in enumerate(tensors)
        ]
        dealing.deal(placed)
        written.append([(one.name, number) for one in placed for number in one.writes])
    assert sorted(one for some in written for one in some) == sorted(
        (one.name, n) for one in placed for n in range(len(one.boxes))
    )
    assert max(map(len, written)) - min(map(len, written)) <= 3
