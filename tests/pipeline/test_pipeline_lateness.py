"""What a step computes does not depend on how late ranks and messages are: the same bits again and again."""

import copy
import random
from time import sleep

import pytest
import torch
from pipeline_networks import ALL, Branches, TiedEnds, batches, make, spread, train

import tulle
from rank_process import patches
from ranks import on_ranks
from tulle import pipeline
from tulle.pipeline.mailbox import Mailbox
from tulle.pipeline.values import Values

LATE_S = 0.004
RUNS = 3
IN_ONE_ORDER = [kind for kind in ALL if kind not in (Branches, TiedEnds)]
"""Tied parameters add up their uses as they come; where branches depend on data, so do micro-batches."""


def be_late(drawn: random.Random) -> None:
    """Have this rank's messages leave late, and its programs come late to where they wait."""
    send, awaited = Mailbox.send, Values._await

    def late_send(self, *args, **kwargs):
        sleep(LATE_S * drawn.random() ** 3)
        return send(self, *args, **kwargs)

    def late_await(self, *args):
        sleep(LATE_S * drawn.random() ** 3)
        return awaited(self, *args)

    patches.setattr(Mailbox, "send", late_send)
    patches.setattr(Values, "_await", late_await)


@pytest.mark.parametrize(
    ("kind", "schedule"),
    [
        pytest.param(kind, schedule, marks=() if index % 2 == number else pytest.mark.slow)
        for index, kind in enumerate(IN_ONE_ORDER)
        for number, schedule in enumerate(["1f1b", "zb-h1"])
    ],
)
@on_ranks(3)
def test_gradients_are_the_same_however_late_anything_is(kind, schedule):
    mesh = tulle.init(pipe=-1)
    model = make(kind)
    before = copy.deepcopy(model)
    x = batches(1, 18)[0]
    found = []
    for _ in range(RUNS):
        again = copy.deepcopy(before)
        pipeline.place(again, mesh["pipe"], spread(again, mesh.size))
        step = pipeline.step(micro_batches=6, schedule=schedule)(train)
        step(again, x)
        found.append([p.grad.clone() for p in again.parameters() if p.grad is not None])
        if len(found) == 1:
            be_late(random.Random(mesh.rank))
    for others in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found[0], others, strict=True))
