"""`load`: what `save` wrote, into a model on any number of ranks, its tables split in any way, or whole."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from tulle.admission import as_optimizers
from tulle.checkpoint.checks import check_model, check_optimizers
from tulle.checkpoint.folder import Folder
from tulle.checkpoint.random_states import restore_random
from tulle.checkpoint.saving import await_saves
from tulle.checkpoint.standing import Standing
from tulle.checkpoint.state import model_room, optimizer_room, with_versions
from tulle.record import current as current_recorder


def load(
    path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer | Sequence[Optimizer] | None = None
) -> dict[str, Any]:
    """Load what `save` wrote, into model and optimizers; return `extra`. Every rank of the model's mesh must call it.

    The states of the random number generators are restored, too, if the mesh has the sizes of the one that saved; if
    not, they stay as they are, and the log says so.

    Args:
        path: The folder, which every rank must be able to read.
        model: Of the names, shapes and dtypes that were saved, distributed or plain, its tables split or not. Its
            own `load_state_dict` takes the state, if it has one with the arguments of torch's.
        optimizer: One, or a list of as many as were saved. None loads the model alone, for an evaluation say; random
            states then stay as they are.

    Raises:
        CheckpointError: On every rank, and before anything was changed, if the folder is absent, damaged, or of another
            model or optimizer, naming what differs.

    Example:
        >>> import tempfile, torch, tulle
        >>> model, path = torch.nn.Linear(2, 1), tempfile.mkdtemp() + "/checkpoint"
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> tulle.save(path, model, optimizer, step=100, words=["a", "b"])
        >>> tulle.load(path, model, optimizer)["words"]
        ['a', 'b']
    """
    from tulle.checkpoint.storage import Reader  # takes most of a second, once

    await_saves()
    folder, standing, optimizers = Folder(path), Standing(model), [] if optimizer is None else as_optimizers(optimizer)
    ranks, own = standing.ranks, dict(standing.state())  # what gathers it from other ranks comes first
    with ranks.alike(folder.unread):
        run = folder.read_run()
        check_model(run["model"], own, standing, path)
        if optimizer is not None:
            check_optimizers(run, optimizers, path)
        folder.check(run["files"], rank=ranks.rank, size=ranks.size)
        reader = Reader(folder)
    of_model, tensors = model_room(standing, own, run["model"])
    of_optimizers = []
    for number, (one, outline) in enumerate(zip(optimizers, run["optimizers"], strict=False)):
        state, fresh = optimizer_room(standing, number, one, outline)
        of_optimizers.append(state)
        tensors += fresh
    with ranks.alike():
        reader.read_into(tensors)
    known = {name: value for name, value in of_model.items() if name not in standing.unknown}
    _taker(model)(with_versions(known, run["versions"]))
    for one, state in zip(optimizers, of_optimizers, strict=True):
        one.load_state_dict(state)
    if optimizer is not None:
        restore_random(run["random"], standing)
    recorder = current_recorder()
    if recorder is not None and isinstance(run["extra"].get("step"), int):
        recorder.resume(run["extra"]["step"])
    return run["extra"]


def _taker(model: nn.Module) -> Callable[[Mapping[str, Any]], object]:
    """A model's own `load_state_dict`; torch's if its own takes something else, as a checkpoint's file (OpenNMT-py)."""
    first, *others = inspect.signature(model.load_state_dict).parameters.values()
    positional = [other.name for other in others if other.kind is other.POSITIONAL_OR_KEYWORD]
    is_torchs = first.name == "state_dict" or positional[:1] in ([], ["strict"])
    return model.load_state_dict if is_torchs else partial(nn.Module.load_state_dict, model)
