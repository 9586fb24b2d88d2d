"""`save` and `load`: one file with all that a run needs to go on, complete or absent whenever it is interrupted."""

from __future__ import annotations

import io
import logging
import os
import random
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map, tree_map_only

from tulle.admission import as_optimizers
from tulle.comm import gather_values, raise_together
from tulle.engine import engine_of
from tulle.errors import CheckpointError, TulleError
from tulle.mesh import Axis
from tulle.record import current as current_recorder

logger = logging.getLogger("tulle")
FORMAT = 1
_KEYS = {"model", "optimizers", "kinds", "random", "extra"}


def save(
    path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], **extra: object
) -> None:
    """Save model, optimizers, random states of all ranks, and `extra`. Every rank of the model's mesh must call it.

    Rank 0 writes beside the target, then renames: at any instant the file is the old one or the new one, whole.

    Args:
        path: The file, on a file system of rank 0. An older file of this name is replaced.
        model: Distributed or plain. Saved under its plain names and shapes.
        optimizer: One, or the list that was distributed.
        **extra: Whatever else the run needs: numbers, texts, tensors, lists and dictionaries of them; rank 0's are
            saved. `step=`, if given, is where the record of `tulle run` goes on counting.

    Raises:
        CheckpointError: On every rank, if the file cannot be written, or `extra` has something else in it.

    Example:
        >>> import tempfile, torch, tulle
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> path = tempfile.mkdtemp() + "/checkpoint.pt"
        >>> tulle.save(path, model, optimizer, step=100)
        >>> tulle.load(path, model, optimizer)
        {'step': 100}
    """
    axis = _axis(model)
    random_states = gather_values(_random_state(), axis, label="random states") if axis else [_random_state()]
    error: TulleError | None = None
    if axis is None or axis.rank == 0:
        try:
            optimizers = as_optimizers(optimizer)
            state = {
                "format": FORMAT,
                "model": model.state_dict(),
                "optimizers": [_plain(one.state_dict()) for one in optimizers],
                "kinds": [type(one).__name__ for one in optimizers],
                "random": random_states,
                "extra": extra,
            }
            _check_readable({**extra, "model": state["model"], "optimizer": state["optimizers"]})
            _write(Path(path), state)
        except TulleError as found:
            error = found
        except Exception as problem:  # whatever it is, the other ranks wait for word of it
            error = CheckpointError(f"cannot save the checkpoint: {type(problem).__name__}: {problem}")
    _raise(error, axis)


def load(path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer | Sequence[Optimizer]) -> dict[str, Any]:
    """Load what `save` wrote, into model and optimizers; return `extra`. Every rank of the model's mesh must call it.

    Random states come back where the number of ranks is the one that saved; else they stay, and the log says so.

    Args:
        path: The file, which every rank must be able to read.
        model: Of the names, shapes and dtypes that were saved, distributed or plain.
        optimizer: As it was saved.

    Raises:
        CheckpointError: On every rank, and before anything was changed, if the file is absent, damaged, or of another
            model or optimizer, naming what differs.

    Example:
        >>> import tempfile, torch, tulle
        >>> model, path = torch.nn.Linear(2, 1), tempfile.mkdtemp() + "/checkpoint.pt"
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> tulle.save(path, model, optimizer, step=100, words=["a", "b"])
        >>> tulle.load(path, model, optimizer)["words"]
        ['a', 'b']
    """
    axis = _axis(model)
    optimizers = as_optimizers(optimizer)
    error: TulleError | None = None
    state: dict[str, Any] = {}
    try:
        state = _read(Path(path))
        _check_model(state["model"], model, path)
        _check_optimizers(state, optimizers, path)
    except TulleError as found:
        error = found
    _raise(error, axis)
    model.load_state_dict(state["model"])
    for one, saved in zip(optimizers, state["optimizers"], strict=True):
        one.load_state_dict(saved)
    _restore_random(state["random"], axis)
    extra = state["extra"]
    recorder = current_recorder()
    if recorder is not None and isinstance(extra.get("step"), int):
        recorder.resume(extra["step"])
    return extra


def _axis(model: nn.Module) -> Axis | None:
    engine = engine_of(model)
    return engine.axis if engine else None


def _raise(error: TulleError | None, axis: Axis | None) -> None:
    if axis is not None:
        raise_together(error, axis, label="checkpoint")
    elif error is not None:
        raise error


def _write(path: Path, state: Mapping[str, Any]) -> None:
    aside = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with aside.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
    except Exception as problem:  # torch's writer raises RuntimeError on a full disk, pickle what it likes
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        raise CheckpointError(
            f"cannot write the checkpoint {str(path)!r}: {problem}; an older one of that name is as it was"
        ) from problem


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(
            f"there is no checkpoint {str(path)!r}: give the file that tulle.save wrote, on a file system "
            "that every rank can read"
        )
    try:
        with zipfile.ZipFile(path) as archive:  # torch writes checksums and does not read them
            damaged = archive.testzip()
        if damaged is not None:
            raise zipfile.BadZipFile(f"the checksum of {damaged} is wrong")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as problem:  # a damaged file can make the reader raise anything
        said = [*str(problem).splitlines(), type(problem).__name__][0]
        raise CheckpointError(
            f"{str(path)!r} ({path.stat().st_size:,} bytes) is damaged, or not a checkpoint: take an older one. "
            f"The reader said: {said}"
        ) from problem
    if not isinstance(state, dict) or state.get("format") != FORMAT or _KEYS - set(state):
        found = state.get("format") if isinstance(state, dict) else type(state).__name__
        raise CheckpointError(f"{str(path)!r} has format {found!r}, expected {FORMAT}, as tulle.save writes it")
    return state


def _plain(state: Any) -> Any:
    """NumPy's numbers, as a schedule computes them, as Python's: the safe reader refuses the former."""
    return tree_map(lambda value: value.item() if isinstance(value, np.generic) else value, state)


def _check_readable(parts: Mapping[str, object]) -> None:
    """Raise if `load`, which runs no code from a file, could not read a part back. Tensors it always can."""
    for name, part in parts.items():
        buffer = io.BytesIO()
        try:
            torch.save(tree_map_only(Tensor, lambda _: None, part), buffer)
            buffer.seek(0)
            torch.load(buffer, weights_only=True)
        except Exception as problem:  # pickle raises whatever a value's own code does
            raise CheckpointError(
                f"tulle.save was given {name}= a {type(part).__name__}, expected numbers, texts, tensors, lists and "
                "dictionaries of them: give its state_dict(), say. "
                f"The reader said: {[*str(problem).splitlines(), type(problem).__name__][0]}"
            ) from problem


def _check_model(saved: Mapping[str, Any], model: nn.Module, path: object) -> None:
    ours = model.state_dict()
    for name, value in ours.items():
        if name not in saved:
            raise CheckpointError(f"the checkpoint {str(path)!r} is of another model: it has no {name!r}")
        theirs = saved[name]
        if isinstance(value, Tensor) and (value.shape, value.dtype) != (theirs.shape, theirs.dtype):
            raise CheckpointError(
                f"the checkpoint {str(path)!r} is of another model: it has {name!r} as {_say(theirs)}, "
                f"the model has {_say(value)}"
            )
    for name in saved:
        if name not in ours:
            raise CheckpointError(f"the checkpoint {str(path)!r} is of another model: it has {name!r} besides")


def _check_optimizers(state: Mapping[str, Any], optimizers: Sequence[Optimizer], path: object) -> None:
    def sizes(groups: Sequence[Mapping[str, Any]]) -> list[int]:
        return [len(group["params"]) for group in groups]

    theirs = [sizes(one["param_groups"]) for one in state["optimizers"]]
    ours = [sizes(one.param_groups) for one in optimizers]
    if theirs != ours:
        raise CheckpointError(
            f"the checkpoint {str(path)!r} has optimizers with groups of {theirs} parameters, these have {ours}: "
            "make the optimizers as they were when it was saved"
        )
    kinds = [type(one).__name__ for one in optimizers]
    if kinds != state["kinds"]:
        raise CheckpointError(
            f"the checkpoint {str(path)!r} has the optimizers {', '.join(state['kinds'])}, these are "
            f"{', '.join(kinds)}: make the optimizers as they were when it was saved"
        )


def _say(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _random_state() -> dict[str, Any]:
    """Python's, NumPy's, torch's and, where there is one, this rank's GPU's, as values that a safe reader knows."""
    version, words, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state(legacy=True)
    gpu = torch.cuda.get_rng_state() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    return {
        "python": [version, list(words), gauss],
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "torch": torch.get_rng_state(),
        "cuda": gpu,
    }


def _restore_random(states: Sequence[Mapping[str, Any]], axis: Axis | None) -> None:
    rank, size = (axis.rank, axis.size) if axis else (0, 1)
    if len(states) != size:
        logger.warning(
            "the checkpoint was saved by %d ranks and is loaded by %d: random states are not restored",
            len(states),
            size,
        )
        return
    state = states[rank]
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
