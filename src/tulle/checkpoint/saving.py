"""`save`: all that a run needs to go on, in a folder that is complete or absent; at once, or while training goes on."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal, overload

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from tulle.admission import as_optimizers
from tulle.checkpoint.checks import check_keywords, check_readable, check_states
from tulle.checkpoint.dealing import Sight, can_deal, deal
from tulle.checkpoint.folder import Folder
from tulle.checkpoint.placed import Placed, Staged
from tulle.checkpoint.random_states import random_state
from tulle.checkpoint.ranks import Ranks
from tulle.checkpoint.standing import Standing
from tulle.checkpoint.state import Names, State
from tulle.comm import traffic
from tulle.errors import CommunicationError, TulleError
from tulle.parts import local_of

logger = logging.getLogger("tulle")
_under_way: list[Future[None]] = []
"""The asynchronous save that this process has not waited for, if any."""
_background = ThreadPoolExecutor(1, thread_name_prefix="tulle checkpoint")

Optimizers = Optimizer | Sequence[Optimizer]
PathLike = str | os.PathLike[str]


@overload
def save(
    path: PathLike,
    model: nn.Module,
    optimizer: Optimizers | None = None,
    *,
    asynchronous: Literal[False] = False,
    **extra: object,
) -> None: ...


@overload
def save(
    path: PathLike,
    model: nn.Module,
    optimizer: Optimizers | None = None,
    *,
    asynchronous: Literal[True],
    **extra: object,
) -> Future[None]: ...


def save(
    path: PathLike,
    model: nn.Module,
    optimizer: Optimizers | None = None,
    *,
    asynchronous: bool = False,
    **extra: object,
) -> Future[None] | None:
    """Save model, optimizers, random states of all ranks, and `extra`. Every rank of the model's mesh must call it.

    Each rank writes its own parts, and a share of what all ranks have (rank 0 all of that, where others do not see its
    folder), into another folder beside it, which takes the name `path` at the very end. So at any instant `path` is a
    whole checkpoint, the old one or the new one. Its tensors are a checkpoint of `torch.distributed.checkpoint`, under
    the names and shapes that plain PyTorch has.

    Args:
        path: The folder, on a file system that all ranks share (of rank 0 alone, if no table is split). An older
            checkpoint of this name is replaced.
        model: Distributed or plain. Of a plain one every process that calls this saves its own: let only rank 0 do so.
            If several save to one folder, one writes after the other, and the last one's stays.
        optimizer: One, or the list that was distributed. None saves the model alone.
        asynchronous: Whether to return as soon as all is copied to main memory, and to write while training goes on.
            The next save waits for the end of this one, and so does the end of the process.
        **extra: Whatever else the run needs: numbers, texts, tensors, lists and dictionaries of them; rank 0's are
            saved. With `step=`, the record of `tulle run` counts on from that step after a `load`. A tensor that is
            this rank's part of one, as in a moving average of a model with split tables, is refused: give
            `tulle.full_state_dict` of the average.

    Returns:
        None; if asynchronous a future, whose `result()` waits for the end and raises what went wrong.

    Raises:
        CheckpointError: On every rank, if the folder cannot be written, is there and no checkpoint, or `extra` has
            something else, or parts, in it.

    Example:
        >>> import tempfile, torch, tulle
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> path = tempfile.mkdtemp() + "/checkpoint"
        >>> tulle.save(path, model, optimizer, step=100)
        >>> tulle.load(path, model, optimizer)
        {'step': 100}
        >>> tulle.save(path, model, optimizer, asynchronous=True, step=200).result()
    """
    await_saves()
    folder, standing = Folder(path), Standing(model)
    ranks = standing.ranks
    ranks.meet("tulle.save")
    with _alike(folder, ranks):
        optimizers = [] if optimizer is None else as_optimizers(optimizer)
        state = State.of(standing, optimizers)
    if standing.is_staged:
        state = state.together(ranks.gather(state.told()))
    extra = tree_map_only(np.generic, np.generic.item, extra)  # a mean, say, which the safe reader refuses
    check_keywords(extra, standing)
    check_states(optimizers, standing)
    with _alike(folder, ranks):
        if ranks.is_first:
            check_readable({**extra, "model": state.outline["model"], "optimizer": state.outline["optimizers"]})
            with _turn(folder, ranks):
                folder.prepare()
    told = ranks.gather((random_state(standing), Sight.of(folder, standing, state.tensors)))
    if can_deal([sight for _, sight in told]):
        deal(state.tensors)
    run = {**state.outline, "random": [random for random, _ in told], "extra": extra}
    if not asynchronous:
        _write(folder, state.tensors, state.names, run, ranks)
        return None
    staged = [Staged(placed) for placed in state.tensors]
    writing = partial(_write, folder, staged, state.names, _copied(run) if ranks.is_first else {})
    future = _background.submit(_behind, writing, ranks.apart(), ranks.device)
    future.add_done_callback(_log_failure)
    _under_way.append(future)
    return future


def _copied(run: Mapping[str, Any]) -> dict[str, Any]:
    """A copy that training leaves as it is. Not all tensors have a deep copy: what has a graph has none."""
    tensors = (leaf for leaf in tree_leaves(run) if isinstance(leaf, Tensor))
    return copy.deepcopy(dict(run), {id(tensor): local_of(tensor).clone() for tensor in tensors})


def await_saves() -> None:
    """Wait for the asynchronous save before, if any; what went wrong there was logged."""
    while _under_way:
        _under_way.pop().exception()


def _write(folder: Folder, tensors: Sequence[Placed], names: Names, run: Mapping[str, Any], ranks: Ranks) -> None:
    from tulle.checkpoint.storage import write_blocks, write_metadata  # takes most of a second, once

    with _turn(folder, ranks):
        with _alike(folder, ranks):
            if ranks.are_one:
                folder.prepare()  # again: others may have had their turn meanwhile
            mine = write_blocks(folder.aside, tensors, ranks.rank)
        written = ranks.gather(mine)
        with _alike(folder, ranks):
            if ranks.is_first:
                stamps = write_metadata(folder.aside, written, names)
                folder.write_run({**run, "files": stamps})
                folder.commit(stamps)


def _turn(folder: Folder, ranks: Ranks) -> AbstractContextManager[None]:
    """Keep others out where a plain model is saved, which other ranks may do at once."""
    return folder.turn() if ranks.are_one else nullcontext()


def _behind(writing: Callable[[Ranks], None], ranks: Ranks, device: torch.device) -> None:
    traffic.is_background.flag = True
    if device.type == "cuda":
        torch.cuda.set_device(device)  # a thread begins with the first
    writing(ranks)


def _log_failure(future: Future[None]) -> None:
    problem = future.exception()
    if problem is not None:
        logger.error("an asynchronous save failed: %s", problem)


@contextmanager
def _alike(folder: Folder, ranks: Ranks) -> Iterator[None]:
    """Raise on every rank what the body raises on any; what was written so far is removed."""
    try:
        with ranks.alike(folder.unwritten):
            yield
    except CommunicationError:
        raise  # others may write still
    except TulleError:
        if ranks.is_first:
            folder.discard()
        raise
