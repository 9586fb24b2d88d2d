"""A mesh arranges the processes of a run along named axes, the same on all ranks, or says why it cannot."""

import math
import re
import socket
import threading
from contextlib import suppress
from datetime import timedelta
from itertools import count

import pytest
import torch
import torch.distributed as dist

import tulle
import tulle.comm
from ranks import on_ranks
from tulle.environment import Launch, detect
from tulle.errors import CommunicationError, MeshError
from tulle.mesh import _store, _wake, resolve, will_wait


@pytest.mark.parametrize(
    ("axes", "size", "shape"),
    [
        ({"data": 4}, 4, {"data": 4}),
        ({"data": -1}, 1, {"data": 1}),
        ({"data": -1, "pipe": 2}, 8, {"data": 4, "pipe": 2}),
        ({"data": 2, "pipe": -1, "model": 3}, 6, {"data": 2, "pipe": 1, "model": 3}),
        ({"pipe": 2, "data": 3}, 6, {"pipe": 2, "data": 3}),
    ],
)
def test_minus_one_is_the_rest_and_the_order_stays(axes, size, shape):
    assert list(resolve(axes, size).items()) == list(shape.items())


@pytest.mark.parametrize(
    ("axes", "size", "text"),
    [
        ({"data": 3}, 4, "data=3, which needs 3 processes, but 4 run: change the sizes .* --processes 3`"),
        ({"data": 4}, 1, "data=4, which needs 4 processes, but 1 runs: .* `tulle run --processes 4`"),
        ({"data": 2, "pipe": 2}, 8, "data=2 x pipe=2, which needs 4 processes, but 8 run"),
        ({"data": -1, "pipe": 3}, 8, "data=-1 x pipe=3, which needs a multiple of 3 processes, but 8 run"),
        ({"data": -1, "pipe": 8}, 4, "data=-1 x pipe=8, which needs a multiple of 8 processes, but 4 run"),
        ({"data": -1, "pipe": -1}, 4, "data=-1 x pipe=-1: at most one axis can be -1, set the others"),
        ({"data": 0}, 4, "data=0, expected a positive number of processes or -1 for the rest"),
        ({"data": -2}, 4, "data=-2, expected a positive number"),
        ({"data": 2.0}, 2, "data=2.0, expected a positive number"),
        ({"data": True}, 1, "data=True, expected a positive number"),
        ({"data": "2"}, 2, "data='2', expected a positive number"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(axes, size, text):
    with pytest.raises(MeshError, match=f"tulle.init was given {text}"):
        resolve(axes, size)


@on_ranks(1, 2, 4)
def test_one_axis_holds_all_processes():
    mesh = tulle.init(data=-1)
    axis = mesh["data"]
    assert (mesh.rank, mesh.size) == (dist.get_rank(), dist.get_world_size())
    assert (axis.name, axis.rank, axis.size) == ("data", mesh.rank, mesh.size)
    assert axis.ranks == tuple(range(mesh.size))
    assert mesh.device == axis.device == torch.device("cpu")
    assert mesh.shape == {"data": mesh.size}
    assert (list(mesh), "data" in mesh, "pipe" in mesh) == (["data"], True, False)
    assert repr(mesh) == f"Mesh(data={mesh.size})"
    assert tulle.init().shape == mesh.shape  # the default


@on_ranks(4)
def test_two_axes_are_the_rows_and_columns_of_the_grid():
    mesh = tulle.init(data=2, pipe=2)
    row, column = divmod(mesh.rank, 2)  # the last axis varies fastest
    assert (mesh["data"].rank, mesh["pipe"].rank) == (row, column)
    assert mesh["data"].ranks == (column, column + 2)
    assert mesh["pipe"].ranks == (2 * row, 2 * row + 1)
    for axis in mesh.axes:
        assert dist.get_process_group_ranks(axis.group) == list(axis.ranks)
        assert dist.get_rank(axis.group) == axis.rank
        total = torch.tensor(2**mesh.rank)
        dist.all_reduce(total, group=axis.group)
        assert total.item() == sum(2**rank for rank in axis.ranks)


@on_ranks(4)
def test_axes_of_one_and_of_all_processes_have_the_right_groups():
    mesh = tulle.init(pipe=1, data=-1, model=1)
    assert mesh.shape == {"pipe": 1, "data": 4, "model": 1}
    assert mesh["data"].group is dist.group.WORLD
    assert (mesh["pipe"].size, mesh["pipe"].rank, mesh["pipe"].ranks) == (1, 0, (mesh.rank,))


@on_ranks(4)
def test_torchs_device_mesh_has_the_same_axes():
    mesh = tulle.init(data=2, pipe=2).device_mesh()
    assert mesh.mesh_dim_names == ("data", "pipe")
    assert mesh.mesh.tolist() == [[0, 1], [2, 3]]
    row, column = divmod(dist.get_rank(), 2)
    assert list(mesh.get_coordinate()) == [row, column]
    assert dist.get_process_group_ranks(mesh["data"].get_group()) == [column, column + 2]


@on_ranks(1, 2)
def test_torchs_device_mesh_works_with_one_axis():
    mesh = tulle.init(data=-1).device_mesh()
    assert (mesh.mesh_dim_names, mesh.size()) == (("data",), dist.get_world_size())


@on_ranks(1, 2, 4)
def test_an_unknown_axis_is_named_with_those_that_there_are():
    mesh = tulle.init(data=-1, pipe=1)
    text = f"the mesh has no axis 'model', it has Mesh(data={mesh.size}, pipe=1): use one of these names"
    with pytest.raises(MeshError, match=re.escape(text)):
        mesh["model"]


@on_ranks(2, 4)
def test_ranks_that_name_different_axes_raise_alike():
    axes = {"batch": -1} if dist.get_rank() == 1 else {"data": -1}
    size = dist.get_world_size()
    text = f"rank 1 called tulle.init with {{'batch': {size}}}, rank 0 with {{'data': {size}}}: every process must"
    with pytest.raises(MeshError, match=re.escape(text)):
        tulle.init(**axes)


@on_ranks(4)
def test_ranks_that_order_axes_differently_raise_alike():
    axes = {"pipe": 2, "data": 2} if dist.get_rank() == 3 else {"data": 2, "pipe": 2}
    with pytest.raises(MeshError, match=r"rank 3 called .* {'pipe': 2, 'data': 2}, rank 0 with {'data': 2,"):
        tulle.init(**axes)


@on_ranks(2)
def test_ranks_of_which_one_cannot_multiply_raise_alike():
    size = 3 if dist.get_rank() == 1 else 2
    with pytest.raises(MeshError, match="data=3"):
        tulle.init(data=size)


@on_ranks(2)
@pytest.mark.parametrize("timeout", [90, 90.0, timedelta(minutes=1.5)], ids=str)
def test_the_timeout_is_in_seconds_or_a_timedelta(timeout):
    mesh = tulle.init(data=1, pipe=2, timeout=timeout)
    assert mesh["data"].timeout_s == 90.0
    assert mesh["pipe"].timeout_s == 20.0, "the group that was initialized before keeps its own"


@pytest.mark.parametrize("timeout", [0, -1, "5", True, math.inf, math.nan], ids=repr)
def test_a_timeout_that_is_no_time_is_refused(timeout):
    with pytest.raises(MeshError, match=f"timeout={timeout!r}, expected a positive number of seconds"):
        tulle.init(data=-1, timeout=timeout)


@pytest.mark.parametrize("backend", ["glo", 3], ids=repr)
def test_a_backend_that_is_not_there_is_refused(backend):
    with pytest.raises(MeshError, match=f"the backend {backend!r} is not in this build of PyTorch: use gloo"):
        tulle.init(data=-1, backend=backend)


def test_processes_that_are_started_again_and_groups_made_anew_do_not_find_what_those_before_left(monkeypatch):
    launchers = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    here = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "localhost", "MASTER_PORT": launchers.port}
    for name, value in {**here, "TORCHELASTIC_USE_AGENT_STORE": True}.items():
        monkeypatch.setenv(name, str(value))
    stores = []
    for attempt, groups_before in ((0, 0), (0, 0), (0, 1), (1, 0)):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        monkeypatch.setattr("tulle.mesh._joined", count(groups_before))
        stores.append(_store(detect(), timedelta(seconds=10)))
    stores[0].set("address", "of a process that is gone")
    assert [store.check(["address"]) for store in stores] == [True, True, False, False]


@on_ranks(4)
def test_a_new_group_gives_up_after_the_timeout():
    axis = tulle.init(data=2, pipe=2, timeout=0.2)["data"]
    if axis.rank == 0:
        with pytest.raises(RuntimeError, match=r"(?i)timed? ?out"):
            dist.all_reduce(torch.zeros(1), group=axis.group)


@on_ranks(2)
def test_where_one_ends_while_processes_meet_the_others_are_told_to_look_at_its_log(monkeypatch):
    def close(*_: object) -> None:
        raise RuntimeError("Connection reset by peer")

    monkeypatch.setattr(dist, "all_gather_object", close)
    with pytest.raises(
        CommunicationError, match=r"did not meet all processes: see the log of each rank\. Connection re"
    ):
        tulle.init(data=-1)


@on_ranks(3)
def test_at_the_end_threads_that_wait_for_other_ranks_are_woken():
    mesh = tulle.init(data=-1)
    lane = tulle.comm.lane(mesh["data"], "never used")

    def listen(source: int) -> None:
        with suppress(RuntimeError):
            dist.irecv(torch.empty(1), source, lane.group).wait()

    sources = [rank for rank in range(mesh.size) if rank != mesh.rank]
    threads = [will_wait(threading.Thread(target=listen, args=(source,), daemon=True)) for source in sources]
    for thread in threads:
        thread.start()
    dist.barrier()
    _wake()
    assert not any(thread.is_alive() for thread in threads)


def test_a_slurm_job_of_which_only_one_process_runs_is_told_to_be_started_with_srun():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    launch = Launch("slurm", rank=0, size=2, local_rank=0, local_size=1, address="localhost", port=port)
    text = rf"2 processes that Slurm tells of did not meet at localhost:{port}: .*1/2 clients joined.* with srun"
    with pytest.raises(CommunicationError, match=text):
        _store(launch, timedelta(seconds=1))
