"""Exchanges of unequal parts: what was sent arrives whole, whatever the lengths, at once or in staged rounds."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

import tulle
from gigabit import GIGABIT, give_network
from rank_process import patches
from ranks import on_ranks
from tulle import comm
from tulle.comm import parts, traffic
from tulle.shared_memory import SWITCH

SMALL = 16_000  # of float64 to three ranks: more than the backend gets, less than what is paced
LARGE = parts.AT_ONCE_BYTES // 8 + 1  # float64 entries: one more than goes at once
LENGTHS = {
    "alike": [3, 3, 3, 3],
    "unequal": [1, 4, 2, 7],
    "one is empty": [2, 0, 5, 1],
    "one is not empty": [0, 6, 0, 0],
    "all are empty": [0, 0, 0, 0],
    "all are large": [LARGE, LARGE + 1, LARGE + 2, LARGE + 3],
    "one is large": [1, LARGE, 0, 2],
}


def part(sender: int, receiver: int, length: int) -> torch.Tensor:
    """`[length, 2]` of numbers that tell sender, receiver and place."""
    return torch.arange(2 * length, dtype=torch.float64).view(length, 2) + 1e7 * sender + 1e8 * receiver


def counted(label: str) -> tuple[int, int]:
    """Bytes and messages under a label since the last look."""
    count = traffic.take_labels()[label]
    return count.bytes_sent, count.messages


def sent_to_others(parts_sent: list[torch.Tensor], rank: int) -> tuple[int, int]:
    leaving = [one for receiver, one in enumerate(parts_sent) if receiver != rank and one.numel()]
    return sum(one.nbytes for one in leaving), len(leaving)


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_all_gather_gives_each_ranks_part(lengths):
    axis = tulle.init(data=-1)["data"]
    lengths = lengths[: axis.size]
    mine = part(axis.rank, 0, lengths[axis.rank])
    traffic.take_labels()
    gathered = comm.all_gather_parts(mine, lengths, axis, label="here").wait()
    assert torch.equal(gathered, torch.cat([part(rank, 0, length) for rank, length in enumerate(lengths)]))
    assert counted("here") == sent_to_others([mine] * axis.size, axis.rank)


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_all_to_all_gives_each_rank_its_part(lengths):
    axis = tulle.init(data=-1)["data"]

    def length(sender: int, receiver: int) -> int:
        return lengths[(sender + 3 * receiver) % 4]

    mine = [part(axis.rank, receiver, length(axis.rank, receiver)) for receiver in range(axis.size)]
    expected = [part(sender, axis.rank, length(sender, axis.rank)) for sender in range(axis.size)]
    traffic.take_labels()
    received = comm.all_to_all_parts(mine, [len(one) for one in expected], axis, label="here").wait()
    assert torch.equal(received, torch.cat(expected))
    assert counted("here") == sent_to_others(mine, axis.rank)


@on_ranks(4)
@pytest.mark.parametrize(("length", "at_once"), [(SMALL, 3), (LARGE, parts.ROUNDS_UNDER_WAY)], ids=["small", "large"])
def test_a_large_exchange_keeps_few_rounds_under_way(length, at_once):
    patches.setenv(SWITCH, "0")
    axis = tulle.init(data=-1)["data"]
    posted = []

    def post(messages):
        posted.append(len(messages))
        return original(messages)

    with pytest.MonkeyPatch.context() as patch:
        original = parts._post
        patch.setattr(parts, "_post", post)
        pending = comm.all_gather_parts(torch.zeros(length, dtype=torch.float64), [length] * 4, axis, label="here")
        assert posted == [2] * at_once
        pending.wait()
    assert posted == [2] * 3


@on_ranks(2, 3, 4)
def test_ranks_that_stage_and_ranks_that_do_not_understand_each_other():
    axis = tulle.init(data=-1)["data"]
    lengths = [LARGE if rank == 0 else 1 for rank in range(axis.size)]
    for _ in range(3):  # were a round left behind, the next exchange would get its bytes
        gathered = comm.all_gather_parts(part(axis.rank, 0, lengths[axis.rank]), lengths, axis, label="here").wait()
        assert torch.equal(gathered, torch.cat([part(rank, 0, length) for rank, length in enumerate(lengths)]))


@on_ranks(2)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.bfloat16, torch.float32], ids=str)
def test_every_dtype_travels(dtype):
    axis = tulle.init(data=-1)["data"]
    lengths = [2, 3]
    mine = torch.full((lengths[axis.rank],), axis.rank + 1, dtype=dtype)
    gathered = comm.all_gather_parts(mine, lengths, axis, label="here").wait()
    assert gathered.tolist() == [1, 1, 2, 2, 2]
    assert gathered.dtype == dtype


@on_ranks(2, 4)
def test_a_message_goes_from_one_rank_to_another():
    axis = tulle.init(data=-1)["data"]
    first, last = 0, axis.size - 1
    traffic.take_labels()
    if axis.rank == first:
        comm.send(torch.tensor([5.0, 6.0]), axis, to=last, label="sent").wait()
        assert counted("sent") == (8, 1)
    if axis.rank == last:
        tensor = torch.zeros(2)
        assert comm.receive(tensor, axis, source=first, label="received").wait() is tensor
        assert tensor.tolist() == [5.0, 6.0]
        assert counted("received") == (0, 0)


@on_ranks(3)
def test_a_message_wants_nothing_of_other_ranks():
    """The first batch in a process group of nccl connects all of it, and would wait for those that have no message."""
    axis = tulle.init(data=-1)["data"]
    patches.setattr(parts.dist, "batch_isend_irecv", lambda messages: 1 / 0)
    if axis.rank == 0:
        comm.send(torch.ones(2), axis, to=2, label="here").wait()
    if axis.rank == 2:
        assert comm.receive(torch.zeros(2), axis, source=0, label="here").wait().tolist() == [1, 1]


@on_ranks(4)
def test_parts_stay_within_their_axis():
    mesh = tulle.init(data=2, pipe=2)
    axis = mesh["data"]
    gathered = comm.all_gather_parts(torch.tensor([mesh.rank]), [1, 1], axis, label="here").wait()
    assert gathered.tolist() == list(axis.ranks)
    if axis.rank == 0:
        comm.send(torch.tensor([mesh.rank]), axis, to=1, label="here").wait()
    else:
        assert comm.receive(torch.tensor([-1]), axis, source=0, label="here").wait().item() == axis.ranks[0]


@on_ranks(2)
def test_a_fast_network_leaves_more_to_the_backend_alike_on_lanes_made_since():
    axis = tulle.init(data=-1)["data"]
    before = comm.lane(axis, "made before")
    assert parts.is_for_backend(parts.BACKEND_BYTES, axis)
    assert not parts.is_for_backend(parts.BACKEND_BYTES + 1, axis)
    give_network(axis, replace(GIGABIT, bandwidth_bytes_per_s=1.2e9))
    assert parts.is_for_backend(9 * parts.BACKEND_BYTES, axis)
    assert parts.is_for_backend(9 * parts.BACKEND_BYTES, comm.lane(axis, "made since"))
    assert not parts.is_for_backend(9 * parts.BACKEND_BYTES, before), "its exchanges may be under way on another thread"
    leaving = [torch.full((300_000,), float(10 * axis.rank + to)) for to in range(2)]
    came = comm.all_to_all_parts(leaving, [300_000] * 2, axis, label="large", most_bytes=3_000_000).wait()
    assert came.view(2, -1)[:, 0].tolist() == [axis.rank, 10 + axis.rank]


@on_ranks(2)
def test_the_timeline_shows_what_two_ranks_swap():
    patches.setenv(SWITCH, "0")
    axis = tulle.init(data=-1)["data"]
    traffic.is_tracing = True
    try:
        with patch.object(parts, "trace") as drawn:
            swapped = comm.all_gather_parts(torch.full((4,), float(axis.rank)), [4, 4], axis, label="swapped").wait()
    finally:
        traffic.is_tracing = False
        traffic.take_spans()
    assert swapped.tolist() == [0.0] * 4 + [1.0] * 4
    [(works, exchange, _)] = [call.args for call in drawn.call_args_list]
    assert works[-1].get_future() is not None
    assert (exchange.operation, exchange.bytes_sent) == ("all-gather", 16)
