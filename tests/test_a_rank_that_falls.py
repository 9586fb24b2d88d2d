"""When a rank falls in backward the others raise, and say which it was and why."""

import os
import re
import signal
from pathlib import Path

import pytest
from torch import Tensor

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
