"""How much faster ranks compute while others of their machine wait, measured."""

import fcntl
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import tulle
from gigabit import give_network
from rank_process import patches
from ranks import on_ranks
from tulle.profiling import timing

ALONE_S = 0.02


class OneAtATime(nn.Module):
    """Sleeps while no other process does, as if there were one core for all; or whenever it likes."""

    def __init__(self, lock: Path | None) -> None:
        super().__init__()
        self.body = nn.Linear(2, 2)
        self.lock = None if lock is None else str(lock)

    def forward(self, x: Tensor) -> Tensor:
        if self.lock is None:
            time.sleep(ALONE_S)
        else:
            with open(self.lock, "a", encoding="ascii") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                time.sleep(ALONE_S)
        return self.body(x).sum()


def measured(lock: Path | None) -> tuple[float, ...]:
    patches.setattr(timing, "BUDGET_S", 0.02)
    patches.setattr("tulle.profiling.crowding._BUDGET_S", 0.5)
    mesh = tulle.init(data=-1)
    give_network(mesh["data"])
    model = OneAtATime(lock)
    found = tulle.profile(model, torch.optim.SGD(model.parameters(), 0.1), torch.ones(1, 2), mesh)
    assert found.model == "OneAtATime"
    return found.cluster.machine.crowding


@on_ranks(3)
def test_one_core_for_all(tmp_path):
    """Of three that queue the first is as fast as alone, the second waits once, the third twice."""
    assert measured(tmp_path / "lock") == pytest.approx((1 / 2, 3 / 4, 1.0), abs=0.08)


@on_ranks(2)
def test_a_core_each_is_nothing_that_is_shared():
    assert measured(None) == ()


@on_ranks(2)
def test_ranks_of_other_machines_share_nothing(tmp_path):
    booted = tmp_path / f"booted-{tulle.init(data=-1).rank}"
    booted.write_text(booted.name, encoding="ascii")
    patches.setattr("tulle.profiling.crowding._BOOTED", booted)
    assert measured(tmp_path / "lock") == ()
