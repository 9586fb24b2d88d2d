"""`monitored_barrier`: ranks wait for one another, whatever axes of their process group they come by."""

from dataclasses import replace

import pytest

import tulle
from ranks import on_ranks
from tulle.comm import monitored_barrier
from tulle.errors import CommunicationError


@on_ranks(2)
def test_ranks_wait_for_one_another_on_a_second_mesh_too():
    monitored_barrier(tulle.init(data=-1)["data"], "the first", "all must")
    axis = replace(tulle.init(data=-1)["data"], timeout_s=0.3)
    if axis.rank == 0:
        with pytest.raises(CommunicationError, match=r"rank 1 did not come in 0\.3 s"):
            monitored_barrier(axis, "the second", "all must")
