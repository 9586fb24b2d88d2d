"""Buckets: what travels together, and that a gradient becomes a view of the buffer."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import tulle
from ranks import on_ranks
from tulle.comm import traffic
from tulle.engine.buckets import FIRST_BUCKET_BYTES, Bucket, lay_out
from tulle.engine.buffers import Buffers
from tulle.engine.slots import Slot
from tulle.errors import GradientError


def slots(*parameters: torch.Tensor) -> list[Slot]:
    return [Slot(f"p{number}", nn.Parameter(parameter)) for number, parameter in enumerate(parameters)]


def test_the_first_bucket_is_small_and_the_order_is_kept():
    many = slots(*[torch.empty(FIRST_BUCKET_BYTES // 4 // 2) for _ in range(10)])
    laid_out = list(lay_out(many, bucket_bytes=2 * FIRST_BUCKET_BYTES))
    assert [len(bucket) for bucket in laid_out] == [2, 4, 4]
    assert [slot for bucket in laid_out for slot in bucket] == many


def test_a_bucket_has_one_dtype():
    mixed = slots(torch.empty(3), torch.empty(3, dtype=torch.float64), torch.empty(3))
    assert [[slot.name for slot in bucket] for bucket in lay_out(mixed, 10**6)] == [["p0", "p2"], ["p1"]]


@on_ranks(2)
def test_a_reduced_gradient_is_a_view_with_the_strides_of_its_parameter():
    axis = tulle.init(data=-1)["data"]
    picture = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    both = slots(picture, torch.randn(7))
    bucket = Bucket(both, axis)
    for slot in both:
        slot.parameter.grad = torch.full_like(slot.parameter, float(axis.rank))
        slot.is_fired = True
    for position in range(2):
        bucket.arrive(position)
    assert bucket.missing == 0
    bucket.start()
    bucket.finish()
    for slot in both:
        assert slot.parameter.grad is not None
        assert slot.parameter.grad.stride() == slot.parameter.stride()
        assert torch.equal(slot.parameter.grad, torch.full_like(slot.parameter, 0.5))
    first, second = (slot.parameter.grad for slot in both)
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


class Calls(TorchDispatchMode):
    """Counts operations."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


@on_ranks(2)
@pytest.mark.parametrize("is_kept", [False, True], ids=["new gradients", "gradients that are views already"])
def test_small_gradients_are_taken_in_by_few_calls_in_whatever_order_they_come(is_kept):
    axis = tulle.init(data=-1)["data"]
    some = slots(*[torch.zeros(number % 7, 3) for number in range(60)], torch.zeros(50_000))
    bucket = Bucket(some, axis)
    for step in range(2):
        for number, slot in enumerate(some):
            if slot.parameter.grad is None or not is_kept:
                slot.parameter.grad = torch.zeros_like(slot.parameter)
            slot.parameter.grad.fill_(number + axis.rank + step)
            slot.is_fired = True
        with Calls() as calls:
            for position in [*range(30), *reversed(range(30, 60)), 60]:
                bucket.arrive(position)
        assert calls.number < 10
        bucket.start()
        bucket.finish()
        for number, slot in enumerate(some):
            assert torch.equal(slot.parameter.grad, torch.full_like(slot.parameter, number + 0.5 + step))


@on_ranks(3)
def test_flags_tell_a_gradient_of_one_rank_from_that_of_none():
    axis = tulle.init(data=-1)["data"]
    both = slots(torch.zeros(2), torch.zeros(2))
    model = nn.BatchNorm1d(1)
    model.register_buffer("constant", torch.ones(3))
    bucket = Bucket(both, axis, Buffers(model, axis))
    if axis.rank == 1:
        both[0].parameter.grad = torch.full((2,), 3.0)
        both[0].is_fired = True
    if axis.rank == 2:
        model.running_mean.fill_(5.0)
    before = traffic.total.messages
    bucket.start()
    bucket.finish()
    assert model.running_mean.item() == 0.0, "rank 0 had not written it, and its value is everybody's"
    sent = traffic.total.messages - before
    assert sent == 2 * (axis.size - 1) + (axis.size - 1 if axis.rank == 0 else 0), "one buffer travels, not all"
    assert both[0].parameter.grad is not None
    assert both[0].parameter.grad.tolist() == [1.0, 1.0]
    assert both[1].parameter.grad is None


@on_ranks(2)
def test_a_gradient_that_comes_twice_in_a_backward_is_an_error():
    axis = tulle.init(data=-1)["data"]
    [slot] = slots(torch.zeros(2))
    bucket = Bucket([slot], axis)
    slot.parameter.grad = torch.ones(2)
    bucket.arrive(0)
    with pytest.raises(GradientError, match="'p0' came twice before the end of a backward"):
        bucket.arrive(0)
    bucket.start()
    bucket.finish()
    slot.parameter.grad = torch.ones(2)
    bucket.arrive(0)


KEEPS = {"gradients": lambda gradient: gradient, "what lies in them": lambda gradient: gradient.data.view(-1)}


@on_ranks(2)
@pytest.mark.parametrize("keep", KEEPS)
def test_gradients_that_somebody_keeps_stay_as_they_are(keep):
    axis = tulle.init(data=-1)["data"]
    both = slots(torch.zeros(2), torch.zeros(3, 1))
    bucket = Bucket(both, axis)
    kept: list[torch.Tensor] = []
    places = set()
    for step in range(6):
        for position, slot in enumerate(both):
            slot.parameter.grad = torch.full_like(slot.parameter, step + axis.rank)
            bucket.arrive(position)
        bucket.start()
        bucket.finish()
        if step < 3:
            kept += [KEEPS[keep](slot.parameter.grad) for slot in both]
        else:  # nobody looks: the same memory serves
            places.add(both[0].parameter.grad.data_ptr())
        for slot in both:
            slot.parameter.grad = None
    assert [one.unique().tolist() for one in kept] == [[step + 0.5] for step in range(3) for _ in both]
    assert len(places) == 1


class Grows(nn.Module):
    """A cache that grows with the batches of a rank, beside a constant that is stored sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.zeros(2))
        self.register_buffer("graph", torch.eye(3).to_sparse())
        self.register_buffer("seen", torch.zeros(()))


@on_ranks(2)
def test_of_a_buffer_that_grows_differently_each_rank_keeps_its_own():
    axis = tulle.init(data=-1)["data"]
    model = Grows()
    bucket = Bucket([], axis, Buffers(model, axis))
    for length in (4, 7):
        model.angles = torch.full((length + axis.rank,), float(axis.rank))
        model.seen += 1 + axis.rank
        bucket.start()
        bucket.finish()
        assert model.angles.tolist() == [axis.rank] * (length + axis.rank)
    assert model.seen.item() == 2.0, "others follow rank 0"
    model.graph = model.graph * (1 + axis.rank)
    bucket.start()
    bucket.finish()
    assert torch.equal(model.graph.to_dense(), torch.eye(3))
