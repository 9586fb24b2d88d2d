"""`monitored_barrier`: ranks wait for one another, whatever axes of their process group they come by."""

import time
from dataclasses import replace

import pytest

import tulle
from ranks import on_ranks
from tulle.comm import follow_steps, monitored_barrier
from tulle.comm.traffic import traffic
from tulle.errors import CommunicationError


@on_ranks(2)
def test_ranks_wait_for_one_another_on_a_second_mesh_too():
    monitored_barrier(tulle.init(data=-1)["data"], "the first", "all must")
    axis = replace(tulle.init(data=-1)["data"], timeout_s=0.3)
    if axis.rank == 0:
        with pytest.raises(CommunicationError, match=r"rank 1 did not come in 0\.3 s"):
            monitored_barrier(axis, "the second", "all must")


@on_ranks(4)
def test_ranks_that_count_their_steps_with_others_wait_for_one_another():
    mesh = tulle.init(data=2, model=2)
    data, model = mesh["data"], mesh["model"]
    traffic.begun += 10 * (1 - model.rank)  # as a model before, of other ranks, has left it
    follow_steps(data)
    traffic.begin(traffic.step)
    if model.rank == 1:
        time.sleep(0.5)  # longer than the others wait before they look
    monitored_barrier(model, "a number of both", "both must")
    if model.rank == 0:
        time.sleep(0.5)
    monitored_barrier(model, "another", "both must")
