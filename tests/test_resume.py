"""A run that is killed at any instant, in the middle of a write too, goes on from its checkpoint as if nothing were.

The script under test is `train`: it saves after every step and, when it starts, goes on from what it finds.
"""

import io
import json
import os
import random
import signal
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam, SparseAdam
from torch.optim.lr_scheduler import LambdaLR

import mortal
import tulle
import tulle.whole_folder

STEPS = 30
ROWS, WIDTH = 2000, 32
MID_WRITE = ("half of the tensors is written", "half of the rest is written", "all is written", "it has its name")


class Noisy(nn.Module):
    """A model whose losses depend on the random state at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.hidden = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout())
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.hidden(self.words(ids).mean(1))).pow(2).mean()


def train(folder: Path, falls_at: int | None = None, instant: str = "") -> None:
    """Train `STEPS` steps, on from the checkpoint if there is one; write `result.json` at the end."""
    mesh = tulle.init(data=-1)
    torch.manual_seed(mesh.rank)
    random.seed(mesh.rank)
    model = Noisy()
    optimizers = [SparseAdam([model.words.weight]), Adam([*model.hidden.parameters(), *model.out.parameters()])]
    schedulers = [LambdaLR(one, lambda step: (1 + step) ** -0.5) for one in optimizers]
    model, optimizers = tulle.distribute(model, optimizers, mesh)
    path = folder / "checkpoint"
    losses: list[str] = []
    if path.exists():
        extra = tulle.load(path, model, optimizers)
        losses = extra["losses"]
        for scheduler, state in zip(schedulers, extra["schedulers"], strict=True):
            scheduler.load_state_dict(state)
    while len(losses) < STEPS:
        loss = model(torch.randint(ROWS, (8, 4)))
        loss.backward()
        for one in [*optimizers, *schedulers]:
            one.step()
        for one in optimizers:
            one.zero_grad()
        losses.append((loss.item() + random.random()).hex())
        if len(losses) == falls_at and mesh.rank == 0:
            fall(instant)
        tulle.save(path, model, optimizers, losses=losses, schedulers=[one.state_dict() for one in schedulers])
    if mesh.rank == 0:
        weights = {name: value.double().flatten().tolist() for name, value in model.state_dict().items()}
        (folder / "result.json").write_text(json.dumps([losses, weights]))


def fall(instant: str) -> None:
    """Be killed at this instant of the next write."""

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def write_half(state: object, file: io.IOBase, **options: bool) -> None:
        buffer = io.BytesIO()
        complete(state, buffer, **options)
        is_meant = isinstance(file, io.BufferedWriter) == (instant == "half of the rest is written")
        if not is_meant or isinstance(file, io.BytesIO):  # a look at what can be saved
            file.write(buffer.getvalue())
            return
        file.write(buffer.getvalue()[: len(buffer.getvalue()) // 2])
        file.flush()
        die()

    complete = torch.save
    swap = tulle.whole_folder._swap
    if instant.startswith("half"):
        torch.save = write_half
    elif instant == "all is written":
        tulle.whole_folder._swap = die
    else:
        tulle.whole_folder._swap = lambda aside, path: die(swap(aside, path))


def result(folder: Path) -> list:
    """What a run wrote at its end: its losses and its weights, to the last bit."""
    return json.loads((folder / "result.json").read_text())


def run(folder: Path, *, ranks: int = 1, **fall_of_rank_0) -> list[int | None]:
    """Run the script to its end, or to that of rank 0; return the exit codes."""
    with mortal.start(train, folder, ranks=ranks, **fall_of_rank_0) as processes:
        return mortal.join(processes)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list:
    """The result of a run that nobody killed."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    assert run(folder) == [0], (folder / "stderr-0").read_text()
    return result(folder)


def test_a_run_that_is_killed_in_the_middle_of_writes_goes_on_as_if_nothing_were(uninterrupted, tmp_path):
    for fall_number, instant in enumerate(MID_WRITE):
        assert run(tmp_path, falls_at=5 * (fall_number + 1), instant=instant) == [-signal.SIGKILL]
        assert (tmp_path / ".checkpoint.partial").exists(), "it was killed at another instant"
        saved = 5 * (fall_number + 1) - (instant != "it has its name")
        assert len(torch.load(tmp_path / "checkpoint" / "run.pt")["extra"]["losses"]) == saved
    assert run(tmp_path) == [0], (tmp_path / "stderr-0").read_text()
    assert result(tmp_path) == uninterrupted


def test_a_run_that_is_killed_at_random_instants_goes_on_as_if_nothing_were(uninterrupted, tmp_path):
    chance = random.Random(0)
    codes = []
    for _ in range(8):
        with mortal.start(train, tmp_path) as [process]:
            wait_for_writes(tmp_path / "checkpoint" / "run.pt", chance.randint(1, 4), process)
            process.join(chance.uniform(0, 0.01))
            process.kill()
            codes += mortal.join([process])
    assert -signal.SIGKILL in codes, "each run ended before it was killed"
    assert run(tmp_path) == [0], (tmp_path / "stderr-0").read_text()
    assert result(tmp_path) == uninterrupted


def wait_for_writes(path: Path, writes: int, process: BaseProcess) -> None:
    """Return when the file has been replaced so many times, or the process has ended."""
    seen = {written_at_ns(path)}
    while len(seen) <= writes and process.is_alive():
        seen.add(written_at_ns(path))
        process.join(0.001)


def written_at_ns(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


def test_without_the_random_state_the_comparison_fails(uninterrupted, tmp_path):
    assert run(tmp_path, falls_at=20, instant="it has its name") == [-signal.SIGKILL]
    run_file = tmp_path / "checkpoint" / "run.pt"
    state = torch.load(run_file)
    torch.save(state | {"random": [state["random"][0] | {"torch": torch.get_rng_state()}]}, run_file)
    assert run(tmp_path) == [0]
    losses, expected = result(tmp_path)[0], uninterrupted[0]
    assert losses[:20] == expected[:20]
    assert losses[20:] != expected[20:]


def test_when_one_of_two_ranks_is_killed_the_run_can_go_on(tmp_path):
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    assert run(tmp_path / "whole", ranks=2) == [0, 0]
    for fall_number, instant in enumerate(MID_WRITE):
        codes = run(tmp_path / "killed", ranks=2, falls_at=4 * (fall_number + 1), instant=instant)
        assert codes == [-signal.SIGKILL, 1], "the other raises CommunicationError, and ends"
        assert "CommunicationError: " in (tmp_path / "killed" / "stderr-1").read_text()
    assert run(tmp_path / "killed", ranks=2) == [0, 0]
    assert result(tmp_path / "killed") == result(tmp_path / "whole")
