"""Times of pieces add up to the step, and each piece gets what it, and what comes before it, takes."""

import time

import pytest
import torch
from torch import Tensor, nn

import tulle.profiling.laps
from tulle.profiling.laps import Laps

PAUSE_S = 0.02


class _Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        time.sleep(PAUSE_S)
        return x * 1

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        time.sleep(2 * PAUSE_S)
        return gradient


class Slow(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _Slow.apply(x)


class Between(nn.Module):
    """Something slow between two pieces, and after the last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return _Slow.apply(self.second(_Slow.apply(self.first(x)))).sum()


def timed(model: nn.Module, names: list[str]) -> Laps:
    laps = Laps(model, names, torch.device("cpu"))
    with laps.watching():
        for _ in range(2):  # the second is warm
            laps.begin_forward()
            loss = model(torch.ones(2, 3)).sum()
            laps.end_forward(loss)
            loss.backward()
            laps.end_backward()
    return laps


def slow_ones(seconds: list[float], pause_s: float) -> list[bool]:
    return [one >= pause_s for one in seconds]


def test_a_piece_has_its_own_forward_and_backward():
    laps = timed(nn.Sequential(nn.Linear(3, 3), Slow(), nn.Linear(3, 3)), ["0", "1", "2"])
    assert slow_ones(laps.forward_s, PAUSE_S) == [False, True, False]
    assert slow_ones(laps.backward_s, 2 * PAUSE_S) == [False, True, False]


def test_without_hooks_in_the_graph_the_last_piece_would_have_all_of_backward(monkeypatch):
    monkeypatch.setattr(Laps, "_mark_backward", lambda *_: None)
    laps = timed(nn.Sequential(nn.Linear(3, 3), Slow(), nn.Linear(3, 3)), ["0", "1", "2"])
    assert slow_ones(laps.backward_s, 2 * PAUSE_S) == [False, False, True]


def test_what_is_between_pieces_counts_for_the_later_and_the_end_for_the_last():
    laps = timed(Between(), ["first", "second"])
    assert laps.forward_s[0] < PAUSE_S
    assert laps.forward_s[1] >= 2 * PAUSE_S
    assert laps.backward_s[0] < PAUSE_S
    assert laps.backward_s[1] >= 4 * PAUSE_S


def test_a_module_that_is_called_twice_has_both_calls():
    shared = Slow()
    model = nn.Sequential(nn.Linear(3, 3), shared, nn.Linear(3, 3), shared)
    laps = timed(model, ["0", "1", "2"])
    assert laps.forward_s[1] >= 2 * PAUSE_S
    assert laps.backward_s[1] >= 4 * PAUSE_S


def test_pieces_add_up_to_the_step(monkeypatch):
    ticks = iter(range(10_000))
    monkeypatch.setattr(tulle.profiling.laps, "now_on", lambda _: float(next(ticks)))
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    laps = Laps(model, ["0", "1", "2"], torch.device("cpu"))
    with laps.watching():
        laps.begin_forward()  # at 0; three pieces end, and the loss: 1 to 4
        loss = model(torch.ones(2, 3)).sum()
        laps.end_forward(loss)  # backward begins at 5; two pieces hand over, and it ends at 8
        loss.backward()
        laps.end_backward()
    assert sum(laps.forward_s) == pytest.approx(4)
    assert laps.forward_s == [1, 1, 2]
    assert laps.backward_s == [1, 1, 1]


def test_no_hook_stays_behind():
    model = nn.Sequential(nn.Linear(3, 3))
    timed(model, ["0"])
    assert not model[0]._forward_hooks
