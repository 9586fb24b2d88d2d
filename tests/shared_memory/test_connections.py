"""Messages carry what is told, or the file descriptor of the memory where it lies."""

import os
import resource
import socket

import pytest
import torch

from tulle.shared_memory.messages import Connection, Place
from tulle.shared_memory.neighbours import Neighbours
from tulle.shared_memory.region import Region


@pytest.fixture
def ends():
    made = [Connection(rank, end, 5.0) for rank, end in enumerate(socket.socketpair(type=socket.SOCK_SEQPACKET))]
    yield made
    for one in made:
        one.close()


def filled(value: int) -> tuple[torch.Tensor, Region]:
    region = Region.new(10)
    return region.bytes()[:10].fill_(value), region


def test_memory_of_another_takes_no_file_descriptor(ends):
    content, region = filled(1)
    before = {*os.listdir("/proc/self/fd")}
    ends[0].send(1, content, Place(0, 0, region))
    heard = ends[1].receive(1, 10)
    assert {*os.listdir("/proc/self/fd")} == before
    content.fill_(2)
    assert heard.tolist() == [2] * 10


def test_what_cannot_be_reached_is_not_taken_for_what_was_there_before(ends):
    content, region = filled(1)
    ends[0].send(1, content, Place(0, 0, region))
    assert ends[1].receive(1, 10).tolist() == [1] * 10
    other, its_region = filled(2)
    ends[0].send(2, other, Place(0, 0, its_region))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        with pytest.raises(RuntimeError, match=r"no file descriptor was left .* rank 1 sent: .* \(ulimit -n\)"):
            ends[1].receive(2, 10)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_connections_are_told_apart_by_keys_as_long_as_the_names_of_groups_of_a_thousand_ranks():
    here, there = Neighbours.listening(), Neighbours.listening()
    here.reach([here.address, there.address])
    keys = [f"{list(range(1_000))} {number}" for number in range(2)]
    made = {key: here.connect(1, key) for key in keys}
    for key in reversed(keys):
        made[key].send(key.encode())
        with there.accept(key, 1.0) as came:
            assert came.recv(10_000).decode() == key
        made[key].close()
    here.close()
    there.close()


def test_where_files_must_be_small_no_memory_is_shared_and_none_is_left_open():
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = os.listdir("/proc/self/fd")
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        assert Neighbours.listening().address == ""
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir("/proc/self/fd") == before
