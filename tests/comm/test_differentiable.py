"""Collectives with gradients: values, gradients and gradients of gradients equal one process's; bytes are counted."""

import pytest
import torch

import tulle
from ranks import on_ranks
from tulle import comm
from tulle.comm import traffic
from tulle.errors import ModelError


def full(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def matmul_split_inside(x, a, b, axis, *, enter=comm.enter, leave=comm.leave):
    """`tanh(x a) b` with the columns of a and the rows of b split: Megatron's feed-forward layer."""
    x = enter(x, axis, label="x")
    return leave(torch.tanh(x @ a) @ b, axis, label="y")


@on_ranks(1, 2, 3, 4)
def test_enter_and_leave_make_a_split_layer_equal_one_process():
    axis = tulle.init(data=-1)["data"]
    n = axis.size
    x, a, b, weight = full(5, 3), full(3, 4 * n, seed=1), full(4 * n, 2, seed=2), full(5, 2, seed=3)
    inputs = [t.clone().requires_grad_() for t in (x, a, b)]
    expected = torch.autograd.grad((torch.tanh(inputs[0] @ inputs[1]) @ inputs[2] * weight).sum(), inputs)

    own = [x, a.chunk(n, 1)[axis.rank], b.chunk(n, 0)[axis.rank]]
    own = [t.clone().requires_grad_() for t in own]
    y = matmul_split_inside(*own, axis)
    close(y, torch.tanh(x @ a) @ b)
    got = torch.autograd.grad((y * weight).sum(), own)
    close(got[0], expected[0])
    close(got[1], expected[1].chunk(n, 1)[axis.rank])
    close(got[2], expected[2].chunk(n, 0)[axis.rank])


@on_ranks(2)
@pytest.mark.parametrize("dropped", ["enter", "leave"])
def test_without_enter_or_leave_the_split_layer_is_wrong(dropped):
    axis = tulle.init(data=-1)["data"]
    x = full(5, 3).requires_grad_()
    a, b = full(3, 8, seed=1), full(8, 2, seed=2)
    expected = torch.autograd.grad((torch.tanh(x @ a) @ b).square().sum(), x)[0]
    y = matmul_split_inside(
        x, a.chunk(2, 1)[axis.rank], b.chunk(2, 0)[axis.rank], axis, **{dropped: lambda t, axis, label: t}
    )
    got = torch.autograd.grad(y.square().sum(), x)[0]
    assert (got - expected).norm() / expected.norm() > 1e-2


@on_ranks(1, 2, 4)
def test_gradients_of_gradients_come_out_too():
    axis = tulle.init(data=-1)["data"]
    n = axis.size
    x, a, b = full(5, 3).requires_grad_(), full(3, 2 * n, seed=1), full(2 * n, 2, seed=2)

    def second(y):
        first = torch.autograd.grad(y.square().sum(), x, create_graph=True)[0]
        return torch.autograd.grad(first.square().sum(), x)[0]

    split = matmul_split_inside(x, a.chunk(n, 1)[axis.rank], b.chunk(n, 0)[axis.rank], axis)
    close(second(split), second(torch.tanh(x @ a) @ b))


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_gather_and_scatter_undo_each_other(dim):
    axis = tulle.init(data=-1)["data"]
    whole, weight = full(12, 12, 12), full(12, 12, 12, seed=1)
    part = whole.chunk(axis.size, dim)[axis.rank].clone().requires_grad_()
    gathered = comm.gather(part, axis, dim=dim, label="here")
    close(gathered, whole)
    (gathered.square() * weight).sum().backward()
    close(part.grad, (2 * whole * weight).chunk(axis.size, dim)[axis.rank])

    again = whole.clone().requires_grad_()
    scattered = comm.scatter(again, axis, dim=dim, label="here")
    assert torch.equal(scattered, whole.chunk(axis.size, dim)[axis.rank])
    (scattered.square() * weight.chunk(axis.size, dim)[axis.rank]).sum().backward()
    close(again.grad, 2 * whole * weight)

    entry = whole.narrow(dim, axis.rank, 1).contiguous()
    assert comm.gather(entry, axis, dim=dim, label="here").is_contiguous(), "models take views of it"


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("dim", [0, 1])
def test_gather_with_reduce_scatter_is_enter_and_gather_in_one(dim):
    axis = tulle.init(data=-1)["data"]
    whole = full(12, 12)
    weights = [full(12, 12, seed=rank) for rank in range(axis.size)]
    part = whole.chunk(axis.size, dim)[axis.rank].clone().requires_grad_()
    gathered = comm.gather(part, axis, dim=dim, label="here", backward="reduce_scatter")
    (gathered * weights[axis.rank]).sum().backward()
    close(part.grad, sum(weights).chunk(axis.size, dim)[axis.rank])


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("dim", [0, -1])
def test_reduce_scatter_sums_and_splits(dim):
    axis = tulle.init(data=-1)["data"]
    terms = [full(12, 24, seed=rank) for rank in range(axis.size)]
    own = terms[axis.rank].clone().requires_grad_()
    part = comm.reduce_scatter(own, axis, dim=dim, label="here")
    close(part, sum(terms).chunk(axis.size, dim)[axis.rank])
    part.square().sum().backward()
    close(own.grad, 2 * sum(terms))


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize(("split", "join"), [(0, 1), (1, 0), (2, 0), (1, -1)])
def test_exchange_splits_one_dimension_and_joins_another(split, join):
    axis = tulle.init(data=-1)["data"]
    whole, weight = full(12, 24, 12), full(12, 24, 12, seed=1)
    own = whole.chunk(axis.size, join)[axis.rank].clone().requires_grad_()
    exchanged = comm.exchange(own, axis, split_dim=split, join_dim=join, label="here")
    close(exchanged, whole.chunk(axis.size, split)[axis.rank])
    (exchanged.square() * weight.chunk(axis.size, split)[axis.rank]).sum().backward()
    close(own.grad, (2 * whole * weight).chunk(axis.size, join)[axis.rank])


@on_ranks(1, 2, 4)
@pytest.mark.parametrize(("before", "after"), [(1, 2), (0, 1), (5, 0), (7, 7), (0, 0)])
@pytest.mark.parametrize("dim", [0, -1])
def test_a_halo_is_what_borders_on_a_part_and_zeros_beyond_the_ends(before, after, dim):
    axis = tulle.init(data=-1)["data"]
    n = 12 // axis.size

    def windows(whole):
        padded = torch.nn.functional.pad(whole.movedim(dim, -1), (before, after)).movedim(-1, dim)
        return [padded.narrow(dim, rank * n, before + n + after) for rank in range(axis.size)]

    whole = full(12, 12).requires_grad_()
    expected = windows(whole)
    weights = [full(*window.shape, seed=rank) for rank, window in enumerate(expected)]
    loss = sum((window.square() * weight).sum() for window, weight in zip(expected, weights, strict=True))
    (first,) = torch.autograd.grad(loss, whole, create_graph=True)
    first.square().sum().backward()
    part = whole.detach().chunk(axis.size, dim)[axis.rank].clone().requires_grad_()
    window = comm.halo(part, axis, dim=dim, before=before, after=after, label="here")
    close(window, expected[axis.rank])
    (own,) = torch.autograd.grad((window.square() * weights[axis.rank]).sum(), part, create_graph=True)
    close(own, first.chunk(axis.size, dim)[axis.rank])
    own.square().sum().backward()
    close(part.grad, whole.grad.chunk(axis.size, dim)[axis.rank])


@on_ranks(1)
def test_alone_a_rank_gets_its_own_tensor_back():
    axis = tulle.init(data=-1)["data"]
    x = full(2, 2).requires_grad_()
    for done in (
        comm.enter(x, axis, label="here"),
        comm.leave(x, axis, label="here"),
        comm.gather(x, axis, dim=0, label="here"),
        comm.scatter(x, axis, dim=0, label="here"),
        comm.reduce_scatter(x, axis, dim=0, label="here"),
        comm.exchange(x, axis, split_dim=0, join_dim=1, label="here"),
    ):
        assert done is x


@on_ranks(2, 4)
def test_every_byte_is_counted_forward_and_backward():
    axis = tulle.init(data=-1)["data"]
    n = axis.size
    x = full(4, 8).requires_grad_()  # 256 bytes
    calls = {
        "enter": (lambda: comm.enter(x, axis, label="here"), 0, 2 * (n - 1) * 256 // n),
        "leave": (lambda: comm.leave(x, axis, label="here"), 2 * (n - 1) * 256 // n, 0),
        "gather": (lambda: comm.gather(x, axis, dim=1, label="here"), (n - 1) * 256, 0),
        "scatter": (lambda: comm.scatter(x, axis, dim=1, label="here"), 0, (n - 1) * 256 // n),
        "reduce": (
            lambda: comm.reduce_scatter(x, axis, dim=1, label="here"),
            (n - 1) * 256 // n,
            (n - 1) * 256 // n,
        ),
        "exchange": (
            lambda: comm.exchange(x, axis, split_dim=1, join_dim=0, label="here"),
            (n - 1) * 256 // n,
            (n - 1) * 256 // n,
        ),
    }
    for name, (call, forward_bytes, backward_bytes) in calls.items():
        traffic.take_labels()
        y = call()
        sent = traffic.take_labels()
        assert (sent["here"].bytes_sent if sent else 0) == forward_bytes, name
        y.sum().backward()
        sent = traffic.take_labels()
        assert (sent["here"].bytes_sent if sent else 0) == backward_bytes, name


@on_ranks(2)
def test_leave_does_not_modify_its_input_and_enter_sends_nothing_without_a_gradient():
    axis = tulle.init(data=-1)["data"]
    x = full(3, 4)
    kept = x.clone()
    comm.leave(x, axis, label="here")
    assert torch.equal(x, kept)
    assert comm.enter(x, axis, label="here") is x


@on_ranks(2, 3)
@pytest.mark.parametrize("name", ["scatter", "reduce_scatter", "exchange"])
def test_what_does_not_divide_is_refused_before_anything_is_sent(name):
    axis = tulle.init(data=-1)["data"]
    dims = {"split_dim": 1, "join_dim": 0} if name == "exchange" else {"dim": -1}
    with pytest.raises(ModelError, match=rf"{name} of here .*\(6, 5\), whose dimension 1 .* {axis.size} ranks"):
        getattr(comm, name)(full(6, 5), axis, label="here", **dims)


@on_ranks(2)
@pytest.mark.parametrize("transform", [torch.vmap, torch.func.jacrev])
def test_transforms_of_functions_are_refused_before_anything_is_sent(transform):
    axis = tulle.init(data=-1)["data"]
    before = traffic.total.messages
    with pytest.raises(ModelError, match=r"torch.func.*met here, which is split over axis 'data'"):
        transform(lambda x: comm.leave(x * 2, axis, label="here"))(full(3, 2))
    assert traffic.total.messages == before
