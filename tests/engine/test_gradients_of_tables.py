"""Gradients of tables: which scheme sends them, what makes a parameter a table, and what of it is sent."""

import logging

import torch
from plain_training import dummy, train
from torch import Tensor, nn

import models
import tulle
from models import batches, build, worst_difference
from ranks import on_ranks
from tulle.comm import traffic
from tulle.engine import engine_of
from tulle.sync.schemes import ALIKE


@on_ranks(2)
def test_the_scheme_of_a_table_follows_its_density():
    mesh = tulle.init(data=-1)
    model = nn.Embedding(2000, 64, sparse=True)
    model, _ = tulle.distribute(model, dummy(model), mesh)
    engine = engine_of(model)
    model(torch.tensor([1])).sum().backward()
    choice = engine.ledger.choices["weight"]
    predicted = {name: cost.seconds for name, cost in choice.candidates}
    assert engine.schemes()["weight"] == (choice.scheme, 1)
    assert choice.scheme != "densify"
    assert predicted[choice.scheme] <= ALIKE * min(predicted.values())
    # Costs are by measured network; on this one latency may rule: force the question by density alone.
    few = choice.density
    for _ in range(30):
        model.zero_grad()
        model(torch.arange(2000)).sum().backward()
    assert engine.ledger.choices["weight"].density > 100 * few


@on_ranks(2)
def test_accumulation_keeps_one_row_for_each_number():
    mesh = tulle.init(data=-1)
    model = nn.Embedding(10, 2, sparse=True)
    model, _ = tulle.distribute(model, dummy(model), mesh)
    with model.no_sync():
        for _ in range(5):
            model(torch.tensor([3, 3, 4])).sum().backward()
    assert model.weight.grad._nnz() == 2
    model(torch.tensor([3])).sum().backward()
    assert model.weight.grad.to_dense()[3].tolist() == [11.0, 11.0]


@on_ranks(2)
def test_a_table_of_which_no_rank_looked_up_a_row_leaves_the_gradients_of_its_neighbours_alone():
    mesh = tulle.init(data=-1)
    model = nn.ModuleList(nn.Embedding(10, 2, sparse=True) for _ in range(3))
    tulle.distribute(model, dummy(model), mesh)
    first, between, last = model
    for ids in ([], [5, 6]):  # gradients add up
        others = first(torch.tensor([1, 2])).sum() + last(torch.tensor([3, 4])).sum()
        (3 * between(torch.tensor(ids, dtype=torch.long)).sum() + others).backward()
    found = [table.weight.grad.to_dense()[:, 0].tolist() for table in model]
    assert found == [[0, 2, 2, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 3, 3, 0, 0, 0], [0, 0, 0, 2, 2, 0, 0, 0, 0, 0]]


@on_ranks(2)
def test_a_parameter_that_turns_out_to_get_sparse_gradients_becomes_a_table():
    mesh = tulle.init(data=-1)

    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Parameter(torch.ones(50, 2))

        def forward(self, ids: Tensor) -> Tensor:
            return nn.functional.embedding(ids, self.rows, sparse=True).sum()

    model = Functional()
    model, _ = tulle.distribute(model, dummy(model), mesh, plan="allgather")
    model(torch.tensor([mesh.rank])).backward()
    assert list(engine_of(model).schemes()) == ["rows"]
    assert model.rows.grad.coalesce().indices()[0].tolist() == [0, 1]


@on_ranks(2)
def test_the_reason_of_a_choice_is_logged_by_rank_0():
    mesh = tulle.init(data=-1)
    model = nn.Embedding(500, 8, sparse=True)
    model, _ = tulle.distribute(model, dummy(model), mesh)
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logger = logging.getLogger("tulle")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        model(torch.tensor([1, 2])).sum().backward()
    finally:
        logger.removeHandler(handler)
    assert len(records) == (1 if mesh.rank == 0 else 0)
    if records:
        assert records[0].startswith("table weight: 0.40% of 500 rows touched a rank and step, 2 ranks:")


@on_ranks(4)
def test_a_row_is_sent_once_however_often_it_was_looked_up():
    mesh = tulle.init(data=-1)
    width = 16
    model = nn.Embedding(5_000, width, sparse=True)
    model, _ = tulle.distribute(model, dummy(model), mesh, plan="allgather")
    ids = torch.multinomial(1 / torch.arange(1, 5_001), 512, replacement=True)  # as words are: many of a few
    model(ids).sum().backward()
    traffic.take_labels()
    model.zero_grad()
    model(ids).sum().backward()
    distinct = len(ids.unique())
    assert distinct < 400
    sent = traffic.take_labels()["weight"].bytes_sent
    assert sent <= (mesh.size - 1) * distinct * (4 * width + 8), "no more than an all-gather of coalesced rows"
    assert sent >= (mesh.size - 1) * distinct * 4 * width


class Rows(torch.autograd.Function):
    """Rows of a parameter of any dimensions, with a gradient that is sparse by rows."""

    @staticmethod
    def forward(ctx, parameter, ids):
        ctx.ids, ctx.shape = ids, parameter.shape
        return parameter[ids]

    @staticmethod
    def backward(ctx, gradient):
        return torch.sparse_coo_tensor(ctx.ids[None], gradient, ctx.shape, check_invariants=True), None


class OddlySparse(nn.Module):
    """Sparse gradients of a vector, along the second dimension of a matrix, and of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(models.WORDS))
        self.columns = nn.Parameter(torch.randn(2, models.WORDS))
        self.blocks = nn.Parameter(torch.randn(models.WORDS, 2, 3))

    def forward(self, ids: Tensor) -> Tensor:
        """A mean over a batch `[samples, length]`."""
        ids = ids.flatten()
        found = torch.gather(self.bias, 0, ids, sparse_grad=True)
        found = found + torch.gather(self.columns, 1, ids.expand(2, -1), sparse_grad=True).sum(0)
        return (found + Rows.apply(self.blocks, ids).sum((1, 2))).tanh().mean()


@on_ranks(2)
def test_sparse_gradients_that_are_no_rows_of_a_matrix_are_reduced_dense():
    mesh = tulle.init(data=-1)
    model, reference = build(OddlySparse, 0), build(OddlySparse, 0)
    model, _ = tulle.distribute(model, dummy(model), mesh)
    train(model, mesh)
    train(reference, None)
    assert worst_difference(model, reference)[0] < 1e-12
    first, second = batches(1, 12)[0].chunk(2)
    with model.no_sync():
        model(first).backward()
    model(second).backward()
    assert not model.blocks.grad.is_sparse
