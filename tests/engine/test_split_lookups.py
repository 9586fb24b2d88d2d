"""Everything that an embedding can do, on tables that are split, beside one process on the whole batch."""

import copy
import warnings
from functools import partial

import pytest
import torch
from split_networks import KINDS, ROWS, WIDTH, Pair, build, step, worst
from torch import nn
from torch.optim import SGD, Adam, SparseAdam
from torch.utils.checkpoint import checkpoint

import tulle
from crossing import crossed
from models import batches
from ranks import on_ranks
from tulle.engine import lookup_gradients
from tulle.tables import ShardGradient

TOLERANCE = 1e-12


@on_ranks(2, 3)
@pytest.mark.parametrize(
    ("kind", "placement"),
    # The norm of a row is not known where only columns of it lie: that is refused (test_split_refusals).
    crossed(KINDS, ("rows", "columns"), without=lambda kind, placement: placement == "columns" and "max_norm" in kind),
)
def test_every_kind_of_lookup_gives_the_numbers_of_one_process(kind, placement):
    mesh = tulle.init(data=-1)
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
@pytest.mark.parametrize("kind", ["sum", "mean"])
def test_gradients_that_are_added_up_by_runs_do_too(kind, monkeypatch):
    """As those of thousands of lookups in bags are."""
    monkeypatch.setattr(lookup_gradients, "_MANY", 0)
    mesh = tulle.init(data=-1)
    reference, model = build(kind, 0), build(kind, 0)
    theirs, ours = SGD(reference.parameters(), lr=0.5), SGD(model.parameters(), lr=0.5)
    tulle.distribute(model, ours, mesh, plan="rows")
    for ids in batches(5, 4 * mesh.size):
        step(reference, [theirs], [reference(ids)])
        step(model, [ours], [model(ids.chunk(mesh.size)[mesh.rank])])
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


class OneOfTwo(nn.Module):
    """Looks up in two tables, and lets go of what it took of one: the other counts for the sum of ids."""

    def __init__(self):
        super().__init__()
        self.even, self.odd = (nn.Embedding(ROWS, WIDTH, sparse=True) for _ in range(2))

    def forward(self, ids):
        even, odd = self.even(ids), self.odd(ids)
        return (odd if ids.sum() % 2 else even).pow(2).mean()


@on_ranks(2, 3)
@pytest.mark.parametrize("placement", ["rows", "columns"])
def test_a_lookup_of_which_forward_drops_what_it_took_does_too(placement):
    mesh = tulle.init(data=-1)
    torch.manual_seed(0)
    model = OneOfTwo().double()
    reference = copy.deepcopy(model)
    [theirs, ours] = [[SGD(one.parameters(), lr=0.5)] for one in (reference, model)]
    model, ours = tulle.distribute(model, ours, mesh, plan={"even": placement, "odd": placement})
    for ids in batches(6, 4 * mesh.size):
        step(reference, theirs, [sum(reference(part) for part in ids.chunk(mesh.size)) / mesh.size])
        step(model, ours, [model(ids.chunk(mesh.size)[mesh.rank])])
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
def test_a_scaler_skips_a_step_on_all_ranks_where_one_has_stored_an_infinity():
    mesh = tulle.init(data=-1)
    reference, model = build("padding", 0), build("padding", 0)
    [theirs, ours] = [
        [SparseAdam([one.table.weight], lr=0.1), Adam(one.out.parameters(), lr=0.1)] for one in (reference, model)
    ]
    tulle.distribute(model, ours, mesh, plan="rows")
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in range(2)]
    for number, ids in enumerate(batches(3, 4 * mesh.size)):
        if number == 1:
            ids[4:] = 7  # a row of one owner
        parts = ids.chunk(mesh.size)
        factors = [1.0, float("inf") if number == 1 else 1.0]
        losses = [reference(part) * factor / 2 for part, factor in zip(parts, factors, strict=True)]
        mine = model(parts[mesh.rank]) * factors[mesh.rank]
        for scaler, several, loss in zip(scalers, (theirs, ours), (sum(losses), mine), strict=True):
            scaler.scale(loss).backward()
            for optimizer in several:
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()
    assert scalers[0].get_scale() == scalers[1].get_scale() == 4.0
    assert worst(model, reference) < TOLERANCE


@on_ranks(2)
def test_rows_of_all_lookups_travel_at_once_when_it_is_known_where_ids_come_from():
    mesh = tulle.init(data=-1)
    model = nn.ModuleDict({"first": nn.Embedding(ROWS, WIDTH), "second": nn.Embedding(ROWS, WIDTH)})
    pair = Pair(model["first"], model["second"]).double()
    pair, optimizer = tulle.distribute(pair, SGD(pair.parameters(), lr=0.1), mesh, plan="rows")
    messages = []
    for ids in batches(10, 4 * mesh.size):
        before = tulle.comm.traffic.total.messages
        step(pair, [optimizer], [pair(ids.chunk(mesh.size)[mesh.rank])])
        messages.append(tulle.comm.traffic.total.messages - before)
    assert messages[5] == messages[9]
    assert messages[5] < messages[1]


class Beside(nn.Module):
    """A split table, and beside it one that only some ranks look up."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(ROWS, WIDTH)
        self.users = nn.Embedding(ROWS, WIDTH, sparse=True)

    def forward(self, ids: torch.Tensor, *, is_known: bool) -> torch.Tensor:
        found = self.items(ids)
        return (found * self.users(ids) if is_known else found).pow(2).mean()


def two_of(kind, mesh, **given) -> tuple[nn.Module, nn.Module, list[SGD]]:
    """A distributed model and the same in one process, and an optimizer of each."""
    model, reference = kind().double(), kind().double()
    optimizers = [SGD(one.parameters(), lr=0.5) for one in (model, reference)]
    tulle.distribute(model, optimizers[0], mesh, **given)
    reference.load_state_dict(tulle.full_state_dict(model, everywhere=True))
    return model, reference, optimizers


@on_ranks(2)
@pytest.mark.parametrize("is_ahead", [True, False])
def test_a_mask_that_one_rank_has_in_some_steps_moves_no_ids(is_ahead):
    mesh = tulle.init(data=-1)
    model, reference, [ours, theirs] = two_of(
        lambda: Pair(nn.Embedding(ROWS, WIDTH), nn.Embedding(ROWS, WIDTH)), mesh, plan="rows"
    )
    mask = torch.arange(4 * 4).view(4, 4) % 3 == 0
    data = [
        [(ids, None if number > 3 and rank == number % 2 else mask) for rank, ids in enumerate(whole.chunk(mesh.size))]
        for number, whole in enumerate(batches(8, 4 * mesh.size))
    ]
    mine = [some[mesh.rank] for some in data]
    for given, whole in zip(tulle.lookahead(mine) if is_ahead else mine, data, strict=True):
        step(model, [ours], [model(*given)])
        step(reference, [theirs], [sum(reference(*one) for one in whole) / mesh.size])
    assert worst(model, reference) < TOLERANCE


class PooledStart(nn.Module):
    """Bags of all words but those of the last samples, which are laid flat."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        start = ids[: len(ids) // 2]
        return self.table(start.flatten(), torch.arange(0, start.numel(), start.shape[1])).pow(2).mean()


@on_ranks(2)
@pytest.mark.parametrize("is_ahead", [True, False])
def test_a_part_of_the_batch_that_is_laid_flat_is_looked_up_as_in_one_process(is_ahead):
    mesh = tulle.init(data=-1)
    model, reference, [ours, theirs] = two_of(PooledStart, mesh, plan="rows")
    data = [whole.chunk(mesh.size) for whole in batches(5, 4 * mesh.size)]
    mine = [shares[mesh.rank] for shares in data]
    for ids, shares in zip(tulle.lookahead(mine) if is_ahead else mine, data, strict=True):
        step(model, [ours], [model(ids)])
        step(reference, [theirs], [sum(map(reference, shares)) / mesh.size])
    assert worst(model, reference) < TOLERANCE


@on_ranks(2)
def test_a_rank_may_have_gradients_of_a_split_table_alone():
    mesh = tulle.init(data=-1)
    model, reference, [ours, theirs] = two_of(Beside, mesh, plan={"items.weight": "rows", "users.weight": "allgather"})
    for number, whole in enumerate(batches(5, 4 * mesh.size)):
        parts = [(ids, number != 3 or rank == 1) for rank, ids in enumerate(whole.chunk(mesh.size))]
        ids, is_known = parts[mesh.rank]
        step(model, [ours], [model(ids, is_known=is_known)])
        step(reference, [theirs], [sum(reference(ids, is_known=is_known) for ids, is_known in parts) / mesh.size])
    assert worst(model, reference) < TOLERANCE


class Recomputed(Pair):
    """Rows of its first table are looked up twice, all again in backward."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        def mix(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.first(left) * self.first(right) + self.second(left))

        return checkpoint(mix, ids[:, :-1], ids[:, 1:], use_reentrant=False).pow(2).mean()


@on_ranks(2, 3)
@pytest.mark.parametrize("placement", ["rows", "columns"])
def test_a_lookup_that_is_done_again_in_backward_gives_each_row_its_gradient(placement):
    """Also where rows of all lookups have travelled at once, as they do from the fourth step on."""
    mesh = tulle.init(data=-1)
    torch.manual_seed(0)
    reference = Recomputed(nn.Embedding(ROWS, WIDTH), nn.Embedding(ROWS, WIDTH)).double()
    model = copy.deepcopy(reference)
    theirs, ours = SGD(reference.parameters(), lr=0.5), SGD(model.parameters(), lr=0.5)
    tulle.distribute(model, ours, mesh, plan=placement)
    for ids in batches(5, 4 * mesh.size):
        step(reference, [theirs], [reference(ids)])
        step(model, [ours], [model(ids.chunk(mesh.size)[mesh.rank])])
    assert worst(model, reference) < TOLERANCE


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
