"""Real processes for tests in which ranks die: forked from one that has imported torch, so that each costs 0.1 s.

The ranks of a warm team (`ranks.py`) must stay alive; these may be killed at any instant. What holds for `torchrun`
holds here: the store outlives the ranks, an exception that nobody catches goes to `sys.excepthook`, and the
process's end closes its connections.
"""

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

PATIENCE_S = 60.0

Body = Callable[..., None]


@contextmanager
def start(body: Body, folder: Path, *, ranks: int = 1, **arguments: Any) -> Iterator[list[BaseProcess]]:
    """Start `body(folder, **arguments)` on so many ranks, alone if one; those that still run at the end are killed.

    What rank r says to stderr goes to the file `folder/stderr-r`.
    """
    context = multiprocessing.get_context("forkserver")
    # An optimizer's first step imports torch._dynamo, which takes a second.
    context.set_forkserver_preload(["pytest", "torch._dynamo", "tulle", "tulle.checkpoint.storage"])
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False) if ranks > 1 else None
    port = store.port if store else 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # for the process that they are forked from
        processes = [
            context.Process(target=_be, args=(body, folder, rank, ranks, port, arguments)) for rank in range(ranks)
        ]
        for process in processes:
            process.start()
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()
            process.close()


def join(processes: Sequence[BaseProcess]) -> list[int | None]:
    """Wait for the end of all and return their exit codes: None for one that does not end."""
    for process in processes:
        process.join(PATIENCE_S)
    return [process.exitcode for process in processes]


def _be(body: Body, folder: Path, rank: int, ranks: int, port: int, arguments: dict[str, Any]) -> None:
    with (folder / f"stderr-{rank}").open("w") as file:
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    if ranks > 1:
        be_launched(rank, ranks, port)
    try:
        body(folder, **arguments)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        os._exit(1)


def be_launched(rank: int, ranks: int, port: int) -> None:
    """Have this process know its rank, and the store that waits for it at a port."""
    launch = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "MASTER_ADDR": "localhost"}
    launch |= {"MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True, "GLOO_SOCKET_IFNAME": "lo"}
    os.environ.update({name: str(value) for name, value in launch.items()})
