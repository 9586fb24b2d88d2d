"""Hosts of several ranks reduce within them and then between them: the sums, and the errors, are those of a ring."""

import copy
import os
import threading
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

import tulle
from pretended_hosts import pretend_hosts
from rank_process import patches
from ranks import on_ranks
from tulle import comm
from tulle.comm import levels as levels_module
from tulle.comm.levels import LEAST_BYTES, levels
from tulle.comm.traffic import traffic
from tulle.errors import CommunicationError
from tulle.shared_memory import SWITCH, exchanges

pytestmark = pytest.mark.skipif(os.environ.get(SWITCH) == "0", reason="ranks are told not to share memory")
LENGTHS = [LEAST_BYTES // 8, 1_001, 70_001, 300_000]


def numbers(size: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    """`[size, length]`: what each rank has; whole numbers, whose sums have no rounding."""
    drawn = torch.randint(-50, 50, (size, length), generator=torch.Generator().manual_seed(length))
    return drawn.abs().to(dtype) if dtype == torch.uint8 else drawn.to(dtype)


@on_ranks(4)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int16], ids=str)
def test_what_two_hosts_of_two_ranks_reduce_is_that_of_all(dtype):
    pretend_hosts(2)
    axis = tulle.init(data=-1)["data"]
    patches.setattr(exchanges, "_BETWEEN_HOSTS_BYTES", 100_000)  # several pieces
    assert levels(axis) is not None
    for length in LENGTHS:
        parts = numbers(4, length, dtype)
        for op, expected in (("sum", parts.sum(0, dtype=dtype)), ("max", parts.amax(0)), ("min", parts.amin(0))):
            lent = comm.zeros(length, parts, axis).copy_(parts[axis.rank])
            for found in (parts[axis.rank].clone(), lent):
                assert comm.all_reduce(found, axis, label="here", op=op).wait() is found
                assert torch.equal(found, expected), (length, op)


@on_ranks(6)
@pytest.mark.parametrize("ranks_per_host", [2, 3])
def test_hosts_of_any_number_reduce(ranks_per_host):
    pretend_hosts(ranks_per_host)
    axis = tulle.init(data=-1)["data"]
    for length in (*LENGTHS, 600_000):
        parts = numbers(6, length, torch.float32)
        found = [parts[axis.rank].clone(), comm.zeros(length, parts, axis).copy_(parts[axis.rank])]
        pending = [comm.all_reduce(one, axis, label="here") for one in found]
        for one in reversed(pending):
            assert torch.equal(one.wait(), parts.sum(0))


@on_ranks(4)
@pytest.mark.parametrize("ranks_per_host", [1, 3, 4])
def test_one_host_and_hosts_that_are_unlike_have_no_levels(ranks_per_host):
    pretend_hosts(ranks_per_host)
    axis = tulle.init(data=-1)["data"]
    assert levels(axis) is None
    assert torch.equal(comm.all_reduce(torch.ones(9_000), axis, label="here").wait(), torch.full((9_000,), 4.0))


@on_ranks(4)
@pytest.mark.parametrize(
    "lengths", [[30_000, 30_000, 30_000, 30_000], [70_000, 0, 1, 90_001], [0, 0, 0, 40_000]], ids=str
)
def test_what_hosts_of_two_ranks_gather_is_what_all_have(lengths):
    pretend_hosts(2)
    axis = tulle.init(data=-1)["data"]
    parts = [torch.randn(length, 3, generator=torch.Generator().manual_seed(length)) for length in lengths]
    before = traffic.sent_for("here").bytes_sent
    arrived = {}
    pending = [
        comm.all_gather_parts(parts[axis.rank], lengths, axis, label="here", arrived=arrived.__setitem__),
        comm.all_reduce(torch.ones(9_000), axis, label="there"),
        comm.all_gather_parts(parts[axis.rank][:, :1].contiguous(), lengths, axis, label="there"),
        comm.all_gather(torch.full((40_000,), float(axis.rank)), axis, label="there"),
    ]
    found = [one.wait() for one in reversed(pending)][::-1]
    assert torch.equal(found[0], torch.cat(parts))
    assert torch.equal(found[1], torch.full((9_000,), 4.0))
    assert torch.equal(found[2], torch.cat(parts)[:, :1])
    assert torch.equal(found[3], torch.arange(4.0).repeat_interleave(40_000).view(4, -1))
    assert {rank: len(part) for rank, part in arrived.items()} == {r: n for r, n in enumerate(lengths) if n}
    assert traffic.sent_for("here").bytes_sent - before == 3 * 12 * lengths[axis.rank]


@on_ranks(6)
@pytest.mark.parametrize("ranks_per_host", [2, 3])
def test_hosts_of_any_number_gather(ranks_per_host):
    pretend_hosts(ranks_per_host)
    axis = tulle.init(data=-1)["data"]
    lengths = [20_000, 0, 30_001, 9, 0, 50_000]
    parts = [torch.full((length,), float(rank), dtype=torch.bfloat16) for rank, length in enumerate(lengths)]
    for _ in range(3):
        assert torch.equal(
            comm.all_gather_parts(parts[axis.rank], lengths, axis, label="here").wait(), torch.cat(parts)
        )


@on_ranks(4)
def test_each_rank_counts_the_bytes_of_a_ring():
    pretend_hosts(2)
    axis = tulle.init(data=-1)["data"]
    before = traffic.sent_for("here").bytes_sent
    comm.all_reduce(torch.ones(9_000), axis, label="here").wait()
    assert traffic.sent_for("here").bytes_sent - before == 2 * 3 / 4 * 4 * 9_000


@on_ranks(4)
def test_lanes_that_are_first_used_in_another_order_on_each_rank_have_levels_of_their_own():
    pretend_hosts(2)
    axis = tulle.init(data=-1)["data"]
    lanes = [comm.lane(axis, purpose) for purpose in ("one", "another")]
    found = {}

    def reduce(number: int) -> None:
        found[number] = comm.all_reduce(torch.full((9_000,), number + 1.0), lanes[number], label="here").wait()

    threads = [threading.Thread(target=reduce, args=(number,)) for number in (0, 1)]
    for thread in threads if axis.rank % 3 else reversed(threads):
        thread.start()
        time.sleep(0.1)
    for thread in threads:
        thread.join()
    assert [found[number][0].item() for number in (0, 1)] == [4.0, 8.0]


@on_ranks(4)
def test_replicas_on_two_hosts_train_as_one_process():
    pretend_hosts(2)
    mesh = tulle.init(data=-1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 256), nn.Linear(256, 300), nn.ReLU(), nn.Linear(300, 1)).double()
    reference, ids = copy.deepcopy(model), torch.randint(50, (3, 16))
    model, optimizer = tulle.distribute(model, torch.optim.Adam(model.parameters()), mesh)
    one = torch.optim.Adam(reference.parameters())
    reduced = []
    begin = levels_module.Levels.all_reduce
    patches.setattr(levels_module.Levels, "all_reduce", lambda self, *args: [reduced.append(1), begin(self, *args)][1])
    for batch in ids:
        one.zero_grad()
        reference(batch).square().mean().backward()
        one.step()
        optimizer.zero_grad()
        model(batch[mesh.rank * 4 : mesh.rank * 4 + 4]).square().mean().backward()
        optimizer.step()
    assert len(reduced) >= len(ids)
    for name, found in tulle.full_state_dict(model).items():
        torch.testing.assert_close(found, reference.state_dict()[name], rtol=1e-12, atol=1e-14)


@on_ranks(4)
def test_a_host_that_does_not_come_is_told_of_on_all_others():
    pretend_hosts(2)
    axis = replace(tulle.init(data=-1)["data"], timeout_s=1.0, lanes={}, kept={})
    comm.all_reduce(torch.ones(9_000), axis, label="here").wait()
    if axis.rank < 2:
        with pytest.raises(CommunicationError, match=r"all-reduce of there .* ranks 2, 3 did not come to it"):
            comm.all_reduce(torch.ones(9_000), axis, label="there").wait()
