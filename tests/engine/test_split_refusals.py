"""What cannot be done with tables that are split is refused, on all ranks, with the mend."""

import copy
import re
from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch
from split_networks import ROWS, WIDTH, Lookup, Pair, build, step
from torch import Tensor, nn
from torch.optim import SGD

import tulle
from models import batches
from ranks import on_ranks
from tulle import placing
from tulle.errors import CommunicationError, DataError, GradientError, ModelError, PlanError


@pytest.mark.slow  # a time-out
@on_ranks(2)
def test_a_rank_that_evaluates_alone_is_told_that_all_must():
    mesh = tulle.init(data=-1)
    model = build("embedding", seed=9)
    optimizer = SGD(model.parameters(), lr=0.5)
    tulle.distribute(model, optimizer, mesh, plan="rows")
    ids = torch.arange(12)
    step(model, [optimizer], [model(ids)])
    if mesh["data"].rank == 0:
        with torch.no_grad(), pytest.raises(CommunicationError, match="in evaluation too"):
            model(ids)
    else:
        with pytest.raises(CommunicationError, match=r"table\.weight in step 1 failed on rank 1"):
            model(ids)


@on_ranks(2)
def test_rows_that_were_not_told_are_named_with_the_mend():
    mesh = tulle.init(data=-1)
    pair = Pair(nn.Embedding(ROWS, WIDTH), nn.Embedding(ROWS, WIDTH))
    pair, _ = tulle.distribute(pair, SGD(pair.parameters(), lr=0.1), mesh, plan="rows")
    ids = torch.arange(8).view(2, 4)
    batches_ahead = iter(tulle.lookahead([ids] * 3, ids=lambda batch: {"first": batch[:1], "second": batch}))
    with pytest.raises(ModelError, match=r"'first.weight' on rank \d asks for rows that were not told ahead: let the"):
        pair(next(batches_ahead))
    with pytest.raises(ModelError, match=r"ids of 'third', the tables .* are: first.weight, second.weight"):
        next(iter(tulle.lookahead([ids], ids={"third": 0})))
    with pytest.raises(DataError, match=r"tulle\.lookahead was given a int, expected batches to iterate over"):
        tulle.lookahead(3)


class Fails(torch.autograd.Function):
    """Has no gradient."""

    @staticmethod
    def forward(ctx, given):
        return given.view_as(given)

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("no gradient")


@on_ranks(2)
def test_a_backward_after_one_that_failed_when_gradients_of_rows_had_gone_is_refused():
    mesh = tulle.init(data=-1)
    pair = Pair(nn.Embedding(ROWS, WIDTH), nn.Embedding(ROWS, WIDTH))
    tulle.distribute(pair, SGD(pair.parameters(), lr=0.1), mesh, plan="rows")
    ids = torch.arange(4)
    with pytest.raises(ValueError, match="no gradient"):
        (Fails.apply(pair.first(ids)) * pair.second(ids)).sum().backward()
    with pytest.raises(
        GradientError, match=r"failed after gradients of first\.weight, second\.weight had gone to their"
    ):
        pair.first(ids).sum().backward()


class ThirdWord(Lookup):
    """Looks up the third column of its batch alone, or the last of fewer."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids[:, min(2, ids.shape[1] - 1)])


@on_ranks(2)
def test_a_column_that_a_shorter_batch_has_not_is_named_with_the_mend():
    mesh = tulle.init(data=-1)
    model = ThirdWord(nn.Embedding(ROWS, WIDTH))
    model, optimizer = tulle.distribute(model, SGD(model.parameters(), lr=0.1), mesh, plan="rows")
    for _ in range(3):
        step(model, [optimizer], [model(torch.arange(8).view(2, 4))])
    with pytest.raises(ModelError, match=r"'table.weight' on rank \d asks for rows that were not told ahead: until"):
        model(torch.arange(4).view(2, 2))


class LastWord(Lookup):
    """Looks up the last column of its batch alone."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids[:, -1])


@on_ranks(2)
@pytest.mark.parametrize("plan", ["rows", "columns"])
def test_the_last_column_is_the_last_of_longer_and_shorter_batches_too(plan):
    mesh = tulle.init(data=-1)
    model = LastWord(nn.Embedding(ROWS, WIDTH))
    alone = copy.deepcopy(model)
    model, optimizer = tulle.distribute(model, SGD(model.parameters(), lr=0.1), mesh, plan=plan)
    for columns in (4, 4, 4, 6, 1, 3):
        ids = torch.arange(2 * columns).view(2, columns)
        assert torch.allclose(model(ids), alone(ids))
        step(model, [optimizer], [model(ids)])
        step(alone, [SGD(alone.parameters(), lr=0.1)], [alone(ids)])


@on_ranks(2)
def test_what_cannot_be_split_says_why():
    mesh = tulle.init(data=-1)
    tied = nn.Sequential(nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, ROWS, bias=False))
    tied[1].weight = tied[0].weight
    with pytest.raises(PlanError, match=r"splits '0.weight' by rows, but 1 \(Linear\) reads the whole of it"):
        tulle.distribute(tied, SGD(tied.parameters(), lr=0.1), mesh, plan="rows")
    bounded = Lookup(nn.Embedding(ROWS, WIDTH, max_norm=1.0))
    with pytest.raises(PlanError, match="max_norm needs the norms of whole rows: split it by rows"):
        tulle.distribute(bounded, SGD(bounded.parameters(), lr=0.1), mesh, plan="columns")
    plain = Lookup(nn.Embedding(ROWS, WIDTH))
    with pytest.raises(PlanError, match="LBFGS does not treat every element by itself"):
        tulle.distribute(plain, torch.optim.LBFGS(plain.parameters()), mesh, plan="rows")


@on_ranks(2)
@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (
            torch.tensor([[1, ROWS]]),
            "'table.weight' was asked for row 40 on rank 1, expected rows 0..39: check the",
        ),
        (torch.tensor([[-1, 2]]), "'table.weight' was asked for row -1 on rank 1, expected rows 0..39"),
        (
            torch.tensor([[1.0, 2.0]]),
            "ids of the table 'table.weight' are torch.float32, expected int32 or int64",
        ),
    ],
)
def test_ids_that_are_no_rows_are_told_to_all_ranks(wrong, named, is_known):
    mesh = tulle.init(data=-1)
    model = build("sum", 0)
    model, optimizer = tulle.distribute(model, SGD(model.parameters(), lr=0.1), mesh, plan="rows")
    for ids in batches(3, 4) if is_known else []:
        step(model, [optimizer], [model(ids)])
    if mesh.rank == 1:
        with pytest.raises((IndexError, TypeError), match=re.escape(named)):
            model(wrong)
    else:
        number = 4 if is_known else 1  # of the step whose forward it is
        with pytest.raises(
            CommunicationError, match=rf"rank 1 of axis 'data' looked up, in step {number}, what is no "
        ):
            model(torch.tensor([[1, 2]]))


class OfSomeRanks(nn.Module):
    """Two tables of one width, looked up in an order that a rank chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Embedding(ROWS, WIDTH, sparse=True) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, ids, *names):
        return self.scale * sum(self.get_submodule(name)(ids).sum() for name in names)


@on_ranks(2)
@pytest.mark.parametrize(
    ("names", "said"),
    [
        (
            (("first",), ("second",)),
            r"up in {own}\.weight in step \d+, and rank {other} did not: all ranks must look up",
        ),
        ((("first", "second"), ("second", "first")), r"up in {own}\.weight in step \d+, and rank {other} did not"),
        (
            (("first", "second"), ("first",)),
            (r"looked up in second\.weight in step \d+, and", r"left out a lookup that rank 0 makes|closed|reset"),
        ),
    ],
    ids=["others", "in another order", "one less"],
)
def test_ranks_that_look_up_in_other_tables_are_told(names, said):
    mesh = tulle.init(data=-1)
    model = OfSomeRanks()
    model, _ = tulle.distribute(model, SGD(model.parameters(), lr=0.1), mesh, plan="rows")
    rank, own = mesh.rank, names[mesh.rank]
    expected = said[rank] if isinstance(said, tuple) else said.format(own=own[0], other=1 - rank)
    with pytest.raises((ModelError, CommunicationError) if rank else ModelError, match=expected):
        model(torch.arange(4), *own).backward()


@on_ranks(2)
def test_a_key_that_the_batch_has_not_is_named():
    mesh = tulle.init(data=-1)
    model = build("sum", 0)
    tulle.distribute(model, SGD(model.parameters(), lr=0.1), mesh, plan="rows")
    with pytest.raises(
        ModelError, match="given 'user' as the key of the ids of 'table', and the batch has users, items"
    ):
        next(iter(tulle.lookahead([{"users": torch.tensor([1]), "items": torch.tensor([2])}], ids={"table": "user"})))
    with pytest.raises(DataError, match="given a str as ids, expected a function from the batch to the ids of each"):
        tulle.lookahead([torch.tensor([1])], ids="table")
    with pytest.raises(DataError, match=r"given a .* as ids, .*; models are found without being given"):
        tulle.lookahead([torch.tensor([1])], model)
    with pytest.raises(ModelError, match="as ids gave a list, expected the ids of each table; the tables"):
        next(iter(tulle.lookahead([torch.tensor([1])], ids=lambda batch: [batch])))


@on_ranks(1, 2)
def test_ids_that_are_no_tensor_are_told_by_the_name_of_their_table():
    mesh = tulle.init(data=-1)
    model = Lookup(nn.Embedding(ROWS, WIDTH))
    model, _ = tulle.distribute(model, SGD(model.parameters(), lr=0.1), mesh, plan="rows")
    loop = iter(tulle.lookahead([torch.arange(8)] * 2, ids=lambda batch: {"table": [batch, batch]}))
    if mesh.size == 1:  # nothing is split, so nobody asks
        next(loop)
    else:
        with pytest.raises(ModelError, match="ids of 'table' as a list, expected one tensor: of several lookups"):
            next(loop)


def train_with_ids(counts):
    """Steps whose ids are those of so many of two tables, by rank and step."""
    mesh = tulle.init(data=-1)
    model = OfSomeRanks()
    model, optimizer = tulle.distribute(model, SGD(model.parameters(), lr=0.1), mesh, plan="rows")

    def ids(number: torch.Tensor) -> dict[str, torch.Tensor]:
        names = ["first", "second"][: counts[mesh.rank][int(number)]]
        return {f"{name}.weight": torch.arange(4) for name in names}

    for _ in tulle.lookahead(torch.arange(4), ids=ids):
        step(model, [optimizer], [model(torch.arange(4), "first", "second")])


@on_ranks(2)
def test_ids_are_of_the_same_tables_on_all_ranks_and_of_others_in_other_steps():
    with pytest.raises(ModelError, match=r"'second.weight'\] on rank 0 of axis 'data', and of \[\] on rank 1"):
        train_with_ids(((2, 2, 2, 2), (0, 2, 2, 2)))
    with pytest.raises(ModelError, match=r"'second.weight'\] on rank 0 of axis 'data', and of \['first.weight'\]"):
        train_with_ids(((2, 2, 2, 2), (1, 1, 1, 1)))
    train_with_ids(((2, 1, 0, 2), (2, 1, 0, 2)))


@on_ranks(2)
def test_ids_of_fewer_tables_on_one_rank_alone_are_told():
    if torch.distributed.get_rank() == 0:  # which hears of it where it next waits
        with pytest.raises((DataError, CommunicationError)):
            train_with_ids(((2, 2, 2, 2), (2, 2, 1, 1)))
        return
    text = r"batch of rank 1 of axis 'data' after the one of step .* or ids= gives those of other tables"
    with pytest.raises(DataError, match=text):
        train_with_ids(((2, 2, 2, 2), (2, 2, 1, 1)))
    torch.distributed.destroy_process_group()  # as at the end of a process that failed


@on_ranks(2)
def test_a_rank_whose_first_batch_is_none_is_told():
    mesh = tulle.init(data=-1)
    model = Lookup(nn.Embedding(ROWS, WIDTH))
    model, _ = tulle.distribute(model, SGD(model.parameters(), lr=0.1), mesh, plan="rows")
    with pytest.raises(
        DataError, match=r"rank 1 of axis 'data' has no batch after the one of step \d+, rank 0 has: give"
    ):
        next(iter(tulle.lookahead([torch.arange(8)] * (mesh.rank == 0), ids=lambda batch: batch)))


@on_ranks(2)
def test_the_ids_of_the_only_table_need_no_name():
    mesh = tulle.init(data=-1)
    model = Lookup(nn.Embedding(ROWS, WIDTH))
    model, _ = tulle.distribute(model, SGD(model.parameters(), lr=0.1), mesh, plan="rows")
    batches = iter(tulle.lookahead([torch.arange(8).view(2, 4)] * 2, ids=lambda batch: batch[:1]))
    with pytest.raises(ModelError, match="asks for rows that were not told ahead"):  # so it is what was told
        model(next(batches))


@dataclass
class Sentences:
    """A batch as an object."""

    words: Tensor


@on_ranks(2)
def test_ids_may_be_an_attribute_of_the_batch():
    mesh = tulle.init(data=-1)
    model = Lookup(nn.Embedding(ROWS, WIDTH))
    model, _ = tulle.distribute(model, SGD(model.parameters(), lr=0.1), mesh, plan={"table": "rows"})
    loop = iter(tulle.lookahead([Sentences(torch.arange(4))] * 2, {"table": "words"}))
    batch = next(loop)
    with pytest.raises(ModelError, match="asks for rows that were not told ahead"):  # so it is what was told
        model(torch.arange(8))
    with pytest.raises(ModelError, match="given 'ids' as the key of the ids of 'table', and the batch is a Sentences"):
        next(iter(tulle.lookahead([batch], {"table": "ids"})))


class Scaled(SGD):
    """An optimizer that tulle does not know."""


@on_ranks(2)
def test_an_optimizer_that_is_not_known_is_doubted_in_the_log():
    mesh = tulle.init(data=-1)
    model = build("sum", 0)
    with patch.object(placing.logger, "info") as said:
        tulle.distribute(model, Scaled(model.parameters(), lr=0.1), mesh, plan="rows")
    told = [call.args[1] for call in said.call_args_list if "tables that are split" in call.args[0]]
    assert [words.split()[0] for words in told] == (["Scaled"] if mesh.rank == 0 else [])


def test_tables_of_an_optimizer_that_is_not_known_are_split_only_if_asked():
    model, ways = build("sum", 0), {"table.weight": ("rows", "columns")}
    known, unknown = SGD(model.parameters(), lr=0.1), Scaled(model.parameters(), lr=0.1)
    assert placing.placements_of(model, [known], 2) == ways
    assert placing.placements_of(model, [unknown], 2) == {"table.weight": ()}
    assert placing.placements_of(model, [unknown], 2, is_asked=True) == ways


@on_ranks(2)
def test_a_tensor_in_the_place_of_a_split_table_is_refused():
    mesh = tulle.init(data=-1)
    model = build("sum", 0)
    tulle.distribute(model, SGD(model.parameters(), lr=0.1), mesh, plan="rows")
    averaged = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for transform in (lambda of: of, torch.func.grad):
        with pytest.raises(
            ModelError, match=r"a tensor of shape \[\d+, 6\] that was put in the place of a split table"
        ):
            transform(lambda given: torch.func.functional_call(model, given, (torch.tensor([[1, 2]]),)).sum())(averaged)


@on_ranks(2)
def test_a_transform_of_torch_func_cannot_look_up_in_a_split_table_and_says_so():
    mesh = tulle.init(data=-1)
    model = build("sum", 0)
    tulle.distribute(model, SGD(model.parameters(), lr=0.1), mesh, plan="rows")
    ids = torch.tensor([[1, 2]])
    refused = pytest.raises(
        ModelError, match=r"\(vmap, grad, jacrev, ...\) was to look up in 'table.weight', which is sp"
    )
    with refused:
        torch.func.vmap(model)(ids)
    with refused:
        torch.func.grad(lambda scale: (scale * model(ids)).sum())(torch.ones(()))


@on_ranks(2)
def test_what_is_looked_up_and_is_no_tensor_is_refused_by_the_name_of_the_table():
    mesh = tulle.init(data=-1)
    model = Lookup(nn.Embedding(ROWS, WIDTH))
    model, optimizer = tulle.distribute(model, SGD(model.parameters(), lr=0.1), mesh, plan="rows")
    for _ in range(4):  # before and after it is known where ids come from
        with pytest.raises(TypeError, match=r"the table 'table.weight' was given a NoneType, expected ids as a tensor"):
            model(None)
        with torch.no_grad(), pytest.raises(TypeError, match=r"the table 'table.weight' was given a list, expected"):
            model([1, 2])
        step(model, [optimizer], [model(torch.arange(8).view(2, 4))])
