"""When a rank falls in backward the others raise, and say which it was and why."""

import os
import re
import signal
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import Tensor, multiprocessing

import mortal
import tulle
from models import Words, batches, build
from raised_alike import last, sgd


class DiskError(Exception):
    pass


def die(gradient: Tensor) -> None:
    raise DiskError("the disk is gone")


def be_killed(gradient: Tensor) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stand_still(gradient: Tensor) -> None:
    signal.pause()


def fall_in_backward(folder: Path, how, after: int, timeout_s: float) -> None:
    """Train until the last rank falls in the backward of step `after + 1`."""
    mesh = tulle.init(data=-1, timeout=timeout_s)
    model = build(Words, 0)
    model, optimizer = tulle.distribute(model, sgd(model), mesh)
    for step in range(after + 1):
        if step == after and mesh.rank == last():
            model.hidden.weight.register_hook(how)
        model(batches(1, 4)[0]).backward()
        optimizer.step()
        optimizer.zero_grad()


RANK_1_IS_LATE = "rank 1 did not come to it: see the log there"


@pytest.mark.parametrize(
    ("how", "ranks", "after", "timeout_s", "cause", "exit_code"),
    [
        (die, 2, 0, 300, "rank 1 failed first with DiskError: the disk is gone", 1),
        (die, 3, 2, 300, "rank 2 failed first with DiskError: the disk is gone", 1),
        (be_killed, 2, 2, 300, RANK_1_IS_LATE, -signal.SIGKILL),
        (stand_still, 2, 2, 3, RANK_1_IS_LATE, -signal.SIGKILL),
    ],
    ids=["raises-at-once", "raises", "is-killed", "stands-still"],
)
def test_when_a_rank_falls_in_backward_the_others_raise_and_say_who(
    how, ranks, after, timeout_s, cause, exit_code, tmp_path
):
    arguments = {"how": how, "after": after, "timeout_s": timeout_s}
    with mortal.start(fall_in_backward, tmp_path, ranks=ranks, **arguments) as processes:
        assert mortal.join(processes[:-1]) == [1] * (ranks - 1)
        processes[-1].kill()  # for the one that stands still
        assert mortal.join(processes)[-1] == exit_code
    for rank in range(ranks - 1):
        message = (tmp_path / f"stderr-{rank}").read_text().strip().splitlines()[-1]
        assert re.match(
            rf"\[rank{rank}\]: tulle.errors.CommunicationError: .+ in step {after + 1} failed on rank {rank} "
            rf"of axis 'data[^']*' \({ranks} ranks, timeout {timeout_s} s\): {cause}. The backend said: ",
            message,
        )


def end_as_a_child(rank: int, folder: Path, port: int, how) -> None:
    """Train on two ranks until rank 1 falls, or leaves; what the other one hears goes to a file."""
    mortal.be_launched(rank, 2, port)
    mesh = tulle.init(data=-1, timeout=300)
    model = build(Words, 0)
    model, optimizer = tulle.distribute(model, sgd(model), mesh)
    try:
        for step in range(3):
            if (rank, step) == (1, 2):
                return how(model.hidden.weight)
            model(batches(1, 4)[0]).backward()
            optimizer.step()
    except tulle.errors.CommunicationError as error:
        (folder / "heard").write_text(str(error))


@pytest.mark.parametrize(
    ("how", "cause"),
    [(die, "rank 1 failed first with DiskError: the disk is gone"), (id, "rank 1 left after step 2: every rank must")],
    ids=["raises", "leaves"],
)
def test_processes_that_torch_has_spawned_say_how_they_end(how, cause, tmp_path):
    """torch keeps their exceptions for the parent, so that no hook sees them."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    arguments = tmp_path, store.port, how
    spawned = multiprocessing.start_processes(end_as_a_child, arguments, 2, join=False, start_method="forkserver")
    assert mortal.join(spawned.processes) == [0, how is die]
    assert cause in (tmp_path / "heard").read_text()
