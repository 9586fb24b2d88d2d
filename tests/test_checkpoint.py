"""A checkpoint brings everything back, on any number of ranks."""

import contextlib
import logging
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.optim import SGD, Optimizer

import tulle
from checkpoints import Noisy, optimizers_of, schedulers_of, train, trained
from models import build, worst_difference
from ranks import on_ranks, run_on_ranks
from tulle.checkpoint import full_optimizer_state_dict
from tulle.errors import CheckpointError
from tulle.plan import Memory, Plan


@on_ranks(1, 2)
@pytest.mark.slow
def test_a_run_that_is_resumed_goes_on_as_if_it_had_never_stopped(tmp_path):
    mesh = tulle.init(data=-1)
    torch.manual_seed(mesh.rank)
    random.seed(mesh.rank)
    model, optimizers = tulle.distribute(model := build(Noisy, mesh.rank), optimizers_of(model), mesh)
    schedulers = schedulers_of(optimizers)
    train(model, optimizers, schedulers, range(3))
    extra = {"step": 3, "schedulers": [one.state_dict() for one in schedulers]}
    tulle.save(tmp_path / "checkpoint", model, optimizers, **extra)
    expected = train(model, optimizers, schedulers, range(3, 6))

    torch.manual_seed(99)
    random.seed(99)
    other, theirs = tulle.distribute(other := build(Noisy, 5), optimizers_of(other), mesh)
    resumed = schedulers_of(theirs)  # before the load: a new scheduler sets the learning rate
    loaded = tulle.load(tmp_path / "checkpoint", other, theirs)
    assert loaded["step"] == 3
    for one, state in zip(resumed, loaded["schedulers"], strict=True):
        one.load_state_dict(state)
    assert train(other, theirs, resumed, range(loaded["step"], 6)) == expected
    assert worst_difference(other, model)[0] == 0.0
    assert [one.param_groups[0]["lr"] for one in theirs] == [one.param_groups[0]["lr"] for one in optimizers]


@on_ranks(1, 3)
def test_each_rank_gets_its_own_random_state_back(tmp_path):
    mesh = tulle.init(data=-1)
    model, [optimizer] = tulle.distribute(model := build(Noisy, 0), [SGD(model.parameters(), 0.1)], mesh)
    torch.manual_seed(mesh.rank)
    random.seed(mesh.rank)
    random.gauss(0, 1)  # keeps a second number for the next call
    tulle.save(tmp_path / "checkpoint", model, optimizer)
    drawn = torch.rand(3).tolist(), random.random(), random.gauss(0, 1)
    torch.rand(7)
    tulle.load(tmp_path / "checkpoint", model, optimizer)
    assert (torch.rand(3).tolist(), random.random(), random.gauss(0, 1)) == drawn
    everybodys: list = [None] * mesh.size
    dist.all_gather_object(everybodys, drawn)
    assert len({str(one) for one in everybodys}) == mesh.size


def save_on_ranks(path: Path) -> dict[str, Tensor]:
    mesh = tulle.init(data=-1)
    model, optimizers = tulle.distribute(model := build(Noisy, 0), optimizers_of(model), mesh)
    train(model, optimizers, schedulers_of(optimizers), range(2))
    tulle.save(path, model, optimizers, step=2)
    return {name: value.clone() for name, value in model.state_dict().items()}


@contextlib.contextmanager
def told() -> Iterator[list[str]]:
    """What is logged within."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("tulle").addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger("tulle").removeHandler(handler)


def load_on_ranks(path: Path) -> tuple[dict[str, Tensor], list[str]]:
    mesh = tulle.init(data=-1)
    model, optimizers = tulle.distribute(model := build(Noisy, 1), optimizers_of(model), mesh)
    before = torch.get_rng_state()
    with told() as messages:
        assert tulle.load(path, model, optimizers) == {"step": 2}
    assert torch.equal(torch.get_rng_state(), before)
    train(model, optimizers, schedulers_of(optimizers), range(0))
    return {name: value.clone() for name, value in model.state_dict().items()}, messages


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(2, 3), (3, 1), (1, 2)])
def test_another_number_of_ranks_loads_all_but_the_random_states_and_says_so(saved_by, loaded_by, tmp_path):
    [ours, *_] = run_on_ranks(saved_by, save_on_ranks, path=tmp_path / "checkpoint")
    saved = "1 rank" if saved_by == 1 else f"{saved_by} ranks"
    told = f"the checkpoint was saved by {saved} and is loaded by {loaded_by}: random states are not restored"
    for rank, (theirs, messages) in enumerate(run_on_ranks(loaded_by, load_on_ranks, path=tmp_path / "checkpoint")):
        assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
        assert messages == [told] * (rank == 0)


def dropping(shape: dict[str, int], seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    mesh = tulle.init(**shape)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 8), nn.Dropout()).double()
    stages = {"0": 0, "1": 0, "2": 1, "3": 1} if "pipe" in shape else {}
    return tulle.distribute(model, SGD(model.parameters(), 0.1), mesh, plan=tulle.Plan(mesh.shape, stages=stages))


@tulle.step(micro_batches=2)
def drop(model: nn.Module, batch: Tensor) -> Tensor:
    loss = model(batch).sum()
    loss.backward()
    return loss


def drop_in_steps(path: Path, shape: dict[str, int], *, resumes: bool) -> list[float]:
    """Losses of two steps after those that were saved."""
    model, optimizer = dropping(shape, seed=1 if resumes else 0)
    batch = torch.ones(4, 4, dtype=torch.float64)
    if resumes:
        tulle.load(path, model, optimizer)
    else:
        drop(model, batch)
        tulle.save(path, model, optimizer)
    return [drop(model, batch).mean().item() for _ in range(2)]


@pytest.mark.parametrize("axis", ["pipe", "model"])
def test_dropout_goes_on_where_a_model_is_split(axis, tmp_path):
    expected = run_on_ranks(2, drop_in_steps, path=tmp_path / "a", shape={axis: 2}, resumes=False)
    assert run_on_ranks(2, drop_in_steps, path=tmp_path / "a", shape={axis: 2}, resumes=True) == expected
    assert expected[0][0] != expected[0][1]


def save_replicas(path: Path) -> None:
    model, optimizer = dropping({"data": 2}, seed=0)
    torch.manual_seed(dist.get_rank())
    tulle.save(path, model, optimizer)


def load_on_another_mesh(path: Path) -> None:
    model, optimizer = dropping({"model": 2}, seed=1)
    before = torch.get_rng_state()
    with told() as messages:
        tulle.load(path, model, optimizer)
    assert torch.equal(torch.get_rng_state(), before)
    text = "the checkpoint was saved on a mesh of data=2 and is loaded on one of model=2: random states are not"
    assert messages == [f"{text} restored"] * (dist.get_rank() == 0)


def test_ranks_that_draw_alike_do_not_get_random_states_of_replicas(tmp_path):
    run_on_ranks(2, save_replicas, path=tmp_path / "a")
    run_on_ranks(2, load_on_another_mesh, path=tmp_path / "a")


@on_ranks(2)
def test_a_distributed_model_and_a_plain_one_read_each_others_checkpoints(tmp_path):
    mesh = tulle.init(data=-1)
    plain = build(Noisy, 3)
    theirs = optimizers_of(plain)
    ours, optimizers = tulle.distribute(ours := build(Noisy, 0), optimizers_of(ours), mesh)
    if mesh.rank == 0:
        tulle.save(tmp_path / "plain", plain, theirs)
    dist.barrier()
    tulle.load(tmp_path / "plain", ours, optimizers)
    assert worst_difference(ours, plain)[0] == 0.0
    evaluated = build(Noisy, 4)
    before = torch.get_rng_state()
    tulle.load(tmp_path / "plain", evaluated)
    assert worst_difference(evaluated, plain)[0] == 0.0
    assert torch.equal(torch.get_rng_state(), before), "random states go with training"
    train(ours, optimizers, [], range(1))
    tulle.save(tmp_path / "distributed", ours, optimizers)
    tulle.load(tmp_path / "distributed", plain, theirs)
    assert worst_difference(ours, plain)[0] == 0.0
    if mesh.rank == 0:
        dcp_to_torch_save(tmp_path / "distributed", tmp_path / "one.pt")
        without_tulle = torch.load(tmp_path / "one.pt")["model"]
        assert {name: value.tolist() for name, value in without_tulle.items()} == {
            name: value.tolist() for name, value in plain.state_dict().items()
        }


def test_a_model_is_saved_alone_and_gives_no_optimizer_a_state(tmp_path):
    model, optimizers = trained()
    tulle.save(tmp_path / "a", model, step=3)
    other = build(Noisy, 4)
    assert tulle.load(tmp_path / "a", other) == {"step": 3}
    assert worst_difference(other, model)[0] == 0.0
    with pytest.raises(CheckpointError, match=r"has optimizers with groups of \[\] parameters"):
        tulle.load(tmp_path / "a", model, optimizers)


def test_what_a_module_reads_of_a_state_by_itself_comes_back_with_the_version_of_its_class(tmp_path):
    class Counting(nn.Linear):
        _version, found_version, words = 3, None, ()

        def get_extra_state(self) -> dict:
            return {"words": list(self.words)}

        def set_extra_state(self, state: dict) -> None:
            self.words = state["words"]

        def _load_from_state_dict(self, state, prefix, metadata, *rest):
            self.found_version = metadata["version"]
            super()._load_from_state_dict(state, prefix, metadata, *rest)

    saved, loaded = Counting(2, 1), Counting(2, 1)
    saved.words = ["a", "b"]
    tulle.save(tmp_path / "checkpoint", nn.ModuleList([saved]), SGD(saved.parameters(), 0.1))
    tulle.load(tmp_path / "checkpoint", nn.ModuleList([loaded]), SGD(loaded.parameters(), 0.1))
    assert (loaded.words, loaded.found_version) == (["a", "b"], 3)
    assert torch.equal(loaded.weight, saved.weight)


def test_a_model_whose_load_state_dict_takes_something_else_is_loaded_past_it(tmp_path):
    class OfFiles(nn.Linear):
        def load_state_dict(self, checkpoint, precision=torch.float32, strict=True):
            super().load_state_dict({**checkpoint["model"], **checkpoint["generator"]}, strict=strict)

    saved, loaded = OfFiles(2, 1), OfFiles(2, 1)
    tulle.save(tmp_path / "checkpoint", saved, SGD(saved.parameters(), 0.1))
    tulle.load(tmp_path / "checkpoint", loaded, SGD(loaded.parameters(), 0.1))
    assert torch.equal(loaded.weight, saved.weight)


def test_a_load_state_dict_of_the_models_own_with_the_arguments_of_torchs_is_called(tmp_path):
    class Told(nn.Linear):
        calls = 0

        def load_state_dict(self, state, strict=True, config=None):
            self.calls += 1
            return super().load_state_dict(state, strict=strict)

    saved, loaded = Told(2, 1), Told(2, 1)
    tulle.save(tmp_path / "checkpoint", saved, SGD(saved.parameters(), 0.1))
    tulle.load(tmp_path / "checkpoint", loaded, SGD(loaded.parameters(), 0.1))
    assert loaded.calls == 1
    assert torch.equal(loaded.weight, saved.weight)


def test_extra_comes_back_as_it_was(tmp_path):
    extra = {
        "step": 3,
        "losses": [1.5, float("inf")],
        "note": "größer",
        "nothing": None,
        "best": True,
        "pair": (1, 2),
        "nested": {"a": [{"b": 1}], 3: "c"},
    }
    model, optimizers = trained()
    tulle.save(tmp_path / "a", model, optimizers, **extra, tensor=torch.arange(3))
    loaded = tulle.load(tmp_path / "a", model, optimizers)
    assert torch.equal(loaded.pop("tensor"), torch.arange(3))
    assert loaded == extra


@on_ranks(2)
def test_a_rate_that_numpy_computed_is_saved_as_a_number(tmp_path):
    mesh = tulle.init(data=-1)
    model = torch.nn.Linear(2, 1)
    model, optimizer = tulle.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), mesh)
    optimizer.param_groups[0]["lr"] = 1e-3 * np.sqrt(4.0)
    tulle.save(tmp_path / "checkpoint", model, optimizer)
    tulle.load(tmp_path / "checkpoint", model, optimizer)
    assert type(optimizer.param_groups[0]["lr"]) is float
    assert optimizer.param_groups[0]["lr"] == pytest.approx(2e-3)


def test_numbers_of_numpy_are_saved_as_numbers(tmp_path):
    model, optimizers = trained()
    tulle.save(tmp_path / "a", model, optimizers, step=np.int64(3), losses=[np.mean([1.0, 2.0]), np.float32(0.5)])
    loaded = tulle.load(tmp_path / "a", model, optimizers)
    assert (loaded, type(loaded["step"])) == ({"step": 3, "losses": [1.5, 0.5]}, int)


@on_ranks(2)
def test_what_cannot_be_saved_is_told_on_all_ranks_which_stay_in_step(tmp_path):
    mesh = tulle.init(data=-1)
    model = torch.nn.Linear(2, 1)
    model, optimizer = tulle.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), mesh)
    optimizer.param_groups[0]["schedule"] = object()
    for _ in range(2):
        with pytest.raises(CheckpointError, match="given optimizer= a list, expected numbers"):
            tulle.save(tmp_path / "checkpoint", model, optimizer)
    assert tulle.sync.all_reduce(torch.ones(2), mesh["data"]).tolist() == [1.0, 1.0]
    assert list(tmp_path.iterdir()) == []


def test_what_has_a_graph_is_saved_asynchronously(tmp_path):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(torch.ones(1, 2)).sum()
    tulle.save(tmp_path / "checkpoint", model, optimizer, asynchronous=True, loss=loss).result()
    assert tulle.load(tmp_path / "checkpoint", model, optimizer)["loss"] == loss


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_tensors_without_a_deep_copy_are_saved_asynchronously(tmp_path):
    model, rows = nn.Linear(2, 1), torch.eye(3).to_sparse_csr()
    tulle.save(tmp_path / "checkpoint", model, asynchronous=True, rows=rows).result()
    assert torch.equal(tulle.load(tmp_path / "checkpoint", model)["rows"].to_dense(), torch.eye(3))


def test_states_come_back_in_the_memory_format_of_their_parameters(tmp_path):
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
        made.append((model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)))
    (model, optimizer), (other, again) = made

    def train(one: nn.Module, optimizer: Optimizer) -> None:
        one(torch.arange(100.0).view(2, 2, 5, 5)).pow(2).mean().backward()
        optimizer.step()  # a fused one takes each number of a state for that of its place
        optimizer.zero_grad()

    train(model, optimizer)
    tulle.save(tmp_path / "checkpoint", model, optimizer)
    tulle.load(tmp_path / "checkpoint", other, again)
    train(model, optimizer)
    train(other, again)
    assert torch.equal(other.weight, model.weight)


class ByRow(SGD):
    """Keeps a number for each row."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["rows"] = parameter.grad.pow(2).sum(1).detach().as_subclass(torch.Tensor)


@on_ranks(2)
def test_what_an_optimizer_keeps_for_rows_of_a_part_is_refused(tmp_path):
    mesh, model = tulle.init(model=2), nn.Sequential(nn.Linear(4, 6, bias=False))
    plan = Plan(mesh.shape, tensor_parallel="0")
    model, optimizer = tulle.distribute(model, ByRow(model.parameters(), lr=0.1), mesh, plan=plan)
    model(torch.ones(2, 4)).pow(2).sum().backward()
    optimizer.step()
    with pytest.raises(CheckpointError, match=r"keeps 'rows' of '0.weight', a parameter of which ranks have parts"):
        tulle.save(tmp_path / "checkpoint", model, optimizer)


@on_ranks(2)
@pytest.mark.parametrize("axis", ["data", "model", "pipe"])
def test_averages_of_parts_beside_the_model_are_refused_and_wholes_are_saved(axis, tmp_path):
    mesh, model = tulle.init(**{axis: 2}), nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    plan = Plan(mesh.shape, stages={"0": 0, "1": 1} if axis == "pipe" else {}, memory=Memory(full_shard=axis == "data"))
    model, optimizer = tulle.distribute(model, SGD(model.parameters(), lr=0.1), mesh, plan=plan)
    average = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with pytest.raises(CheckpointError, match=r"given a tensor \['average'\]\['0.weight'\] of the shape of a part"):
        tulle.save(tmp_path / "checkpoint", model, optimizer, average=average)
    whole = tulle.full_state_dict(model)
    tulle.save(tmp_path / "checkpoint", model, optimizer, average=whole, loss=torch.tensor(float(mesh.rank)))
    loaded = tulle.load(tmp_path / "checkpoint", model)
    assert loaded["average"].keys() == model.state_dict().keys()
    assert loaded["loss"] == 0


@pytest.mark.parametrize("kept", ["replicas", "shard_optimizer", "full_shard", "pipe"])
@on_ranks(2)
def test_what_an_optimizer_keeps_by_a_name_is_saved_with_the_rest(kept, tmp_path):
    mesh, model = (
        tulle.init(**{"pipe" if kept == "pipe" else "data": 2}),
        nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)),
    )
    memory = Memory(shard_optimizer=kept == "shard_optimizer", full_shard=kept == "full_shard")
    plan = Plan(mesh.shape, stages={"0": 0, "1": 1} if kept == "pipe" else {}, memory=memory)
    model, optimizer = tulle.distribute(model, SGD(model.parameters(), lr=0.1, momentum=0.9), mesh, plan=plan)
    model(torch.ones(2, 4)).pow(2).sum().backward()
    optimizer.step()
    optimizer.state["calls"], optimizer.state["scale"] = 3, {"mean": torch.ones(3), "of": [1, 2]}
    momenta = {number: state for number, state in optimizer.state_dict()["state"].items() if isinstance(number, int)}
    tulle.save(tmp_path / "checkpoint", model, optimizer)
    optimizer.state.clear()
    tulle.load(tmp_path / "checkpoint", model, optimizer)
    state = optimizer.state_dict()["state"]
    assert optimizer.state["calls"] == state["calls"] == 3
    assert state["scale"]["mean"].tolist() == [1, 1, 1]
    assert state["scale"]["of"] == [1, 2]
    assert all(torch.equal(state[number]["momentum_buffer"], one["momentum_buffer"]) for number, one in momenta.items())
    if kept != "pipe":
        assert full_optimizer_state_dict(model, optimizer).get("state", {"calls": 3})["calls"] == 3
