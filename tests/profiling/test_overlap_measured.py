"""By what factors computation and exchanges that run beside each other take longer, measured."""

import time
from types import SimpleNamespace

import pytest

from tulle.cost import Network
from tulle.profiling import measure, overlap

BACKWARD_S, EXCHANGE_S = 0.02, 0.05


class Machine:
    """On which backward and an exchange each take longer while the other runs, by shares of the time they share."""

    def __init__(self, backward_share: float, exchange_share: float) -> None:
        self.shares = backward_share, exchange_share
        self.is_exchanging, self.has_computed = False, False
        self.backwards = 0
        self.has_gradients = False
        self.model = SimpleNamespace(samples=[None], clear=self.clear, forward=lambda _: self)

    def clear(self) -> None:
        self.has_gradients = False

    def backward(self) -> None:
        self.backwards += 1
        self.has_gradients = True
        time.sleep(BACKWARD_S * (1 + self.shares[0] * self.is_exchanging))
        self.has_computed = True

    def all_reduce(self, tensor, axis, label):
        del tensor, axis, label
        self.is_exchanging, self.has_computed = True, False
        begin_s = time.perf_counter()

        def wait() -> None:
            longer_s = self.shares[1] * BACKWARD_S * self.has_computed
            time.sleep(max(0.0, begin_s + EXCHANGE_S + longer_s - time.perf_counter()))
            self.is_exchanging = False

        return SimpleNamespace(wait=wait)


@pytest.mark.parametrize(("backward_share", "exchange_share"), [(0.0, 0.0), (0.5, 0.0), (0.25, 1.0)])
def test_what_either_takes_longer_is_told_by_what_they_share(backward_share, exchange_share, monkeypatch):
    machine = Machine(backward_share, exchange_share)
    monkeypatch.setattr(overlap, "all_reduce", machine.all_reduce)
    found = overlap.overlap(measure._alone(), Network(1e-4, 1e6), machine.model)
    assert found == pytest.approx((1 + backward_share, 1 + exchange_share), abs=0.2)
    assert not machine.has_gradients, "to rows of fp16, say, torch cannot add those of the next backward"


def test_a_backward_that_takes_too_long_is_no_measure(monkeypatch):
    machine = Machine(1.0, 1.0)
    monkeypatch.setattr(overlap, "_LONGEST_S", BACKWARD_S / 2)
    monkeypatch.setattr(overlap, "_BUDGET_S", 0.1)
    slowdown, link_slowdown = overlap.overlap(measure._alone(), Network(1e-4, 1e6), machine.model)
    assert machine.backwards == 2, "then matrix products are taken; a long one ran six times to say so"
    assert min(slowdown, link_slowdown) >= 1
