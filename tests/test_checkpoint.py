"""A checkpoint is complete or absent, brings everything back, and says which model it is of when it is of another."""

import contextlib
import io
import logging
import os
import pickle
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.optim import SGD, Adam, SparseAdam
from torch.optim.lr_scheduler import LambdaLR

import models
import tulle
import tulle.checkpoint.folder
from models import batches, build, worst_difference
from ranks import on_ranks, run_on_ranks
from tulle.errors import CheckpointError


class Noisy(nn.Module):
    """A classifier whose dropout draws on the random state of its rank."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(models.WORDS, models.WIDTH, sparse=True)
        self.dropout = nn.Dropout()
        self.norm = nn.BatchNorm1d(models.WIDTH)
        self.out = nn.Linear(models.WIDTH, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.dropout(self.norm(self.words(ids).mean(1)))).pow(2).mean()


def optimizers_of(model: nn.Module) -> list:
    return models.sparse_adam_and_adam(model)


def schedulers_of(optimizers: list) -> list[LambdaLR]:
    return [LambdaLR(one, lambda step: 1 / (1 + step)) for one in optimizers]


def train(model: nn.Module, optimizers: list, schedulers: list[LambdaLR], steps: range) -> list[float]:
    """One batch a step, the same on every rank; what differs between ranks is the dropout."""
    losses = []
    for ids in batches(steps.stop, 8)[steps.start :]:
        loss = model(ids)
        loss.backward()
        for one in [*optimizers, *schedulers]:
            one.step()
        for one in optimizers:
            one.zero_grad()
        losses.append(loss.item() + random.random())
    return losses


def saved(state: object) -> Tensor:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)


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


def load_on_ranks(path: Path) -> tuple[dict[str, Tensor], list[str]]:
    mesh = tulle.init(data=-1)
    model, optimizers = tulle.distribute(model := build(Noisy, 1), optimizers_of(model), mesh)
    before = torch.get_rng_state()
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("tulle").addHandler(handler)
    try:
        assert tulle.load(path, model, optimizers) == {"step": 2}
    finally:
        logging.getLogger("tulle").removeHandler(handler)
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


# From here on one process will do: what a rank finds all ranks raise, as the last tests show.


def trained(kind=Noisy, seed: int = 0) -> tuple[nn.Module, list]:
    model = build(kind, seed)
    optimizers = optimizers_of(model)
    train(model, optimizers, [], range(2))
    return model, optimizers


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A good one; random states are those of the test again afterwards."""
    with torch.random.fork_rng():
        tulle.save(tmp_path / "checkpoint", *trained(), step=2, note="good")
        yield tmp_path / "checkpoint"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def state_of(model: nn.Module, optimizers: list) -> object:
    return [model.state_dict(), [one.state_dict() for one in optimizers]]


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


def test_the_folders_above_a_checkpoint_are_made(tmp_path):
    tulle.save(tmp_path / "new" / "folder" / "a", *trained())
    assert os.listdir(tmp_path / "new" / "folder") == ["a"]
    assert sorted(contents(tmp_path / "new" / "folder" / "a")) == [".metadata", "__0_0.distcp", "run.pt"]


def fails_halfway(error: BaseException):
    """A `torch.save` that writes half of its bytes."""
    complete = torch.save

    def save(state: object, file: io.BufferedIOBase, **options: bool) -> None:
        if isinstance(file, io.BytesIO):  # the look at `extra`, or what ranks tell each other
            complete(state, file, **options)
            return
        buffer = io.BytesIO()
        complete(state, buffer)
        file.write(buffer.getvalue()[: len(buffer.getvalue()) // 2])
        raise error

    return save


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("unexpected pos 64 vs 0")])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside(error, checkpoint, monkeypatch):
    before = contents(checkpoint)
    model, optimizers = trained(seed=1)
    monkeypatch.setattr(torch, "save", fails_halfway(error))
    text = f"cannot write the checkpoint {str(checkpoint)!r}: {error}; an older one of that name is as it was"
    with pytest.raises(CheckpointError, match=re.escape(text)):
        tulle.save(checkpoint, model, optimizers, step=3)
    monkeypatch.undo()
    assert contents(checkpoint) == before
    assert os.listdir(checkpoint.parent) == [checkpoint.name]
    tulle.save(checkpoint, model, optimizers, step=3)
    assert tulle.load(checkpoint, model, optimizers) == {"step": 3}


def test_a_write_that_is_interrupted_leaves_the_old_file(checkpoint, monkeypatch):
    before = contents(checkpoint)
    monkeypatch.setattr(torch, "save", fails_halfway(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        tulle.save(checkpoint, *trained(seed=1))
    monkeypatch.undo()
    assert contents(checkpoint) == before
    tulle.save(checkpoint, *trained(seed=1))  # what was left beside does not disturb the next
    assert os.listdir(checkpoint.parent) == [checkpoint.name]


def test_the_failing_write_of_these_tests_does_leave_half_a_file(checkpoint, monkeypatch):
    run = torch.load(checkpoint / "run.pt")
    monkeypatch.setattr(torch, "save", fails_halfway(OSError()))
    with (checkpoint / "run.pt").open("wb") as file, contextlib.suppress(OSError):
        torch.save(run, file)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="is damaged, or not a checkpoint"):
        tulle.load(checkpoint, *trained())


@pytest.mark.parametrize("there", ["a file", "a folder"])
def test_what_is_there_and_no_checkpoint_is_not_replaced(there, tmp_path):
    path = tmp_path / "a"
    if there == "a file":
        path.write_text("mine")
    else:
        path.mkdir()
        (path / "mine").touch()
    text = f"{str(path)!r} is there, and is no checkpoint: tulle.save replaces nothing else. Give another name"
    with pytest.raises(CheckpointError, match=re.escape(text)):
        tulle.save(path, *trained())
    assert os.listdir(tmp_path) == ["a"]
    assert path.read_text() == "mine" if path.is_file() else os.listdir(path) == ["mine"]


def test_an_empty_folder_is_taken(tmp_path):
    (tmp_path / "a").mkdir()
    tulle.save(tmp_path / "a", *trained(), step=1)
    assert tulle.load(tmp_path / "a", *trained()) == {"step": 1}


@pytest.mark.parametrize("instant", ["before the old one is put away", "before the new one has its place"])
def test_where_folders_cannot_change_places_at_once_a_checkpoint_is_there_at_any_instant(
    instant, checkpoint, monkeypatch
):
    """As on a file system that cannot swap: the old one is put away, the new one put in its place."""
    monkeypatch.setattr(tulle.checkpoint.folder, "_swap", lambda *_: False)
    model, optimizers = trained(seed=1)
    tulle.save(checkpoint, model, optimizers, step=3)
    assert tulle.load(checkpoint, model, optimizers) == {"step": 3}
    renames = []

    def rename(path: Path, to: Path) -> None:
        renames.append(to)
        if len(renames) == (1 if instant.startswith("before the old") else 2):
            raise KeyboardInterrupt
        os.rename(path, to)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(KeyboardInterrupt):
        tulle.save(checkpoint, model, optimizers, step=4)
    monkeypatch.undo()
    assert tulle.load(checkpoint, model, optimizers) == {"step": 3}
    tulle.save(checkpoint, model, optimizers, step=5)
    assert tulle.load(checkpoint, model, optimizers) == {"step": 5}
    assert os.listdir(checkpoint.parent) == [checkpoint.name]


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot write the checkpoint '.*file/a': "):
        tulle.save(tmp_path / "file" / "a", *trained())


def test_arguments_in_another_order_are_told(tmp_path):
    model, optimizers = trained()
    for call in (tulle.save, tulle.load):
        with pytest.raises(CheckpointError, match=r"a Noisy was given for .* expected its name, before the model"):
            call(model, optimizers, tmp_path)


def test_a_checkpoint_that_is_missing_is_named(tmp_path):
    for path in (tmp_path / "no", tmp_path):
        with pytest.raises(CheckpointError, match=re.escape(f"there is no checkpoint {str(path)!r}: give the folder")):
            tulle.load(path, *trained())


def test_a_checkpoint_without_one_of_its_files_is_refused(checkpoint):
    for name in (".metadata", "__0_0.distcp"):
        (checkpoint / name).rename(checkpoint / "elsewhere")
        with pytest.raises(CheckpointError, match=re.escape(f"{name} (absent) of {str(checkpoint)!r} is damaged")):
            tulle.load(checkpoint, *trained())
        (checkpoint / "elsewhere").rename(checkpoint / name)


def test_a_checkpoint_that_is_cut_off_anywhere_is_refused(checkpoint):
    model, optimizers = trained(seed=1)
    before = saved(state_of(model, optimizers))
    for name, whole in contents(checkpoint).items():
        for length in [*range(40), *range(40, len(whole), 509), len(whole) - 1]:
            (checkpoint / name).write_bytes(whole[:length])
            text = rf"{name} \({length:,} bytes\) of '.*' is damaged, or not a checkpoint's: take an"
            with pytest.raises(CheckpointError, match=text):
                tulle.load(checkpoint, model, optimizers)
        (checkpoint / name).write_bytes(whole)
    assert torch.equal(saved(state_of(model, optimizers)), before)


def test_a_flipped_bit_is_noticed_or_does_not_matter(checkpoint):
    """It does not matter in a date or in the space between two records."""
    files = contents(checkpoint)
    model, optimizers = trained(seed=1)
    other = saved(state_of(model, optimizers))
    assert tulle.load(checkpoint, model, optimizers) == {"step": 2, "note": "good"}
    good = saved(state_of(model, optimizers)), torch.get_rng_state(), random.getstate()
    assert not torch.equal(good[0], other)
    unnoticed, raised = [], {}
    chance = random.Random(0)
    for name, place in [(name, chance.randrange(len(files[name]))) for name in files for _ in range(60)]:
        model, optimizers = trained(seed=1)
        broken = bytearray(files[name])
        broken[place] ^= 1 << (place % 8)
        (checkpoint / name).write_bytes(broken)
        try:
            extra = tulle.load(checkpoint, model, optimizers)
        except CheckpointError:
            continue
        except Exception as error:
            raised[name, place] = repr(error)
            continue
        finally:
            (checkpoint / name).write_bytes(files[name])
        now = saved(state_of(model, optimizers)), torch.get_rng_state(), random.getstate()
        is_same = torch.equal(now[0], good[0]) and torch.equal(now[1], good[1]) and now[2] == good[2]
        if not is_same or extra != {"step": 2, "note": "good"}:
            unnoticed.append((name, place))
    assert not unnoticed, f"{len(unnoticed)} of 180 flipped bits changed what was loaded, and nobody noticed"
    assert not raised, f"{len(raised)} of 180 flipped bits raised something else than CheckpointError"


@pytest.mark.parametrize(
    ("run", "text"),
    [
        ([1, 2], "has format 'list', expected 2, as tulle.save writes it"),
        ({"model": {}}, "has format None, expected 2"),
        ({"format": 1}, "has format 1, expected 2"),
        ({"format": 2}, "a' has format 2"),
    ],
)
def test_a_folder_of_another_format_is_refused(run, text, tmp_path):
    (tmp_path / "a").mkdir()
    torch.save(run, tmp_path / "a" / "run.pt")
    with pytest.raises(CheckpointError, match=re.escape(text)):
        tulle.load(tmp_path / "a", *trained())


@pytest.mark.parametrize("content", [b"", b"step 3\n", b"\x80\x02]q\x00.", os.urandom(300)], ids=len)
def test_a_file_that_is_no_checkpoints_is_refused(content, checkpoint):
    (checkpoint / "run.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"run.pt .*is damaged, or not a checkpoint's"):
        tulle.load(checkpoint, *trained())


class Harm:
    """Unpickling it runs code."""

    def __reduce__(self) -> tuple:
        return os.putenv, ("HARM", "done")


def test_a_file_that_would_run_code_is_refused(checkpoint):
    torch.save({"format": 2, "model": nn.Linear(1, 1)}, checkpoint / "run.pt")
    with pytest.raises(CheckpointError, match="is damaged, or not a checkpoint"):
        tulle.load(checkpoint, *trained())


def test_metadata_that_would_run_code_is_refused(checkpoint):
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Harm()))
    run = torch.load(checkpoint / "run.pt")
    run["files"] |= tulle.checkpoint.folder.stamps_of(checkpoint, [".metadata"])
    torch.save(run, checkpoint / "run.pt")
    with pytest.raises(CheckpointError, match=r"asks for posix.putenv, which no checkpoint needs"):
        tulle.load(checkpoint, *trained())


def wider() -> Noisy:
    model = Noisy()
    model.out = nn.Linear(models.WIDTH, 2)
    return model


def deeper() -> Noisy:
    model = Noisy()
    model.more = nn.Linear(1, 1)
    return model


def without_norm() -> Noisy:
    model = Noisy()
    model.norm = nn.Identity()
    return model


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (wider, "it has 'out.weight' as float64 [1, 6], the model has float64 [2, 6]"),
        (deeper, "it has no 'more.weight'"),
        (without_norm, "it has 'norm.weight' besides"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(kind, text, checkpoint):
    model = build(kind, 1)
    optimizers = optimizers_of(model)
    before = saved(state_of(model, optimizers))
    with pytest.raises(CheckpointError, match=re.escape(f"{str(checkpoint)!r} is of another model: {text}")):
        tulle.load(checkpoint, model, optimizers)
    assert torch.equal(saved(state_of(model, optimizers)), before)


def test_a_checkpoint_of_another_dtype_is_refused(checkpoint):
    model = build(Noisy, 1).float()
    with pytest.raises(CheckpointError, match=r"has 'words.weight' as float64 \[40, 6\], the model has float32 \[40"):
        tulle.load(checkpoint, model, optimizers_of(model))


def fewer_groups(model: nn.Module) -> list:
    return optimizers_of(model)[1:]


def fewer_parameters(model: nn.Module) -> list:
    return [SparseAdam([model.words.weight]), Adam([model.out.weight])]


def other_kind(model: nn.Module) -> list:
    return [SparseAdam([model.words.weight]), SGD([*model.norm.parameters(), *model.out.parameters()], lr=0.1)]


def other_order(model: nn.Module) -> list:
    return list(reversed(optimizers_of(model)))


@pytest.mark.parametrize(
    ("optimizers_like", "text"),
    [
        (fewer_groups, "has optimizers with groups of [[1], [4]] parameters, these have [[4]]: make the optimizers as"),
        (fewer_parameters, "groups of [[1], [4]] parameters, these have [[1], [1]]"),
        (other_order, "groups of [[1], [4]] parameters, these have [[4], [1]]"),
        (other_kind, "SGD"),
    ],
)
def test_a_checkpoint_of_other_optimizers_is_refused_and_changes_nothing(optimizers_like, text, checkpoint):
    model = build(Noisy, 1)
    optimizers = optimizers_like(model)
    before = saved(state_of(model, optimizers))
    with pytest.raises(CheckpointError, match=re.escape(text)):
        tulle.load(checkpoint, model, optimizers)
    assert torch.equal(saved(state_of(model, optimizers)), before)


@pytest.mark.parametrize(
    "value", [lambda: None, nn.Linear(1, 1), object(), (n for n in range(3)), {"deep": [Path()]}], ids=type
)
def test_extra_that_could_not_be_loaded_is_refused_before_the_old_file_is_touched(value, checkpoint):
    before = contents(checkpoint)
    text = f"tulle.save was given schedule= a {type(value).__name__}, expected numbers, texts, tensors, lists and dict"
    with pytest.raises(CheckpointError, match=re.escape(text)):
        tulle.save(checkpoint, *trained(), step=3, schedule=value)
    assert contents(checkpoint) == before


def refusals(folder: Path, checkpoint: Path) -> list[str]:
    """What this rank is told in four cases, of which rank 0, or only the last rank, finds the cause."""
    mesh = tulle.init(data=-1)
    model, optimizers = tulle.distribute(model := build(Noisy, 0), optimizers_of(model), mesh)
    is_last = mesh.rank == mesh.size - 1
    texts = []

    def refused(call, *arguments, **extra) -> None:
        with pytest.raises(CheckpointError) as refusal:
            call(*arguments, model, optimizers, **extra)
        texts.append(str(refusal.value))
        dist.barrier()

    refused(tulle.load, folder / "no")
    refused(tulle.load, folder / "no" if is_last else checkpoint)
    refused(tulle.save, folder / "a", schedule=lambda: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "save", fails_halfway(OSError("No space left on device")))
        refused(tulle.save, folder / "a")
    return texts


@pytest.mark.parametrize("ranks", [1, 3])
def test_all_ranks_raise_alike(ranks, tmp_path, checkpoint):
    heard = run_on_ranks(ranks, refusals, folder=tmp_path, checkpoint=checkpoint)
    last = ranks - 1
    for rank, (missing, missing_there, extra, disk) in enumerate(heard):
        on_first, on_last = ("" if rank == 0 else "rank 0: "), ("" if rank == last else f"rank {last}: ")
        assert missing.removeprefix("rank 0: ").startswith("there is no checkpoint ")
        assert missing_there.startswith(on_last + "there is no checkpoint ")
        assert extra.startswith(on_first + "tulle.save was given schedule= a function")
        assert disk.startswith(on_first + "cannot write the checkpoint ")
    assert os.listdir(tmp_path) == [checkpoint.name]


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


@on_ranks(2)
def test_what_cannot_be_saved_is_told_on_all_ranks_which_stay_in_step(tmp_path):
    mesh = tulle.init(data=-1)
    model = torch.nn.Linear(2, 1)
    model, optimizer = tulle.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), mesh)
    optimizer.param_groups[0]["schedule"] = lambda step: step
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
