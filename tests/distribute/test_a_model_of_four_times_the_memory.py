"""A model whose training takes four times what a rank may have is trained, saved, and resumed on another mesh."""

import ctypes
import resource
from pathlib import Path

import pytest
import torch
from torch import nn

import mortal
import tulle
from tulle.checkpoint import storage

WIDTH, LAYERS, STEPS = 2048, 64, 3
LIMIT_BYTES = LAYERS * WIDTH * WIDTH * 4
"""Parameters, gradients and Adam's two moments are four times as much. Stacks of threads count, 8 MiB each."""
_MMAP_THRESHOLD = -3
"""What `mallopt` of glibc calls by this name."""
MESH, OTHER = {"pipe": 4, "model": 2}, {"data": 2, "pipe": 2}


def limit_memory() -> None:
    assert storage, "what is imported later would count"
    # Large blocks go back to the system as soon as they are free: how many threads' heaps keep is chance, up to 300 MB.
    assert ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 20)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    has_bytes = int(status["VmData"].split()[0]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (has_bytes + LIMIT_BYTES, resource.RLIM_INFINITY))


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])

    def forward(self, batch):
        for layer in self.layers:
            batch = batch + layer(batch).tanh()
        return batch.pow(2).mean()


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)  # or rounding noise would be steps of its own


def batch(step):
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))


@tulle.step(micro_batches=2)
def train_step(model, batch):
    loss = model(batch)
    loss.backward()
    return loss


def train(model, optimizer, steps, rank=0, size=1):
    for step in steps:
        train_step(model, batch(step).chunk(size)[rank])
        optimizer.step()
        optimizer.zero_grad()


def distributed(shape, *, is_limited):
    mesh = tulle.init(**shape)
    if is_limited:
        limit_memory()
    torch.manual_seed(0)
    with tulle.deferred_init():
        model = Deep()
    optimizer = adam(model)
    stages = {f"layers.{layer}": layer * shape["pipe"] // LAYERS for layer in range(LAYERS)}
    return (*tulle.distribute(model, optimizer, mesh, plan=tulle.Plan(mesh.shape, stages=stages)), mesh)


def begin(folder: Path) -> None:
    model, optimizer, _ = distributed(MESH, is_limited=True)
    train(model, optimizer, range(STEPS - 1))
    tulle.save(folder / "checkpoint", model, optimizer, step=STEPS - 1)


def resume(folder: Path) -> None:
    model, optimizer, _ = distributed(MESH, is_limited=True)
    tulle.load(folder / "checkpoint", model, optimizer)


def go_on(folder: Path) -> None:
    model, optimizer, mesh = distributed(OTHER, is_limited=False)
    done = tulle.load(folder / "checkpoint", model, optimizer)["step"]
    train(model, optimizer, range(done, STEPS), mesh["data"].rank, mesh["data"].size)
    tulle.save_safetensors(folder / "model.safetensors", model)


def train_whole(folder: Path) -> None:
    limit_memory()
    model = Deep()
    train(model, torch.optim.AdamW(model.parameters()), range(1))


def run(body: mortal.Body, folder: Path, ranks: int) -> None:
    with mortal.start(body, folder, ranks=ranks) as processes:
        codes = mortal.join(processes)
    assert codes == [0] * ranks, [(folder / f"stderr-{rank}").read_text()[-2000:] for rank in range(ranks)]


@pytest.mark.slow
def test_a_model_of_four_times_the_memory_of_a_rank_is_trained_saved_and_resumed(tmp_path):
    run(begin, tmp_path, 8)
    run(resume, tmp_path, 8)
    run(go_on, tmp_path, 4)
    torch.manual_seed(0)
    expected = Deep()
    train(expected, adam(expected), range(STEPS))
    with pytest.importorskip("safetensors").safe_open(tmp_path / "model.safetensors", "pt") as file:
        for name, parameter in expected.named_parameters():
            torch.testing.assert_close(file.get_tensor(name), parameter.detach(), rtol=1e-4, atol=5e-6)


@pytest.mark.slow
def test_that_memory_does_not_hold_its_training(tmp_path):
    with mortal.start(train_whole, tmp_path, ranks=1) as processes:
        assert mortal.join(processes) == [1]
    assert "can't allocate memory" in (tmp_path / "stderr-0").read_text()
