"""A table four times larger than the memory of a rank is trained, saved, exported, and resumed on other ranks."""

import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import mortal
import tulle
from tulle.checkpoint import save_safetensors, storage

ROWS, WIDTH = 2 * 1024 * 1024, 256
LIMIT_BYTES = ROWS * WIDTH * 4 // 4
"""What a rank may have beyond what it has once all is imported; each of its threads counts with a stack of 8 MiB."""
STEPS = 3


def limit_memory() -> None:
    assert storage, "what is imported later would count"
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    has_bytes = int(status["VmData"].split()[0]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (has_bytes + LIMIT_BYTES, resource.RLIM_INFINITY))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, WIDTH, sparse=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.words(ids).pow(2).sum()


def batch(step: int) -> Tensor:
    return torch.randint(ROWS, (500,), generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, optimizer: SGD, steps: range) -> None:
    for step in steps:
        model(batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def split() -> tuple[nn.Module, SGD]:
    torch.manual_seed(0)
    with tulle.deferred_init():
        model = Words()
    optimizer = SGD(model.parameters(), 0.1)
    return tulle.distribute(model, optimizer, tulle.init(data=-1), plan={"words.weight": "rows"})


def begin(folder: Path) -> None:
    tulle.init(data=-1)
    limit_memory()
    model, optimizer = split()
    train(model, optimizer, range(STEPS - 1))
    tulle.save(folder / "checkpoint", model, optimizer, step=STEPS - 1)


def go_on(folder: Path) -> None:
    model, optimizer = split()
    done = tulle.load(folder / "checkpoint", model, optimizer)["step"]
    train(model, optimizer, range(done, STEPS))
    save_safetensors(folder / "words.safetensors", model)


def export(folder: Path) -> None:
    """With as little memory as `begin`."""
    tulle.init(data=-1)
    limit_memory()
    model, optimizer = split()
    tulle.load(folder / "checkpoint", model, optimizer)
    save_safetensors(folder / "earlier.safetensors", model)


def build_whole(folder: Path) -> None:
    limit_memory()
    Words()


def run(body: mortal.Body, folder: Path, ranks: int) -> list[int | None]:
    with mortal.start(body, folder, ranks=ranks) as processes:
        return mortal.join(processes)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Six gigabytes, which pytest would keep."""
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.mark.slow
def test_a_table_of_four_times_the_memory_of_a_rank_is_trained_saved_exported_and_resumed(folder):
    for body, ranks in ((begin, 8), (export, 8), (go_on, 3)):
        codes = run(body, folder, ranks)
        assert codes == [0] * ranks, [(folder / f"stderr-{rank}").read_text()[-2000:] for rank in range(ranks)]
    torch.manual_seed(0)
    expected = Words()
    optimizer = SGD(expected.parameters(), 0.1)
    for done, name in ((range(STEPS - 1), "earlier"), (range(STEPS - 1, STEPS), "words")):
        train(expected, optimizer, done)
        with pytest.importorskip("safetensors").safe_open(folder / f"{name}.safetensors", "pt") as file:
            torch.testing.assert_close(file.get_tensor("words.weight"), expected.words.weight.detach())


@pytest.mark.slow
def test_that_memory_does_not_hold_the_table(tmp_path):
    assert run(build_whole, tmp_path, 1) == [1]
    assert "can't allocate memory" in (tmp_path / "stderr-0").read_text()
