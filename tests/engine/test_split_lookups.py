"""Everything that an embedding can do, on tables that are split, beside one process on the whole batch."""

import re
import warnings
from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, SparseAdam

import tulle
from models import batches
from ranks import on_ranks
from tulle import placing
from tulle.engine import engine_of
from tulle.errors import CommunicationError, DataError, ModelError, PlanError
from tulle.tables import ShardGradient, split_of

ROWS, WIDTH = 40, 6
TOLERANCE = 1e-12


class Lookup(nn.Module):
    """One embedding, or bags of one, and a layer above."""

    def __init__(self, table: nn.Embedding | nn.EmbeddingBag, *, is_weighted: bool = False) -> None:
        super().__init__()
        self.table = table
        self.out = nn.Linear(WIDTH, 3)
        self.is_weighted = is_weighted

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        weights = torch.linspace(-1, 1, ids.numel(), dtype=torch.float64).view(ids.shape) if self.is_weighted else None
        found = self.table(ids, per_sample_weights=weights) if self.is_weighted else self.table(ids)
        return self.out(found).tanh().pow(2).flatten(1).mean()


KINDS = {
    "embedding": lambda: Lookup(nn.Embedding(ROWS, WIDTH)),
    "padding": lambda: Lookup(nn.Embedding(ROWS, WIDTH, padding_idx=1, sparse=True)),
    "max_norm": lambda: Lookup(nn.Embedding(ROWS, WIDTH, max_norm=0.5)),
    "scale_grad_by_freq": lambda: Lookup(nn.Embedding(ROWS, WIDTH, scale_grad_by_freq=True)),
    "sum": lambda: Lookup(nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=True, padding_idx=0)),
    "mean": lambda: Lookup(nn.EmbeddingBag(ROWS, WIDTH, mode="mean", sparse=True)),
    "max": lambda: Lookup(nn.EmbeddingBag(ROWS, WIDTH, mode="max")),
    "bag max_norm": lambda: Lookup(nn.EmbeddingBag(ROWS, WIDTH, mode="mean", max_norm=0.3)),
    "weighted": lambda: Lookup(nn.EmbeddingBag(ROWS, WIDTH, mode="sum"), is_weighted=True),
    "frozen": lambda: Lookup(nn.Embedding.from_pretrained(torch.randn(ROWS, WIDTH, dtype=torch.float64))),
}


def build(kind: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return KINDS[kind]().double()


def worst(model: nn.Module, reference: nn.Module) -> float:
    theirs = dict(reference.named_parameters())
    found = [0.0]
    for name, parameter in model.named_parameters():
        split = split_of(parameter)
        expected = theirs[name] if split is None else split.take(theirs[name])
        found.append((parameter - expected).abs().max().item() / max(1e-3, expected.abs().max().item()))
    return max(found)


def step(model, optimizers, losses) -> None:
    for loss in losses:
        loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(2, 3)
@pytest.mark.parametrize("placement", ["rows", "columns"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_lookup_gives_the_numbers_of_one_process(kind, placement):
    mesh = tulle.init(data=-1)
    if "max_norm" in kind and placement == "columns":
        pytest.skip("refused: see below")
    data = batches(5, 4 * mesh.size)
    if kind == "weighted":  # weights by place in the batch: the same on each rank
        data = [ids[:4].repeat(mesh.size, 1) for ids in data]
    reference, model = build(kind, 0), build(kind, 0)
    [theirs, ours] = [[SGD(one.parameters(), lr=0.5, momentum=0.9)] for one in (reference, model)]
    model, ours = tulle.distribute(model, ours, mesh, plan={"table.weight": placement})
    for ids in data:
        part = ids.chunk(mesh.size)[mesh.rank]
        if kind == "weighted":
            step(reference, theirs, [reference(part)])
        else:
            step(reference, theirs, [reference(ids)])
        step(model, ours, [model(part)])
        with torch.no_grad():
            if kind != "weighted":
                reference(ids)  # renormalizes the rows of all ranks
            assert torch.allclose(model(part), reference(part), rtol=1e-12, atol=1e-14)
    assert worst(model, reference) < TOLERANCE


@on_ranks(2)
@pytest.mark.parametrize("kind", ["padding", "embedding"])
def test_gradients_of_several_backwards_add_up(kind):
    """Two losses with a backward each, gradient accumulation with `no_sync`, and a graph that is used twice."""
    mesh = tulle.init(data=-1)
    data = batches(3, 4 * mesh.size)
    reference, model = build(kind, 0), build(kind, 0)
    theirs, ours = SGD(reference.parameters(), lr=0.5), SGD(model.parameters(), lr=0.5)
    model, ours = tulle.distribute(model, ours, mesh, plan="rows")
    mine = [ids.chunk(mesh.size)[mesh.rank] for ids in data]
    step(reference, [theirs], [reference(data[0]), reference(data[1]), reference(data[2])])
    with model.no_sync():
        model(mine[0]).backward()
    step(model, [ours], [model(mine[1]) + model(mine[2])])
    assert worst(model, reference) < TOLERANCE
    first, second = reference(data[0]), model(mine[0])
    first.backward(retain_graph=True)
    second.backward(retain_graph=True)
    step(reference, [theirs], [first])
    step(model, [ours], [second])
    assert worst(model, reference) < TOLERANCE


@on_ranks(3)
def test_a_lookup_may_stay_out_of_the_loss_on_some_ranks():
    mesh = tulle.init(data=-1)
    reference, model = build("padding", 0), build("padding", 0)
    [theirs, ours] = [
        [SparseAdam([one.table.weight], lr=0.1), Adam(one.out.parameters(), lr=0.1)] for one in (reference, model)
    ]
    model, ours = tulle.distribute(model, ours, mesh, plan="rows")
    for number, ids in enumerate(batches(4, 4 * mesh.size)):
        parts = ids.chunk(mesh.size)
        is_in = [(rank + number) % 3 != 0 for rank in range(mesh.size)]  # one rank's lookup is looked up in vain
        losses = [
            reference(part) if used else reference.out.bias.sum() * 0 for part, used in zip(parts, is_in, strict=True)
        ]
        step(reference, theirs, [sum(losses) / mesh.size])
        loss = model(parts[mesh.rank])
        step(model, ours, [loss if is_in[mesh.rank] else model.out.bias.sum() * 0])
    assert worst(model, reference) < TOLERANCE


@on_ranks(2)
@pytest.mark.parametrize("is_sparse", [True, False])
def test_clipping_takes_the_norm_of_the_whole(is_sparse):
    mesh = tulle.init(data=-1)
    kind = "padding" if is_sparse else "embedding"
    reference, model = build(kind, 0), build(kind, 0)
    theirs, ours = SGD(reference.parameters(), lr=0.5), SGD(model.parameters(), lr=0.5)
    model, ours = tulle.distribute(model, ours, mesh, plan="rows")
    for ids in batches(3, 4 * mesh.size):
        reference(ids).backward()
        model(ids.chunk(mesh.size)[mesh.rank]).backward()
        assert isinstance(model.table.weight.grad, ShardGradient)
        norms = [tulle.clip_grad_norm_(one, 0.01) for one in (reference, model)]
        assert norms[1].item() == pytest.approx(norms[0].item(), rel=1e-12)
        if not is_sparse:
            norms = [
                nn.utils.clip_grad_norm_(one.parameters(), 0.005, norm) for one, norm in ((reference, 3), (model, 3))
            ]
            assert norms[1].item() == pytest.approx(norms[0].item(), rel=1e-12)
        step(reference, [theirs], [])
        step(model, [ours], [])
    assert worst(model, reference) < TOLERANCE


@on_ranks(2)
def test_rows_of_all_lookups_travel_at_once_when_it_is_known_where_ids_come_from():
    mesh = tulle.init(data=-1)
    model = nn.ModuleDict({"first": nn.Embedding(ROWS, WIDTH), "second": nn.Embedding(ROWS, WIDTH)})
    pair = Pair(model["first"], model["second"]).double()
    pair, optimizer = tulle.distribute(pair, SGD(pair.parameters(), lr=0.1), mesh, plan="rows")
    messages = []
    for ids in batches(6, 4 * mesh.size):
        before = tulle.comm.traffic.total.messages
        step(pair, [optimizer], [pair(ids.chunk(mesh.size)[mesh.rank])])
        messages.append(tulle.comm.traffic.total.messages - before)
    assert messages[4] == messages[5]
    assert messages[5] < messages[1]


class Pair(nn.Module):
    def __init__(self, first: nn.Embedding, second: nn.Embedding) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return (self.first(ids[:, :-1]) * self.second(ids[:, 1:])).pow(2).mean()


@on_ranks(2)
@pytest.mark.parametrize("placement", ["rows", "columns"])
def test_a_compiled_model_gives_the_numbers_of_one_process(placement):
    mesh = tulle.init(data=-1)
    reference, model = build("embedding", seed=8), build("embedding", seed=8)
    optimizer = SGD(model.parameters(), lr=0.5)
    model.compile(backend="eager")
    tulle.distribute(model, optimizer, mesh, plan=placement)
    expected = SGD(reference.parameters(), lr=0.5)
    for ids in torch.arange(36).view(3, 12):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler's own
            step(model, [optimizer], [model(ids.chunk(2)[mesh["data"].rank])])
        step(reference, [expected], [reference(ids)])
    torch.compiler.reset()
    assert worst(model, reference) < TOLERANCE


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
def test_optimizer_state_of_before_is_split_too():
    mesh = tulle.init(data=-1)
    data = batches(4, 4 * mesh.size)
    row_sparse = partial(SGD, momentum=0.9)  # of sparse gradients
    cases = [("embedding", Adam, "rows"), ("sum", row_sparse, "rows"), ("mean", row_sparse, "columns")]
    for kind, recipe, plan in cases:
        reference, model = build(kind, 0), build(kind, 0)
        theirs, ours = recipe(reference.parameters(), lr=0.1), recipe(model.parameters(), lr=0.1)
        for ids in data[:2]:
            step(reference, [theirs], [reference(ids)])
            step(model, [ours], [model(ids)])
        model, ours = tulle.distribute(model, ours, mesh, plan=plan)
        for ids in data[2:]:
            step(reference, [theirs], [reference(ids)])
            step(model, [ours], [model(ids.chunk(mesh.size)[mesh.rank])])
        assert worst(model, reference) < TOLERANCE, kind


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
        with pytest.raises(CommunicationError, match=r"rank 1 of axis 'data' looked up, in step \d, what is no row of"):
            model(torch.tensor([[1, 2]]))


@on_ranks(2)
def test_a_key_that_the_batch_has_not_is_named():
    mesh = tulle.init(data=-1)
    model = build("sum", 0)
    tulle.distribute(model, SGD(model.parameters(), lr=0.1), mesh, plan="rows")
    with pytest.raises(
        ModelError, match="given 'user' as the key of the ids of 'table', and the batch has users, items"
    ):
        next(iter(tulle.lookahead([{"users": torch.tensor([1]), "items": torch.tensor([2])}], ids={"table": "user"})))


class Scaled(SGD):
    """An optimizer that tulle does not know."""


@on_ranks(2)
def test_an_optimizer_that_is_not_known_is_doubted_in_the_log():
    mesh = tulle.init(data=-1)
    model = build("sum", 0)
    with patch.object(placing.logger, "warning") as warn:
        tulle.distribute(model, Scaled(model.parameters(), lr=0.1), mesh, plan="rows")
    assert [call.args[1] for call in warn.call_args_list] == (["Scaled"] if mesh.rank == 0 else [])


@on_ranks(2)
def test_a_tensor_in_the_place_of_a_split_table_is_refused():
    mesh = tulle.init(data=-1)
    model = build("sum", 0)
    tulle.distribute(model, SGD(model.parameters(), lr=0.1), mesh, plan="rows")
    averaged = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with pytest.raises(ModelError, match=r"a tensor of shape \[\d+, 6\] that was put in the place of a split table"):
        torch.func.functional_call(model, averaged, (torch.tensor([[1, 2]]),))


@on_ranks(2)
@pytest.mark.parametrize("is_seen", [True, False])
def test_rows_that_are_written_between_their_fetch_and_the_lookup_are_fetched_anew_or_refused(is_seen):
    mesh = tulle.init(data=-1)
    reference, model = build("embedding", 0), build("embedding", 0)
    theirs, ours = SGD(reference.parameters(), lr=0.5), SGD(model.parameters(), lr=0.5)
    tulle.distribute(model, ours, mesh, plan="rows")
    data = batches(6, 4 * mesh.size)
    loop = zip(data, tulle.lookahead([ids.chunk(mesh.size)[mesh.rank] for ids in data]), strict=True)

    def train() -> None:
        for whole, ids in loop:
            step(reference, [theirs], [reference(whole)])
            step(model, [ours], [model(ids)])
            with torch.no_grad():
                reference.table.weight.clamp_(-0.5, 0.5)
                (model.table.weight if is_seen else model.table.weight.data).clamp_(-0.5, 0.5)

    if not is_seen:
        with pytest.raises(ModelError, match=r"rows of table.weight were written, by .data say, after they had been"):
            train()
        return
    train()
    assert worst(model, reference) < TOLERANCE


def validated(model, optimizer, cut):
    """A loop that begins, and is interrupted by, loops without gradients."""
    data = [cut(ids) for ids in batches(8, 6)]
    for number, ids in enumerate(tulle.lookahead([*data[:2], *data])):
        if number % 4 == 1:
            with torch.no_grad():
                for other in tulle.lookahead(data[:3]):
                    model(other)
        if number > 1:
            step(model, [optimizer], [model(ids)])


def side_by_side(model, optimizer, cut):
    data = [cut(ids) for ids in batches(8, 6)]
    for ids, others in zip(tulle.lookahead(data), tulle.lookahead(data[::-1]), strict=True):
        step(model, [optimizer], [model(ids) + 2 * model(others)])


def left_and_dropped_within_the_next(model, optimizer, cut):
    data = [cut(ids) for ids in batches(8, 6)]
    left = iter(tulle.lookahead(data))
    for _ in range(4):
        step(model, [optimizer], [model(next(left))])
    for number, ids in enumerate(tulle.lookahead(data)):
        if number == 5:
            left.close()
        step(model, [optimizer], [model(ids)])
    step(model, [optimizer], [model(data[0])])


def masked_in_place(model, optimizer, cut):
    masks = torch.rand(8, 6, 5, generator=torch.Generator().manual_seed(1)) < 0.3
    for mask, ids in zip(masks, tulle.lookahead([cut(ids).clone() for ids in batches(8, 6)]), strict=True):
        ids[cut(mask)] = ROWS - 1
        step(model, [optimizer], [model(ids)])


@on_ranks(2)
@pytest.mark.parametrize("loop", [validated, side_by_side, left_and_dropped_within_the_next, masked_in_place])
def test_loops_within_loops_and_batches_that_change_in_them_give_the_numbers_of_one_process(loop):
    mesh = tulle.init(data=-1)
    reference, model = build("embedding", 0), build("embedding", 0)
    theirs, ours = SGD(reference.parameters(), lr=0.5), SGD(model.parameters(), lr=0.5)
    tulle.distribute(model, ours, mesh, plan="rows")
    loop(model, ours, lambda whole: whole.chunk(mesh.size)[mesh.rank])
    loop(reference, theirs, lambda whole: whole)
    assert worst(model, reference) < TOLERANCE


@on_ranks(2)
def test_an_evaluation_teaches_nothing_of_where_ids_lie():
    mesh = tulle.init(data=-1)
    model = build("embedding", 0)
    optimizer = SGD(model.parameters(), lr=0.1)
    tulle.distribute(model, optimizer, mesh, plan="rows")
    data = batches(4, 4)
    for ids in tulle.lookahead(data):
        with torch.no_grad():
            model(ids)
    for number, ids in enumerate(tulle.lookahead(data)):
        assert bool(engine_of(model).split_tables._learned.trips) == (number == 3), "two are watched, the next is told"
        step(model, [optimizer], [model(ids)])
