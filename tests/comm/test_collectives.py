"""Every collective gives what its definition says, and counts exactly the bytes and messages that it promises."""

import pytest
import torch
import torch.distributed as dist

import tulle
from ranks import on_ranks
from tulle import comm
from tulle.comm import traffic

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8]


def counted(label: str) -> tuple[int, int]:
    """Bytes and messages under a label since the last look."""
    count = traffic.take_labels()[label]
    return count.bytes_sent, count.messages


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize(
    ("op", "reduce", "dtype"),
    [("sum", torch.sum, torch.float64), ("max", torch.amax, torch.float32), ("min", torch.amin, torch.int64)],
)
def test_all_reduce_reduces_in_place(op, reduce, dtype):
    axis = tulle.init(data=-1)["data"]
    parts = torch.tensor([[[3, -1], [7, 0]], [[2, 5], [-9, 4]], [[1, 1], [0, 8]], [[6, 0], [-2, 2]]], dtype=dtype)
    tensor = parts[axis.rank].clone()
    traffic.take_labels()
    assert comm.all_reduce(tensor, axis, label="here", op=op).wait() is tensor
    assert torch.equal(tensor, reduce(parts[: axis.size], 0))
    n = axis.size
    assert counted("here") == (round(2 * (n - 1) / n * 4 * dtype.itemsize), 2 * (n - 1))


@on_ranks(3)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_largest_and_the_smallest_are_those_of_torch_whoever_has_none(dtype):
    axis = tulle.init(data=-1)["data"]
    nan, inf = float("nan"), float("inf")
    parts = torch.tensor([[nan, 1, 2, -inf, -0.5], [0, nan, -7, inf, -3], [1, 2, -nan, 5, -2]], dtype=dtype)
    for op, reduce in (("max", torch.amax), ("min", torch.amin)):
        found = comm.all_reduce(parts[axis.rank].clone(), axis, label="here", op=op).wait()
        torch.testing.assert_close(found, reduce(parts, 0), rtol=0, atol=0, equal_nan=True)


STRANGE = {
    "strided": lambda numbers: numbers.repeat_interleave(2, 1)[:, ::2],
    "turned": lambda numbers: numbers.t().contiguous().t(),
    "conjugate": lambda numbers: torch.complex(numbers, -numbers).conj(),
    "of a graph": lambda numbers: numbers.clone().requires_grad_(),
    "short": lambda numbers: numbers.short(),
    "bool": lambda numbers: numbers.bool(),
    "none": lambda numbers: numbers[:0],
}


@on_ranks(2, 3)
@pytest.mark.parametrize("kind", STRANGE)
@pytest.mark.parametrize("length", [4, 100_000])
def test_tensors_of_any_layout_and_dtype_travel(kind, length):
    axis = tulle.init(data=-1)["data"]
    drawn = torch.randint(-5, 5, (axis.size, length, 6), generator=torch.Generator().manual_seed(0)).float()
    parts = [STRANGE[kind](numbers) for numbers in drawn]
    mine, rank, rows = parts[axis.rank], axis.rank, len(parts[0])
    wholes = [part.detach().clone().resolve_conj().contiguous() for part in parts]
    sums = sum(wholes[1:], start=wholes[0])
    assert torch.equal(comm.all_gather(mine, axis, label="here").wait(), torch.stack(wholes))
    lengths = [min(rows, r + 1) for r in range(axis.size)]
    gathered = comm.all_gather_parts(mine[: lengths[rank]], lengths, axis, label="here").wait()
    assert torch.equal(gathered, torch.cat([one[:n] for one, n in zip(wholes, lengths, strict=True)]))
    cut = [mine[r : r + 1] for r in range(axis.size)]
    for most_bytes in (None, 100):
        came = comm.all_to_all_parts(cut, [len(cut[rank])] * axis.size, axis, label="here", most_bytes=most_bytes)
        assert torch.equal(came.wait(), torch.cat([one[rank : rank + 1] for one in wholes]))
    with torch.no_grad():
        assert comm.all_reduce(mine, axis, label="here").wait() is mine
        assert torch.equal(mine, sums)
        assert comm.broadcast(mine.add_(rank) if rows and kind != "bool" else mine, axis, label="here").wait() is mine
        assert torch.equal(mine, sums)


@on_ranks(2)
def test_short_integers_which_no_backend_reduces_are_reduced():
    axis = tulle.init(data=-1)["data"]
    tensor = torch.tensor([axis.rank - 3, 4], dtype=torch.int16)
    assert comm.all_reduce(tensor, axis, label="here").wait() is tensor
    assert tensor.tolist() == [-5, 8]


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_broadcast_overwrites_with_the_sources(dtype):
    axis = tulle.init(data=-1)["data"]
    source = axis.size - 1
    tensor = torch.tensor([axis.rank, 10 + axis.rank], dtype=dtype)
    traffic.take_labels()
    assert comm.broadcast(tensor, axis, label="here", source=source).wait() is tensor
    assert tensor.tolist() == [source, 10 + source]
    others = axis.size - 1
    assert counted("here") == ((others * 2 * dtype.itemsize, others) if axis.rank == source else (0, 0))


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("shape", [(3,), (2, 3), (0, 3), ()], ids=str)
def test_all_gather_stacks_in_the_order_of_ranks(shape):
    axis = tulle.init(data=-1)["data"]
    mine = torch.full(shape, float(axis.rank))
    traffic.take_labels()
    gathered = comm.all_gather(mine, axis, label="here").wait()
    expected = torch.stack([torch.full(shape, float(rank)) for rank in range(axis.size)])
    assert gathered.shape == expected.shape
    assert torch.equal(gathered, expected)
    others = axis.size - 1
    assert counted("here") == (others * mine.nbytes, others if mine.numel() else 0)


@on_ranks(2, 3)
def test_all_gather_takes_a_tensor_that_is_not_contiguous():
    axis = tulle.init(data=-1)["data"]
    mine = torch.arange(6).view(2, 3).t() + axis.rank
    gathered = comm.all_gather(mine, axis, label="here").wait()
    assert torch.equal(gathered[1] - gathered[0], torch.ones(3, 2, dtype=torch.int64))
    assert torch.equal(gathered[axis.rank], mine)


@on_ranks(1, 2, 4)
def test_nobody_passes_a_barrier_before_all_have_come(tmp_path):
    axis = tulle.init(data=-1)["data"]
    (tmp_path / str(axis.rank)).touch()
    comm.barrier(axis)
    assert len(list(tmp_path.iterdir())) == axis.size


@on_ranks(4)
def test_a_collective_stays_within_its_axis():
    mesh = tulle.init(data=2, pipe=2)
    axis = mesh["pipe"]
    first, second = axis.ranks
    assert comm.all_reduce(torch.tensor(10**mesh.rank), axis, label="here").wait().item() == 10**first + 10**second
    assert comm.all_gather(torch.tensor(mesh.rank), axis, label="here").wait().tolist() == [first, second]
    # The source is a rank of the axis, not of the mesh.
    assert comm.broadcast(torch.tensor(mesh.rank), axis, label="here", source=1).wait().item() == second


@on_ranks(2, 3)
def test_several_collectives_are_under_way_and_end_in_any_order():
    axis = tulle.init(data=-1)["data"]
    pending = [comm.all_reduce(torch.tensor([float(k)]), axis, label="here") for k in range(5)]
    assert [one.wait().item() for one in reversed(pending)] == [k * axis.size for k in reversed(range(5))]


@on_ranks(1, 2)
def test_waiting_twice_gives_the_same_result():
    axis = tulle.init(data=-1)["data"]
    pending = comm.all_gather(torch.tensor([axis.rank]), axis, label="here")
    assert pending.wait() is pending.wait()


@on_ranks(2)
def test_time_spent_waiting_is_counted():
    axis = tulle.init(data=-1)["data"]
    before_s = traffic.wait_s
    pending = comm.all_reduce(torch.zeros(1 << 18), axis, label="here")
    begin_s = comm.now_s()
    pending.wait()
    assert 0 < traffic.wait_s - before_s <= comm.now_s() - begin_s
    after_s = traffic.wait_s
    pending.wait()
    assert traffic.wait_s == after_s


@on_ranks(1, 2, 3, 4)
def test_values_are_gathered_in_the_order_of_ranks():
    axis = tulle.init(data=-1)["data"]
    assert comm.gather_values({"rank": axis.rank}, axis, label="here") == [{"rank": r} for r in range(axis.size)]


@on_ranks(2, 3)
def test_a_lane_has_the_same_ranks_and_a_group_of_its_own_made_once():
    axis = tulle.init(data=-1)["data"]
    lane = comm.lane(axis, "tables")
    assert (lane.name, lane.rank, lane.size, lane.ranks) == (axis.name, axis.rank, axis.size, axis.ranks)
    assert lane.group is not axis.group
    assert comm.lane(axis, "tables") is lane
    assert comm.lane(axis, "others").group is not lane.group
    assert comm.all_reduce(torch.tensor(1), lane, label="here").wait().item() == axis.size
    assert dist.get_process_group_ranks(lane.group) == list(axis.ranks)


@on_ranks(1)
def test_alone_an_axis_is_its_own_lane():
    axis = tulle.init(data=-1)["data"]
    assert comm.lane(axis, "tables") is axis
