"""Messages from one rank to another of its host come out as they were sent, whenever that one reads them."""

import os
import socket
import threading
import time

import pytest
import torch

from tulle.shared_memory import Receiver, Sender
from tulle.shared_memory.messages import CARRIED_BYTES, Connection
from tulle.shared_memory.one_way import _LARGE_BYTES, _SLOTS

SIZES = [0, 1, 768, CARRIED_BYTES, CARRIED_BYTES + 1, 70_001, 1 << 20, 3_000_000, _LARGE_BYTES, _LARGE_BYTES + 1]
MANY = 400
"""More small messages than a socket has room for."""


@pytest.fixture
def ends():
    """A sender, and a receiver of what it sends."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sender, receiver = Sender(Connection(1, here, 1.0), 1.0), Receiver(Connection(0, there, 5.0))
    yield sender, receiver
    sender.close()
    receiver.close()


def numbers(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def send(sender: Sender, message: torch.Tensor) -> None:
    sender.send(len(message), lambda memory: memory.copy_(message))


def test_messages_of_any_size_come_in_order_and_are_the_receiver_s_own(ends):
    sender, receiver = ends
    sent = [numbers(size, turn) for turn in range(3) for size in (*SIZES, *reversed(SIZES))]
    came = []
    for message in sent:
        send(sender, message)
        came.append(receiver.receive())
    assert all(torch.equal(one, other) for one, other in zip(sent, came, strict=True))
    for one in came:
        one.zero_()
    send(sender, numbers(70_001, 9))
    assert torch.equal(receiver.receive(), numbers(70_001, 9))


@pytest.mark.parametrize("size", [100, 20_000], ids=["small", "in memory"])
def test_a_sender_waits_for_nobody_and_what_it_kept_comes_in_order(ends, size):
    sender, receiver = ends
    for turn in range(MANY):
        send(sender, numbers(size, turn))
    assert sender._thread is not None
    assert sender.waiting > MANY // 4
    assert len(sender._slots) <= _SLOTS
    for turn in range(MANY):
        assert torch.equal(receiver.receive(), numbers(size, turn))
    sender.settle()
    sender.flush(but=0)
    assert sender.waiting == 0
    send(sender, numbers(size))  # by itself again
    assert sender._thread is None
    assert torch.equal(receiver.receive(), numbers(size))


def test_a_flush_waits_until_the_other_has_read(ends):
    sender, receiver = ends
    for _ in range(5):
        send(sender, numbers(50_000))
    began_s = time.monotonic()
    reader = threading.Thread(target=lambda: [time.sleep(0.2), [receiver.receive() for _ in range(3)]])
    reader.start()
    sender.flush(but=2)
    assert time.monotonic() - began_s > 0.15
    assert sender.waiting == 2
    reader.join()
    with pytest.raises(RuntimeError, match=r"Timed out after 1 s, waiting for rank 1"):
        sender.flush(but=1)


def test_a_steady_sender_makes_memory_once_and_opens_no_descriptors(ends):
    sender, receiver = ends

    def step() -> None:
        for size in (20_000, 900_000, _LARGE_BYTES + 1):
            send(sender, numbers(size))
            receiver.receive()
        sender.flush(but=0)

    step()
    made, opened = list(sender._slots.values()), len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        step()
    assert list(sender._slots.values()) == made
    assert len(os.listdir("/proc/self/fd")) == opened


def test_what_was_sent_can_be_read_when_the_sender_has_gone(ends):
    sender, receiver = ends
    for size in SIZES[:-3]:
        send(sender, numbers(size))
    sender.close()
    for size in SIZES[:-3]:
        assert torch.equal(receiver.receive(), numbers(size))
    with pytest.raises(RuntimeError, match="Connection closed by peer: rank 0 has ended"):
        receiver.receive()


@pytest.mark.parametrize("size", [100, 20_000], ids=["small", "in memory"])
def test_a_receiver_that_goes_is_noticed(ends, size):
    sender, receiver = ends
    for _ in range(MANY):
        send(sender, numbers(size))
    receiver.close()
    sender.settle()
    assert sender._thread is None
    with pytest.raises(RuntimeError, match="Connection closed by peer: rank 1 has ended"):
        send(sender, numbers(size))


def test_a_reader_that_waits_is_woken_by_the_end(ends):
    sender, receiver = ends
    told = []

    def read() -> None:
        try:
            receiver.receive()
        except RuntimeError as error:
            told.append(str(error))

    reader = threading.Thread(target=read)
    reader.start()
    time.sleep(0.1)
    sender.close()
    reader.join(2.0)
    assert "rank 0 has ended" in told[0]
