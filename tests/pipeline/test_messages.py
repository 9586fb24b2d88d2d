"""What a message says is what comes out of it: any tensor that stages pass on, in the order of its memory."""

from types import SimpleNamespace

import pytest
import torch

from tulle.pipeline import messages
from tulle.pipeline.messages import HEADER_BYTES, Kind, Message, OnHost, decode, decode_header, is_dense
from tulle.pipeline.outcome import described
from tulle.pipeline.placeholder import Placeholder

CPU = torch.device("cpu")


def passed_on(content, key=(Kind.VALUE, 7, 1)):
    message = Message(key, content).bytes()
    header = decode_header(message)
    assert header.key == key
    assert header.message_bytes == message.numel()
    return decode(header, message[HEADER_BYTES:], CPU)


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int8, torch.uint16, torch.bool],
    ids=str,
)
def test_a_tensor_comes_out_bit_for_bit(dtype):
    tensor = torch.arange(6).reshape(2, 3).to(dtype)
    found = passed_on(tensor)
    assert found.dtype == dtype
    assert found.view(torch.uint8).equal(tensor.view(torch.uint8))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5),
        torch.empty(0, 4),
        torch.ones(1, 1, 1),
        torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
        torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.randn((1,) * 40),
    ],
    ids=["no dimensions", "no elements", "ones", "permuted", "channels last", "40 dimensions"],
)
def test_dimensions_keep_their_order_in_memory(tensor):
    assert is_dense(tensor)
    found = passed_on(tensor)
    assert found.equal(tensor)
    assert found.stride() == tensor.stride()


@pytest.mark.parametrize(
    "tensor",
    [torch.arange(10.0)[::2], torch.arange(3.0).expand(4, 3), torch.arange(12.0).reshape(3, 4)[:, 1:]],
    ids=["strided", "expanded", "columns"],
)
def test_gaps_and_repeats_in_memory_do_not_travel(tensor):
    assert not is_dense(tensor)
    message = Message((Kind.VALUE, 1, 1), tensor).bytes()
    assert message.numel() == HEADER_BYTES + tensor.numel() * 4
    assert passed_on(tensor).equal(tensor)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.bool], ids=str)
def test_an_announcement_says_what_room_the_numbers_need(dtype):
    tensor = torch.arange(24).reshape(2, 3, 4).permute(2, 0, 1).to(dtype)
    message = Message((Kind.VALUE, 7, 1), tensor)
    announced = message.announcement(3).bytes()
    assert announced.numel() == HEADER_BYTES
    header = decode_header(announced)
    assert header.message_bytes == HEADER_BYTES
    assert decode(header, announced[HEADER_BYTES:], CPU) is header
    assert header.apart_before == 3
    empty, raw = header.room(CPU)
    assert not empty._is_view()  # it may be written in place, whatever made it
    raw.copy_(message.bytes()[HEADER_BYTES:])
    assert empty.equal(tensor)
    assert empty.stride() == tensor.stride()


def test_what_is_on_the_cpu_stays_there():
    lengths = torch.tensor([3, 1])  # as pack_padded_sequence wants them, on a mesh of GPUs too
    message = Message((Kind.VALUE, 1, 1), lengths).bytes()
    found = decode(decode_header(message), message[HEADER_BYTES:], torch.device("meta"))
    assert found.is_cpu
    assert found.equal(lengths)


@pytest.mark.parametrize("tensor", [torch.ones(2, 3), torch.eye(3).to_sparse()], ids=["strided", "sparse"])
def test_what_is_for_a_gpu_comes_there_by_who_takes_it(tensor, monkeypatch):
    """For the stream of that one reads it: a thread that listens has another."""
    monkeypatch.setattr(messages._Pickler, "is_for_device", True)
    message = Message((Kind.VALUE, 1, 1), tensor).bytes()
    header = decode_header(message)
    header.holds &= ~messages._OF_HOST if header.holds >= 0 else -1
    found = decode(header, message[HEADER_BYTES:], torch.device("meta"))
    assert isinstance(found, OnHost)
    taken = found.taken()
    assert taken.shape == tensor.shape
    assert taken.layout == tensor.layout


def test_what_is_within_an_object_is_for_the_gpu_of_who_reads_it(monkeypatch):
    """Torch's own pickles name the writer's."""
    away = {"mean": torch.ones(2), "lengths": [3, 1]}
    monkeypatch.setattr(messages._Pickler, "persistent_id", lambda self, obj: _noted(self, obj))
    message = Message((Kind.OUTCOME, 1, 1), away).bytes()
    found = decode(decode_header(message), message[HEADER_BYTES:], torch.device("meta"))
    assert isinstance(found, OnHost)
    taken = found.taken()
    assert taken["mean"].is_meta
    assert taken["lengths"] == [3, 1]


def _noted(pickler, obj):
    """As of a GPU's tensor."""
    if not isinstance(obj, torch.Tensor) or pickler.is_for_device:
        return None
    pickler.is_for_device = True
    return obj


def test_a_placeholder_is_on_the_device_of_what_it_stands_for():
    meta = torch.device("meta")  # stands for the GPU of the rank, which may be of another number than the owner's
    for tensor, device in ((torch.ones(2), "cpu"), (torch.ones(2, device=meta), "meta")):
        made = Placeholder(described(tensor), 0, SimpleNamespace(graph=None), meta)
        assert made.device.type == device


def test_conjugates_and_negatives_travel_as_numbers():
    tensor = torch.tensor([1 + 2j, 3 - 4j])
    assert passed_on(tensor.conj()).equal(torch.tensor([1 - 2j, 3 + 4j]))
    assert passed_on(tensor.conj().imag).equal(torch.tensor([-2.0, 4.0]))


def test_a_message_is_a_copy_without_a_graph():
    tensor = torch.ones(3, requires_grad=True) * 2
    message = Message((Kind.GRADIENT, 1, 1), tensor).bytes()
    with torch.no_grad():
        tensor.mul_(5)
    found = decode(decode_header(message), message[HEADER_BYTES:], CPU)
    assert found.tolist() == [2.0, 2.0, 2.0]
    assert not found.requires_grad


@pytest.mark.parametrize("content", [None, 5, "an error", {"shape": (2, 3)}, (torch.float32, [None])], ids=repr)
def test_what_is_no_tensor_travels_too(content):
    assert passed_on(content) == content


@pytest.mark.parametrize("key", [(Kind.VALUE, -3, 2), (Kind.OUTCOME, 0, 2**56 - 1), (Kind.GRADIENT, 9, 5 << 32 | 7)])
def test_keys_have_room_for_all_their_numbers(key):
    assert passed_on(torch.ones(2), key).equal(torch.ones(2))


def test_sparse_tensors_come_out_sparse():
    for tensor in (torch.eye(3).to_sparse(), torch.sparse_coo_tensor([[1, 1]], torch.ones(2, 4), (5, 4))):
        found = passed_on(tensor)
        assert found.is_sparse
        assert found.to_dense().equal(tensor.to_dense())
