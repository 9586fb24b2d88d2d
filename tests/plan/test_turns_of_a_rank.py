"""The order in which a plan's ranks work is that of the run-time, with one and with several stages a rank."""

import pytest

from tulle.pipeline.schedule import held_at_once
from tulle.plan.turns import turns


def most_held(found, rank, ranks):
    held = most = 0
    for turn in found:
        if turn.stage % ranks == rank:
            held += -1 if turn.is_backward else 1
            most = max(most, held)
    return most


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("schedule", ["1f1b", "eager-1f1b", "zb-h1", "gpipe"])
def test_a_rank_holds_what_the_run_time_lets_it(schedule, groups):
    ranks, micro_batches = 4, 8
    found = turns(schedule, (1.0,) * ranks * groups, (2.0,) * ranks * groups, ranks, micro_batches)
    for rank in range(ranks):
        limit = held_at_once(schedule, rank, ranks, ranks * groups, micro_batches)
        # Beyond the limit the oldest may go on, for somebody must be able to.
        assert most_held(found, rank, ranks) <= limit + groups - 1
        assert most_held(found, rank, ranks) >= limit - 1


def test_micro_batches_pass_two_stages_a_rank_in_groups():
    found = turns("1f1b", (1.0,) * 8, (2.0,) * 8, 4, 8)
    mine = [
        f"{'b' if turn.is_backward else 'f'}{turn.stage}.{turn.micro_batch}" for turn in found if turn.stage % 4 == 0
    ]
    assert mine[:12] == [
        *(f"f0.{number}" for number in range(4)),
        *(f"f4.{number}" for number in range(4)),
        *("f0.4", "f0.5", "f0.6", "b4.0"),
    ]
