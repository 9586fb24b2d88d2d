"""Ranks that agree on something agree on one thing, and raise alike where they came for two."""

import pytest

import tulle
from ranks import on_ranks
from tulle.comm import gather_values, raise_together
from tulle.errors import CommunicationError, PlanError


@on_ranks(2, 3)
def test_every_rank_hears_all():
    axis = tulle.init(data=-1)["data"]
    assert gather_values(axis.rank + 1, axis, label="numbers") == [rank + 1 for rank in range(axis.size)]


@on_ranks(2, 3)
def test_what_one_rank_found_all_raise():
    axis = tulle.init(data=-1)["data"]
    found = PlanError("no such table") if axis.rank == 1 else None
    with pytest.raises(PlanError, match=r"^no such table$" if found else r"^rank 1: no such table$"):
        raise_together(found, axis, label="the plan")
    raise_together(None, axis, label="the plan")


@on_ranks(2, 3)
def test_ranks_that_came_for_different_things_say_so_on_all_of_them():
    axis = tulle.init(data=-1)["data"]
    is_last = axis.rank == axis.size - 1
    match = rf"rank {axis.size - 1} of axis 'data' has come to agree on 'the model', rank 0 on 'the plan'"
    with pytest.raises(CommunicationError, match=match):
        raise_together(None, axis, label="the model") if is_last else gather_values(3, axis, label="the plan")
    assert gather_values(1, axis, label="numbers") == [1] * axis.size
