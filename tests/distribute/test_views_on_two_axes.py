"""After its backward a micro-batch reads what its own forward left, also where stages are replicated or split."""

import pytest
import torch
from axes_models import Stack, batch_of

import tulle
from gigabit import give_cluster
from ranks import on_ranks


class Noted(Stack):
    """Leaves its loss, and how often it ran."""

    def __init__(self):
        super().__init__()
        self.calls, self.loss = 0, None

    def forward(self, batch):
        self.calls += 1
        self.loss = super().forward(batch)
        return self.loss


def reads(model, batch):
    loss = model(batch)
    loss.backward()
    return (model.loss.detach() - loss.detach()).abs(), torch.tensor(float(model.calls))


def resets(model, batch):
    apart, calls = reads(model, batch)
    model.calls = 10
    return apart, calls


@on_ranks(4)
@pytest.mark.parametrize("shape", [{"data": 2, "pipe": 2}, {"pipe": 2, "model": 2}], ids=str)
@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("gpipe", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("function", "calls"), [(reads, list(range(1, 9))), (resets, [1, *[11] * 7])], ids=["reads", "resets"]
)
def test_each_micro_batch_reads_its_own(shape, schedule, function, calls):
    mesh = tulle.init(**shape)
    torch.manual_seed(0)
    model = Noted().double()
    with give_cluster(mesh):
        tulle.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), mesh, sample=(batch_of(0),))
    step = tulle.step(micro_batches=4, schedule=schedule)(function)
    found = []
    for n in range(2):
        apart, counted = step(model, batch_of(n))
        assert apart.stack().tolist() == [0.0] * 4
        found += counted.stack().tolist()
    assert found == calls
