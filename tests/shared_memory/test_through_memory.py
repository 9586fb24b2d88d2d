"""What ranks of one host send each other through memory is what they would have sent through the network."""

import atexit
import copy
import gc
import io
import os
import time
import weakref
from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.optim import SGD

import tulle
from rank_process import patches
from ranks import on_ranks
from tulle import comm
from tulle.board import has_left
from tulle.comm.through_memory import shared
from tulle.errors import CommunicationError
from tulle.shared_memory import SWITCH, exchanges, flat_bytes, works
from tulle.shared_memory.messages import CARRIED_BYTES

pytestmark = pytest.mark.skipif(os.environ.get(SWITCH) == "0", reason="ranks are told not to share memory")
SIZES = [0, 1, 3, CARRIED_BYTES // 8, CARRIED_BYTES // 8 + 1, 9_000, 70_001, 300_000]  # carried, at once, in pieces
SOON_S = 5.0


def numbers(size: int, length: int, dtype: torch.dtype, *, seed: int = 0) -> torch.Tensor:
    """`[size, length]`: what each rank has."""
    drawn = torch.randn(size, length, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (100 * drawn).to(dtype)


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.uint8], ids=str)
def test_a_sum_is_that_in_the_order_of_ranks_to_the_bit(dtype):
    axis = tulle.init(data=-1)["data"]
    assert shared(axis) is not None
    for length in SIZES:
        parts = numbers(axis.size, length, dtype) if dtype != torch.uint8 else numbers(axis.size, length, dtype).abs()
        expected = parts[0].clone()
        for part in parts[1:]:
            expected += part
        found = parts[axis.rank].clone()
        assert comm.all_reduce(found, axis, label="here").wait() is found
        assert torch.equal(found, expected), length


@on_ranks(3)
def test_numbers_that_autograd_forbids_to_write_are_reduced():
    axis = tulle.init(data=-1)["data"]
    for length in SIZES:
        parts = numbers(axis.size, length, torch.float64)
        leaf = parts[axis.rank].clone().requires_grad_()
        with torch.inference_mode():
            inferred = parts[axis.rank].clone()
        version = leaf._version
        for found in (leaf, inferred):
            comm.all_reduce(found, axis, label="here").wait()
            assert torch.equal(found.detach(), parts[0] + parts[1] + parts[2])
        assert leaf._version == version


@on_ranks(2)
def test_exchanges_in_inference_mode_are_done_by_whatever_thread():
    axis = tulle.init(data=-1)["data"]
    with torch.inference_mode():
        for length in SIZES:
            parts = numbers(2, length, torch.float64)
            found = parts[axis.rank].clone()
            pending = comm.all_gather_parts(found.clone(), [length] * 2, axis, label="here")
            comm.all_reduce(found, axis, label="here").wait()
            assert torch.equal(found, parts[0] + parts[1])
            assert torch.equal(pending.wait(), parts.view(-1))
    comm.all_reduce(found := torch.ones(400_000), axis, label="later").wait()
    assert (found == 2).all()


@on_ranks(2, 3, 4)
def test_exchanges_under_way_are_waited_for_in_any_order():
    axis = tulle.init(data=-1)["data"]
    for turn in range(3):
        pending = []
        for place, length in enumerate([10, *SIZES, 5, 6, 7, *reversed(SIZES), *range(20)]):
            mine = torch.full((length,), float(place + turn + axis.rank), dtype=torch.float64)
            pending.append(comm.all_reduce(mine, axis, label="sum"))
            pending.append(comm.all_gather_parts(mine.clone(), [length] * axis.size, axis, label="parts"))
        order = range(len(pending)) if axis.rank == 0 else reversed(range(len(pending)))
        if axis.rank == 1:
            time.sleep(0.05)
        came = {place: pending[place].wait() for place in order}
        for place, length in enumerate([10, *SIZES, 5, 6, 7, *reversed(SIZES), *range(20)]):
            whole = [float(place + turn + rank) for rank in range(axis.size)]
            assert torch.equal(came[2 * place], torch.full((length,), sum(whole), dtype=torch.float64))


@on_ranks(2, 3)
def test_a_slow_reader_reads_what_was_told_and_not_what_was_told_next():
    axis = tulle.init(data=-1)["data"]
    for turn in range(6):  # rank 0 sends much and hears little, so that its messages alone do not say that it has read
        lengths = [CARRIED_BYTES if rank == 0 else 1 for rank in range(axis.size)]
        mine = torch.full((lengths[axis.rank],), float(turn), dtype=torch.float64)
        pending = comm.all_gather_parts(mine, lengths, axis, label="large")
        more = [
            comm.all_gather_parts(torch.full((1,), float(turn)), [1] * axis.size, axis, label="small") for _ in "123"
        ]
        if axis.rank == axis.size - 1:
            time.sleep(0.02)
        assert (pending.wait() == turn).all()
        for one in more:
            assert one.wait().tolist() == [float(turn)] * axis.size


@on_ranks(3)
def test_little_that_is_sent_beside_much_waits_for_who_reads_it_late():
    axis = tulle.init(data=-1)["data"]
    comm.barrier(axis)
    last, large = axis.size - 1, CARRIED_BYTES + 1

    def begin(turn: int) -> comm.Pending[torch.Tensor]:  # rank 0 sends rank 1 much, all others send all others little
        lengths = [large if {axis.rank, other} == {0, 1} else 1 for other in range(axis.size)]
        parts = [torch.full((length,), 10 * turn + axis.rank, dtype=torch.uint8) for length in lengths]
        return comm.all_to_all_parts(parts, lengths, axis, label="here")

    pending = [begin(turn) if axis.rank == last else begin(turn).wait() for turn in range(4)]
    torch.distributed.barrier()  # which goes through the network
    found = [one.wait() if isinstance(one, comm.Pending) else one for one in pending]
    for turn, one in enumerate(found):
        assert one.unique().tolist() == [10 * turn + rank for rank in range(axis.size)]


@on_ranks(3)
def test_one_rank_that_must_not_keeps_all_from_sharing():
    if torch.distributed.get_rank() == 1:
        patches.setenv(SWITCH, "0")
    axis = tulle.init(data=-1)["data"]
    assert shared(axis) is None
    assert comm.all_reduce(torch.ones(3), axis, label="here").wait().tolist() == [3.0] * 3


@on_ranks(2)
def test_what_was_reduced_is_held_no_longer():
    axis = tulle.init(data=-1)["data"]
    for length in (3, 300_000):
        found = torch.ones(length)
        held = weakref.ref(found)
        pending = comm.all_reduce(found, axis, label="here")
        pending.wait()
        assert torch._C._storage_Use_Count(found.untyped_storage()._cdata) <= 2  # `found`'s and that of this call
        del found, pending
        gc.collect()
        assert held() is None


@on_ranks(3)
def test_when_a_rank_goes_the_others_are_told_at_once():
    axis = tulle.init(data=-1)["data"]
    comm.barrier(axis)
    if axis.rank == 1:
        works_of_axis = shared(axis)
        assert works_of_axis is not None
        works_of_axis.close()
        return
    begin_s = time.monotonic()
    with pytest.raises(CommunicationError, match="has ended, or given up"):
        comm.all_reduce(torch.ones(3), axis, label="here").wait()
    assert time.monotonic() - begin_s < SOON_S
    with pytest.raises(CommunicationError, match="ended, or given up"):
        comm.all_reduce(torch.ones(3), axis, label="later").wait()


@on_ranks(2)
def test_a_process_that_was_forked_ends_nothing_when_it_ends():
    axis = tulle.init(data=-1)["data"]
    comm.all_reduce(torch.ones(3), axis, label="here").wait()
    works_of_axis = shared(axis)
    assert works_of_axis is not None
    if (child := os.fork()) == 0:  # as one that writes a checkpoint while training goes on
        atexit._run_exitfuncs()
        works_of_axis.__del__()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert comm.all_reduce(torch.ones(3), axis, label="here").wait().tolist() == [2.0] * 3
    assert not has_left(axis.rank)


@on_ranks(2)
@pytest.mark.parametrize("length", [3, 300_000])
def test_unlike_sizes_are_an_error_on_both(length):
    axis = tulle.init(data=-1)["data"]
    with pytest.raises(CommunicationError, match=r"of one size, in one order|given up"):
        comm.all_reduce(torch.ones(length + axis.rank), axis, label="here").wait()


@on_ranks(2)
def test_an_exchange_that_is_interrupted_fails_on_both():
    axis = tulle.init(data=-1, timeout=30)["data"]
    comm.barrier(axis)
    works_of_axis = shared(axis)
    assert works_of_axis is not None
    with works_of_axis._turn:  # the thread, which connected, is through: the next is done by whoever waits for it
        pass
    pending = comm.all_reduce(torch.ones(3), axis, label="here")
    if axis.rank == 0:
        with patches.context() as patch:

            def interrupted(*_):
                raise KeyboardInterrupt

            patch.setattr(exchanges, "_of_all", interrupted)
            with pytest.raises(KeyboardInterrupt):
                pending.wait()
    else:
        with suppress(CommunicationError):  # of which it may have been told already
            pending.wait()
    with pytest.raises(CommunicationError, match=r"KeyboardInterrupt|given up"):
        comm.all_reduce(torch.ones(3), axis, label="next").wait()


@on_ranks(2)
def test_more_exchanges_than_messages_have_room_wait_for_nobody():
    axis = tulle.init(data=-1)["data"]
    comm.barrier(axis)
    length = CARRIED_BYTES // 4
    pending = [comm.all_reduce(torch.ones(length), axis, label="here") for _ in range(20 * works._AHEAD)]
    for one in pending:
        assert (one.wait() == 2).all()


@on_ranks(2)
def test_groups_of_some_ranks_and_lanes_have_memory_of_their_own():
    mesh = tulle.init(data=-1)
    axis, lane = mesh["data"], comm.lane(mesh["data"], "apart")
    first, second = shared(axis), shared(lane)
    assert first is not None
    assert second is not None
    assert first is not second
    large = comm.all_reduce(torch.ones(400_000), axis, label="large")
    small = comm.all_reduce(torch.ones(3), lane, label="small")
    assert small.wait().tolist() == [2.0] * 3
    assert (large.wait() == 2).all()


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_what_lies_in_lent_memory_is_reduced_there(dtype):
    axis = tulle.init(data=-1)["data"]
    for length in (70_000, 150_001, 400_000):
        parts = numbers(axis.size, length, dtype)
        expected = parts[0].clone()
        for part in parts[1:]:
            expected += part
        lent = comm.zeros(length, parts, axis)
        lent.copy_(parts[axis.rank])
        where = lent.data_ptr()
        pending = [comm.all_reduce(piece, axis, label="here") for piece in lent.split(length // 2 + 3)]
        for one in pending:
            one.wait()
        assert torch.equal(lent, expected), length
        comm.all_reduce(lent, axis, label="here", op="max").wait()
        assert torch.equal(lent, expected)
        assert lent.data_ptr() == where


@on_ranks(2)
def test_lent_memory_is_known_by_the_number_of_what_went_before_it():
    axis = tulle.init(data=-1)["data"]
    works_of_axis = shared(axis)
    assert works_of_axis is not None
    kept = comm.zeros(100_000, torch.empty(0), axis)
    descriptors = set()
    for turn in range(4):
        lent = comm.zeros(100_000, torch.empty(0), axis)
        lent.fill_(turn + axis.rank)
        comm.all_reduce(lent, axis, label="here").wait()
        assert (lent == 2 * turn + 1).all()
        place = works_of_axis.channel.place_of(flat_bytes(lent))
        assert place is not None
        assert place.slot == 3, "the first after the slots that are written in turn is kept"
        del lent, place
        gc.collect()
        descriptors.add(len(os.listdir("/proc/self/fd")))
    assert len(descriptors) == 1
    assert (kept == 0).all()


@on_ranks(2)
def test_gradients_of_replicas_lie_where_all_ranks_reach_them():
    mesh = tulle.init(data=-1)
    torch.manual_seed(0)
    model = nn.Linear(400, 400)
    model, optimizer = tulle.distribute(model, SGD(model.parameters(), lr=0.1), mesh)
    before = copy.deepcopy(model.weight.detach())
    inputs = torch.randn(2, 3, 400, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        model(inputs[mesh.rank]).pow(2).mean().backward()
    grad, works_of_axis = model.weight.grad, shared(mesh["data"])
    assert grad is not None
    assert works_of_axis is not None
    assert works_of_axis.channel.place_of(flat_bytes(grad)) is not None
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), before - 0.1 * grad)
    pickled = io.BytesIO()
    torch.save(grad, pickled)
    pickled.seek(0)
    assert torch.equal(torch.load(pickled), grad)
    assert copy.deepcopy(grad).data_ptr() != grad.data_ptr()
