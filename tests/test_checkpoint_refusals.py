"""What is no checkpoint, is damaged, or is of another model, is refused by name, and changes nothing.

One process will do for most: what a rank finds all ranks raise, as the last test shows.
"""

import io
import os
import pickle
import random
import re
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Adam, SparseAdam

import models
import tulle
import tulle.checkpoint.folder
from checkpoints import Noisy, contents, fails_halfway, good_checkpoint, optimizers_of, saved, state_of, trained
from models import Words, batches, build
from ranks import run_on_ranks
from tulle.checkpoint.storage import _MetadataUnpickler
from tulle.errors import CheckpointError, ModelError


@pytest.fixture
def checkpoint(tmp_path: Path) -> Iterator[Path]:
    with good_checkpoint(tmp_path) as path:
        yield path


def test_paths_are_read_whichever_python_wrote_them():
    written = b"cpathlib._local\nPosixPath\n(S'a'\ntR."  # by 3.13, whose module no other Python has
    assert _MetadataUnpickler(io.BytesIO(written)).load() == Path("a")


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot write the checkpoint '.*file/a': "):
        tulle.save(tmp_path / "file" / "a", *trained())


def test_a_full_disk_is_called_so(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"cannot write the checkpoint '.*a': .*File too large; an older one"):
            tulle.save(tmp_path / "a", nn.Linear(100, 1000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["", ".", "/"])
def test_a_folder_without_a_name_is_refused(path):
    for call in (tulle.save, tulle.load):
        with pytest.raises(
            CheckpointError, match=f"'{path}' was given for the checkpoint's folder, expected one with a"
        ):
            call(path, *trained())


def save_two_models(path: Path) -> None:
    mesh = tulle.init(data=-1)
    pair = nn.ModuleList([build(Words, 0), build(Words, 1)])
    for model in pair:
        tulle.distribute(model, SGD(model.parameters(), lr=0.1), mesh, plan={"words": "rows"})
    both = SGD(pair.parameters(), lr=0.1, momentum=0.9)
    sum(model(batches(1, 4)[0]) for model in pair).backward()
    both.step()
    with pytest.raises(
        CheckpointError, match=r"SGD that steps another model's parameter, of shape .* ranks have parts"
    ):
        tulle.save(path, pair[0], both)
    momenta = [state["momentum_buffer"].to_dense() for state in both.state.values()]
    tulle.save(path, pair, both)
    both.state.clear()
    tulle.load(path, pair, both)
    loaded = [state["momentum_buffer"].to_dense() for state in both.state.values()]
    assert all(torch.equal(one, other) for one, other in zip(loaded, momenta, strict=True))


def test_an_optimizer_of_two_models_is_saved_with_both(tmp_path):
    run_on_ranks(2, save_two_models, path=tmp_path / "checkpoint")


def test_arguments_in_another_order_are_told(tmp_path):
    model, optimizers = trained()
    for call in (tulle.save, tulle.load):
        with pytest.raises(CheckpointError, match=r"a Noisy was given for .* expected its name, before the model"):
            call(model, optimizers, tmp_path)


def test_what_is_no_model_is_refused(checkpoint, tmp_path):
    optimizer = Adam(nn.Linear(2, 2).parameters())
    calls = (
        lambda: tulle.save(tmp_path / "other", optimizer, optimizer),
        lambda: tulle.load(checkpoint, optimizer),
        lambda: tulle.full_state_dict(optimizer),
        lambda: tulle.save_safetensors(tmp_path / "other.safetensors", optimizer),
    )
    for call in calls:
        with pytest.raises(ModelError, match=r"was given a Adam as model, expected a torch\.nn\.Module"):
            call()


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
    text = (
        "has 'words.weight' as float64 [40, 6], the model has float32 [40, 6]: give it the dtype that was saved before"
    )
    with pytest.raises(CheckpointError, match=re.escape(text)):
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


class Image(torch.Tensor):
    """A tensor as libraries of pictures have it."""


@pytest.mark.parametrize(
    "value",
    [
        lambda: None,
        nn.Linear(1, 1),
        object(),
        (n for n in range(3)),
        {"deep": [Path()]},
        torch.zeros(2).as_subclass(Image),
    ],
    ids=type,
)
def test_extra_that_could_not_be_loaded_is_refused_before_the_old_file_is_touched(value, checkpoint):
    before = contents(checkpoint)
    text = f"tulle.save was given schedule= a {type(value).__name__}, expected numbers, texts, tensors, lists and dict"
    with pytest.raises(CheckpointError, match=re.escape(text)):
        tulle.save(checkpoint, *trained(), step=3, schedule=value)
    assert contents(checkpoint) == before


def refusals(folder: Path, checkpoint: Path) -> list[str]:
    """What this rank is told in five cases, of which rank 0, or only the last rank, finds the cause."""
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
    with pytest.MonkeyPatch.context() as patch:
        if is_last:
            patch.setattr(tulle.checkpoint.folder, "_has_bytes", Mock(side_effect=PermissionError(13, "Not yours")))
        refused(tulle.load, checkpoint)
    refused(tulle.save, folder / "a", schedule=lambda: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "save", fails_halfway(OSError("No space left on device")))
        refused(tulle.save, folder / "a")
    return texts


@pytest.mark.parametrize("ranks", [1, 3])
def test_all_ranks_raise_alike(ranks, tmp_path, checkpoint):
    heard = run_on_ranks(ranks, refusals, folder=tmp_path, checkpoint=checkpoint)
    last = ranks - 1
    for rank, (missing, missing_there, unread, extra, disk) in enumerate(heard):
        on_first, on_last = ("" if rank == 0 else "rank 0: "), ("" if rank == last else f"rank {last}: ")
        assert missing.removeprefix("rank 0: ").startswith("there is no checkpoint ")
        assert missing_there.startswith(on_last + "there is no checkpoint ")
        assert unread == f"{on_last}cannot read the checkpoint {str(checkpoint)!r}: [Errno 13] Not yours"
        assert extra.startswith(on_first + "tulle.save was given schedule= a function")
        assert disk.startswith(on_first + "cannot write the checkpoint ")
    assert os.listdir(tmp_path) == [checkpoint.name]


def saves_late_on_rank_1(folder: str) -> list[str]:
    mesh = tulle.init(data=-1)
    model, optimizer = tulle.distribute(*trained(), mesh)
    barrier = sys.modules["tulle.comm.monitored_barrier"]
    with patch.object(barrier, "_LONG_S", 0.5), patch.object(barrier, "logger") as logger:
        if mesh.rank == 1:
            time.sleep(2.0)
        tulle.save(f"{folder}/checkpoint", model, optimizer)
    return [call.args[0] % call.args[1:] for call in logger.warning.call_args_list]


def test_a_rank_that_saves_alone_says_whom_it_waits_for(tmp_path):
    told = "tulle.save on rank 0 waits for rank 1: every rank must call it, not within `if rank == 0:`"
    assert run_on_ranks(2, saves_late_on_rank_1, folder=str(tmp_path)) == [[told], []]
