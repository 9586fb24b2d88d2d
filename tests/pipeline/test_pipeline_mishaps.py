"""Training goes on after an error, wherever it came: within a step, in its last backward, or outside of steps."""

import gc
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pipeline_networks import WIDTH, TiedEnds, make
from torch import Tensor, nn

import tulle
from ranks import on_ranks
from tulle import pipeline
from tulle.errors import CommunicationError
from tulle.pipeline.mailbox import mailbox_of
from tulle.pipeline.messages import Kind


class Fragile(nn.Linear):
    """Fails on what is too large, forward or backward."""

    def forward(self, x: Tensor) -> Tensor:
        if x.abs().max() > 100:
            raise ValueError("too large")
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(self.refuse)
        return y

    @staticmethod
    def refuse(gradient: Tensor) -> None:
        if gradient.abs().max() > 100:
            raise ValueError("too steep")


class Two(nn.Module):
    """A layer that fails and another one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Fragile(WIDTH, WIDTH), Fragile(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def placed(first: int) -> tuple[nn.Module, tulle.Mesh]:
    mesh = tulle.init(pipe=-1, timeout=5)
    return pipeline.place(make(Two), mesh["pipe"], {"first": first, "second": 1 - first}), mesh


def train(model: nn.Module, x: Tensor, steepness: float) -> Tensor:
    loss = (model(x) * steepness).pow(2).mean()
    loss.backward()
    return loss


def goes_on(model: nn.Module, mesh: tulle.Mesh, samples: int = 4) -> None:
    step = pipeline.step(micro_batches=2)(train)
    for _ in range(2):
        loss = step(model, torch.ones(samples, WIDTH, dtype=torch.float64), 1.0).mean()
        assert torch.isfinite(loss)
    x = torch.ones(2, WIDTH, dtype=torch.float64)
    model(x).sum().backward()


def bad(kind: str) -> tuple[Tensor, float]:
    x = torch.ones(4, WIDTH, dtype=torch.float64)
    if kind == "a late micro-batch":
        x[2:] *= 1000
    return x, 1e9 if kind == "a backward" else 1.0


@on_ranks(2)
@pytest.mark.parametrize("kind", ["a late micro-batch", "a backward"])
@pytest.mark.parametrize("first", [0, 1])
def test_training_goes_on_after_an_error_in_the_first_step(kind, first):
    model, mesh = placed(first)
    with pytest.raises((ValueError, tulle.TulleError), match=r"too large|too steep"):
        pipeline.step(micro_batches=2)(train)(model, *bad(kind))
    goes_on(model, mesh)


def evaluated(model: nn.Module, x: Tensor, kind: str) -> float:
    y = model(x * 1000 if kind == "forward" else x)
    loss = F.cross_entropy(y, torch.full((4,), 99 if kind == "loss" else 1))
    (loss * 1e9).backward()
    return loss.item()


@on_ranks(2)
@pytest.mark.parametrize("kind", ["forward", "loss", "backward"])
def test_training_goes_on_after_an_error_outside_of_steps(kind):
    model, mesh = placed(0)
    x = torch.ones(4, WIDTH, dtype=torch.float64)
    for _ in range(2):
        with pytest.raises((ValueError, IndexError, tulle.TulleError)):
            evaluated(model, x, kind)
        goes_on(model, mesh)


def fails_once(model: nn.Module, x: Tensor, is_bad: list[bool]) -> Tensor:
    loss = model(x).pow(2).mean()
    loss.backward()
    if is_bad[0]:
        raise ValueError("so be it")
    return loss


@on_ranks(2)
def test_gradients_of_tied_parameters_from_before_a_failed_step_stay():
    mesh = tulle.init(pipe=-1, timeout=5)
    model = pipeline.place(make(TiedEnds), mesh["pipe"], {"embed": 0, "middle": 0, "other": 1, "head": 1})
    x = torch.ones(2, WIDTH, dtype=torch.float64)
    pipeline.step(micro_batches=1)(fails_once)(model, x, [False])
    before = model.embed.weight.grad.clone()
    with pytest.raises((ValueError, tulle.TulleError)):
        pipeline.step(micro_batches=1)(fails_once)(model, x, [True])
    assert torch.equal(model.embed.weight.grad, before)


def back(before_backward) -> None:
    model, _ = placed(0)
    y = model(torch.ones(4, WIDTH, dtype=torch.float64)).sum()
    before_backward()
    y.backward()


@on_ranks(2)
def test_what_a_rank_sent_last_does_not_go_with_its_mesh():
    if dist.get_rank() == 0:
        back(dist.barrier)  # the gradient is read when the other one's mesh is gone
    else:
        back(int)
        gc.collect()
        dist.barrier()


@on_ranks(2)
def test_what_came_before_the_word_of_a_failure_is_read_and_nothing_is_waited_for_after_it():
    mailbox = mailbox_of(tulle.init(pipe=-1, timeout=5)["pipe"])
    keys = [(Kind.VALUE, 1, number) for number in range(2)]
    mailbox.open(1)
    if dist.get_rank() == 1:
        mailbox.send(keys[0], "a value", to=[0])
        mailbox.close(ValueError("too large"))
        return
    while mailbox.failure is None:  # the value, which came before it, is there
        assert not mailbox.has(keys[1])
        time.sleep(0.01)
    mailbox.await_any({1: keys}, lambda: "a value or another")
    assert mailbox.take(keys[0]) == "a value"
    with pytest.raises(CommunicationError, match="rank 1 failed with ValueError: too large"):
        mailbox.await_any({1: keys[1:]}, lambda: "another")
    mailbox.close(ValueError("and so does this rank"))
