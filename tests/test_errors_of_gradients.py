"""Gradients and rows that cannot be summed raise the same clear error on every rank."""

import math

import pytest
import torch
from torch import Tensor, nn

import tulle
from models import Words, batches, build
from raised_alike import every_rank_raises, last, sgd
from ranks import on_ranks
from tulle.errors import GradientError


@on_ranks(1, 2)
def test_indices_out_of_range():
    tulle.init(data=-1)
    with every_rank_raises(GradientError, "given row 9, expected rows in 0..5 (num_rows is 6)"):
        tulle.RowSparse(torch.tensor([0, 9]), torch.ones(2, 3), num_rows=6)


@on_ranks(3)
@pytest.mark.parametrize(
    ("first", "other", "text"),
    [
        (
            torch.ones(4, 2),
            torch.ones(4, 3),
            "float32 [4, 3] on rank {last} of axis 'data' and float32 [4, 2] on rank 0",
        ),
        (torch.ones(4), torch.ones(4, 1), "float32 [4, 1] on rank {last} of axis 'data' and float32 [4] on rank 0"),
        (
            torch.ones(4, 2),
            torch.ones(4, 2).double(),
            "float64 [4, 2] on rank {last} of axis 'data' and float32 [4, 2]",
        ),
    ],
    ids=["shape", "dimensions", "dtype"],
)
def test_gradients_of_different_shape_or_dtype(first, other, text):
    axis = tulle.init(data=-1)["data"]
    grad = other if axis.rank == last() else first
    whole = f"tulle.sync.all_reduce was given {text.format(last=last())}"
    with every_rank_raises(GradientError, whole):
        tulle.sync.all_reduce(grad, axis)


@on_ranks(2)
def test_rows_of_tables_of_different_size():
    axis = tulle.init(data=-1)["data"]
    rows = tulle.RowSparse(torch.tensor([0]), torch.ones(1, 2), num_rows=4 + axis.rank)
    with every_rank_raises(GradientError, "given float32 [5, 2] on rank 1 of axis 'data' and float32 [4, 2] on rank 0"):
        tulle.sync.all_reduce(rows, axis)


@on_ranks(1, 3)
@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (
            torch.sparse_coo_tensor(torch.zeros(0, 1), torch.ones(1, 3), (3,), check_invariants=True),
            "given a torch.sparse_coo tensor without a sparse dimension, expected a dense one or sparse COO",
        ),
        (torch.ones(3, dtype=torch.int64), "given torch.int64 of 1 dimensions, expected one of torch.float32, "),
        (
            torch.sparse_coo_tensor(torch.tensor([[0], [7]]), torch.ones(1), (3, 3), check_invariants=False),
            "given a sparse tensor with an index out of range: size is inconsistent with indices: for dim 1",
        ),
        ([1.0, 2.0], "given a list, expected a RowSparse, a sparse COO tensor or a dense tensor"),
    ],
    ids=["nothing sparse", "integers", "out of range", "list"],
)
def test_a_gradient_of_another_kind_on_one_rank_only(wrong, text):
    axis = tulle.init(data=-1)["data"]
    grad = wrong if axis.rank == last() else torch.eye(3)
    with every_rank_raises(GradientError, text, found_by=last()):
        tulle.sync.all_reduce(grad, axis)


@on_ranks(3)
def test_a_gradient_on_another_device_than_the_axis_on_one_rank_only():
    axis = tulle.init(data=-1)["data"]
    rows = tulle.RowSparse(torch.tensor([1]), torch.ones(1, 3), num_rows=3)
    elsewhere = tulle.RowSparse.trusted(rows.indices.to("meta"), rows.values.to("meta"), 3)
    for good, wrong in ((rows, elsewhere), (torch.eye(3), torch.eye(3, device="meta"))):
        text = "given a gradient on device meta, but axis 'data' reduces on cpu: move it there, with tensor.to('cpu')"
        with every_rank_raises(GradientError, text, found_by=last()):
            tulle.sync.all_reduce(wrong if axis.rank == last() else good, axis)


@on_ranks(2)
def test_rows_of_a_dtype_that_is_not_reduced_on_one_rank_only():
    axis = tulle.init(data=-1)["data"]
    dtype = torch.float8_e4m3fn if axis.rank == last() else torch.float32
    rows = tulle.RowSparse(torch.tensor([1, 1]), torch.ones(2, 3).to(dtype), num_rows=3)
    with every_rank_raises(GradientError, "given torch.float8_e4m3fn of 2 dimensions, expected", found_by=last()):
        tulle.sync.all_reduce(rows, axis)


def spoil(value: float):
    def hook(gradient: Tensor) -> Tensor:
        values = gradient._values() if gradient.is_sparse else gradient
        values.view(-1)[0] = value
        return gradient

    return hook


@on_ranks(1, 2, 3)
@pytest.mark.parametrize(
    ("name", "value", "found"),
    [("words.weight", math.nan, "1 NaN and 0 infinite"), ("hidden.bias", -math.inf, "0 NaN and 1 infinite")],
)
def test_a_gradient_that_is_not_finite_is_named_with_rank_and_step(name, value, found):
    mesh = tulle.init(data=-1)
    model = build(Words, 0)
    model, optimizer = tulle.distribute(model, sgd(model), mesh, check_finite=True)
    first, second = (ids.chunk(mesh.size)[mesh.rank] for ids in batches(2, 4 * mesh.size))
    model(first).backward()
    optimizer.step()
    optimizer.zero_grad()
    if mesh.rank == last():
        model.get_parameter(name).register_hook(spoil(value))
    loss = model(second)
    with every_rank_raises(GradientError, f"the gradient of {name!r} has {found} of "):
        loss.backward()


@on_ranks(1, 2)
def test_the_rank_and_the_step_of_a_nan_are_in_the_text():
    mesh = tulle.init(data=-1)
    model = nn.Linear(2, 1)
    model, optimizer = tulle.distribute(model, sgd(model), mesh, check_finite=True)
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.zero_grad()
    batch = torch.full((1, 2), math.nan if mesh.rank == last() else 1.0)
    loss = model(batch).sum()
    text = (
        f"the gradient of 'weight' has 2 NaN and 0 infinite of 2 values on rank {last()} of axis 'data' in step 3, "
        "expected finite numbers: lower the learning rate, clip with tulle.clip_grad_norm_, or look at that rank's"
    )
    with every_rank_raises(GradientError, text):
        loss.backward()


@on_ranks(1, 2)
def test_unless_asked_for_gradients_are_not_looked_at():
    mesh = tulle.init(data=-1)
    model = nn.Linear(2, 1)
    model, _ = tulle.distribute(model, sgd(model), mesh)
    model(torch.full((1, 2), math.nan)).sum().backward()
    assert model.weight.grad.isnan().all()


@on_ranks(1, 2)
def test_after_a_gradient_that_was_not_finite_training_can_go_on():
    mesh = tulle.init(data=-1)
    model = nn.Linear(2, 1)
    model, optimizer = tulle.distribute(model, sgd(model), mesh, check_finite=True)
    for step in range(4):
        loss = model(torch.full((1, 2), math.nan if step == 2 and mesh.rank == 0 else 1.0)).sum()
        if step == 2:
            with pytest.raises(GradientError):
                loss.backward()
        else:
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()
    assert all(p.isfinite().all() for p in model.parameters())


@on_ranks(1, 2)
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_a_row_that_the_table_has_not_is_named(kind):
    mesh = tulle.init(data=-1)
    model = nn.Sequential(kind(10, 2, sparse=True), nn.Linear(2, 1))
    model, _ = tulle.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), mesh)
    model(torch.tensor([[1, 9]])).sum().backward()
    with pytest.raises((IndexError, RuntimeError)) as failure:
        model(torch.tensor([[1, 12]]))
    assert failure.value.__notes__ == [
        f"tulle: the table '0' was asked for row 12 on rank {mesh.rank}, expected rows 0..9: "
        "check the vocabulary that made the ids, or make the table larger"
    ]
