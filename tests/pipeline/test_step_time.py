"""How long a step takes is known from the profile of its modules."""

import statistics
import time

import pytest
import torch
from torch import Tensor, nn

import tulle
from ranks import on_ranks
from tulle import pipeline
from tulle.comm import gather_values
from tulle.estimate import step_seconds
from tulle.pipeline import placement_of


class Sleep(torch.autograd.Function):
    """Takes a while forward, and twice as long backward, whatever else the machine does."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(2 * ctx.seconds)
        return gradient, None


class Sleeper(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.weight = seconds, nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return Sleep.apply(x * self.weight, self.seconds)


def train(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).sum()
    loss.backward()
    return loss


@pytest.mark.slow
@on_ranks(2, 4)
@pytest.mark.parametrize("groups", [1, 2])
def test_the_time_of_a_step_is_predicted_within_20_percent(groups):
    mesh = tulle.init(pipe=-1)
    uneven = [0.02 if number % 5 else 0.03 for number in range(16)]
    model = nn.Sequential(*(Sleeper(seconds) for seconds in uneven))
    micro_batches = 8
    pipeline.place(model, mesh["pipe"], sample=torch.ones(1, 2), stages=mesh.size * groups)
    partition = placement_of(model).partition
    assert partition is not None
    predicted_s = step_seconds(partition, mesh.size, micro_batches)
    step, times = pipeline.step(micro_batches=micro_batches)(train), []
    for _ in range(4):
        begin_s = time.perf_counter()
        step(model, torch.ones(micro_batches, 2))
        times.append(time.perf_counter() - begin_s)
    measured_s = max(gather_values(statistics.median(times[1:]), mesh["pipe"], label="times"))
    assert predicted_s == pytest.approx(measured_s, rel=0.2)
