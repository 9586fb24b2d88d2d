"""What is over goes at once: nothing of a step waits until Python looks for cycles, least of all the batch."""

import gc
from typing import get_args
from weakref import ref

import pytest
from beside_one_process import data, loss_of, placed_chain

import tulle
from ranks import on_ranks
from tulle import pipeline
from tulle.pipeline.schedule import Schedule


def steps(function, model):
    for _ in range(3):
        batch = data()
        seen = ref(batch)
        function(model, batch)
        del batch
        yield seen


@on_ranks(2)
@pytest.mark.parametrize("schedule", [*get_args(Schedule), None])
def test_a_step_leaves_nothing_to_collect(schedule):
    model = placed_chain(tulle.init(pipe=-1, timeout=8))
    function = pipeline.step(micro_batches=4, schedule=schedule)(loss_of) if schedule else loss_of
    assert list(steps(function, model))
    gc.collect()
    gc.disable()
    try:
        for seen in steps(function, model):
            assert seen() is None
        assert schedule is None or gc.collect() == 0
    finally:
        gc.enable()
