"""What is estimated for each rank of a pipeline is what its tensors take."""

import math
from collections import UserDict
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

import tulle
from ranks import on_ranks
from tulle import pipeline
from tulle.comm import gather_values
from tulle.errors import DataError, ModelError, PlanError
from tulle.estimate import StepEstimate, estimate
from tulle.memory import LiveBytes, Memory
from tulle.memory.estimate import Estimate, tensor_bytes
from tulle.plan import Plan

WIDTH = 32


class Layers(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(count)
        )
        self.head = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def measured(model: nn.Module, x: Tensor, micro_batches: int) -> int:
    """The most bytes that this rank's tensors take in a step in which no rank is late."""
    optimizer = torch.optim.AdamW(model.parameters())
    live = LiveBytes("cpu")

    @pipeline.step(micro_batches=micro_batches)
    def train(model: nn.Module, x: Tensor) -> Tensor:
        with live:
            loss = model(x).sum()
            loss.backward()
        return loss

    train(model, x)
    with live:
        optimizer.step()
    optimizer.zero_grad()
    held = [tensor for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta]
    entries = [entry for state in optimizer.state.values() for entry in state.values()]
    standing_bytes = tensor_bytes([*held, *entries])
    rises = []
    for _ in range(3):  # where a rank is late, what others have sent by then waits besides
        live.restart_peak()
        before = live.now_bytes
        train(model, x)
        rises.append(live.peak_bytes - before)
        optimizer.zero_grad()
    return standing_bytes + min(rises) + x.nbytes


@on_ranks(2)
@pytest.mark.parametrize("groups", [1, 2])
def test_the_peak_of_each_stage_is_estimated_within_15_percent(groups):
    mesh = tulle.init(pipe=-1)
    torch.manual_seed(0)
    model, micro_batches = Layers(8), 4
    stages = {f"layers.{n}": n * 2 * groups // 8 for n in range(8)} | {"head": 2 * groups - 1}
    x = torch.randn(8 * micro_batches, 16, WIDTH)
    plan = Plan(mesh.shape, stages=stages, micro_batches=micro_batches)
    found = estimate(model, x, mesh, plan)
    pipeline.place(model, mesh["pipe"], stages)
    peaks = gather_values(measured(model, x, micro_batches), mesh["pipe"], label="peaks")
    for rank, peak in zip(found.ranks, peaks, strict=True):
        assert math.isclose(rank.peak_bytes, peak, rel_tol=0.15), found.with_measured(peaks)
    assert found.ranks[0].activations_bytes > found.ranks[1].activations_bytes


def test_splitting_and_sharding_lower_what_a_rank_needs():
    model, x = Layers(2), torch.randn(8, 16, WIDTH)
    alone = estimate(model, x, {}).ranks[0]
    split = estimate(model, x, {"model": 2}, Plan({"model": 2}, tensor_parallel=("layers.0", "layers.1"))).ranks[0]
    sharded = estimate(model, x, {"data": 4}, Plan({"data": 4}, memory=Memory(shard_optimizer=True))).ranks[0]
    assert 0.5 < split.parameters_bytes / alone.parameters_bytes < 0.7, "the head is whole"
    assert split.activations_bytes < alone.activations_bytes
    assert math.isclose(sharded.optimizer_bytes, alone.optimizer_bytes / 4, rel_tol=0.01)
    assert "activations" in str(StepEstimate({}, (alone,)))


def test_tables_with_sparse_gradients_are_stepped_by_an_optimizer_of_their_own():
    model = nn.Sequential(nn.EmbeddingBag(1000, 64, sparse=True), nn.Linear(64, 64))
    ids = torch.randint(1000, (8, 4))
    found = estimate(model, ids, {"data": 2}).ranks[0]
    table, dense = 1000 * 64 * 4, (64 + 1) * 64 * 4
    assert math.isclose(found.optimizer_bytes, 2 * (table + dense), rel_tol=0.01)
    assert found.gradients_bytes < dense + ids.numel() * (64 * 4 + 8) + 1
    several = [torch.optim.SparseAdam(model[0].parameters()), torch.optim.SGD(model[1].parameters())]
    assert math.isclose(estimate(model, ids, {}, optimizer=several).ranks[0].optimizer_bytes, 2 * table, rel_tol=0.01)
    momentum = torch.optim.SGD(model.parameters(), momentum=0.9)  # that of a sparse gradient is sparse
    found = estimate(model, ids, {"pipe": 2}, Plan({"pipe": 2}, stages={"0": 0, "1": 1}), optimizer=momentum)
    assert found.ranks[0].optimizer_bytes > 0


def test_columns_are_ranks_along_pipe_and_measured_peaks_are_one_for_each():
    whole = Estimate(1, 1, 1, 1, 4, None)
    assert "rank 0       rank 1" in str(StepEstimate({"data": 1, "pipe": 2}, (whole, whole)))
    of_several = StepEstimate({"data": 2, "pipe": 2}, (whole, whole))
    assert "pipe 0       pipe 1" in str(of_several)
    with pytest.raises(DataError, match="given 4 numbers, expected 2: the peak of one rank for each along axis 'pipe'"):
        of_several.with_measured([1, 2, 3, 4])


@pytest.mark.parametrize(
    ("plan", "said"),
    [("auto", "the path of one"), ({"format": 1}, "not a plan that this version reads"), (Plan({"data": 4}), "mesh")],
)
def test_what_is_no_plan_for_the_mesh_is_refused(plan, said):
    with pytest.raises(PlanError, match=said):
        estimate(Layers(1), torch.randn(2, 4, WIDTH), {"data": 2}, plan)


def test_what_is_no_model_is_refused():
    with pytest.raises(ModelError, match="estimate was given a NoneType as model, expected a"):
        estimate(None, torch.ones(2), {"data": 2})


def test_a_mesh_with_stages_needs_a_plan_that_says_which():
    with pytest.raises(PlanError, match="pipe=2 and a plan without stages"):
        estimate(Layers(1), torch.randn(2, 4, WIDTH), {"pipe": 2})


def test_what_hosts_share_out_is_dealt_among_the_ranks_of_one():
    mesh = tulle.init(data=1)
    [axis] = mesh.axes
    four = replace(mesh, size=4, axes=(replace(axis, size=4, ranks=(0, 1, 2, 3), hosts=(0, 0, 2, 2)),))
    model, batch = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4))), torch.randn(8, 64)
    of_host, of_two = (
        tulle.estimate(model, batch, on, Plan({"data": size}, memory=Memory(full_shard=shared)))
        for on, size, shared in ((four, 4, "host"), ({"data": 2}, 2, True))
    )
    assert of_host.ranks == of_two.ranks
    with pytest.raises(PlanError, match="sizes of axes, which do not tell how many ranks a host has"):
        tulle.estimate(model, batch, {"data": 4}, Plan({"data": 4}, memory=Memory(full_shard="host")))


class Encoding(UserDict):
    """What a tokenizer gives."""


@dataclass
class Held:
    x: Tensor


class OfHeld(Layers):
    def forward(self, held: Held) -> Tensor:
        return super().forward(held.x)


@pytest.mark.parametrize(("kind", "sample"), [(Layers, lambda x: Encoding(x=x)), (OfHeld, Held)])
def test_what_a_tokenizer_gives_and_dataclasses_are_cut_into_micro_batches(kind, sample):
    x = torch.randn(32, 4, WIDTH)
    alone, cut = (
        estimate(kind(1), sample(x), {}, Plan({}, micro_batches=micro_batches)).ranks[0].activations_bytes
        for micro_batches in (1, 4)
    )
    assert cut < 0.3 * alone
    if kind is Layers:
        assert alone == estimate(kind(1), {"x": x}, {}).ranks[0].activations_bytes
