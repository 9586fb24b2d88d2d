"""Everything that an embedding can do, on tables that are split, beside one process on the whole batch."""

import warnings
from functools import partial

import pytest
import torch
from split_networks import KINDS, ROWS, WIDTH, Pair, build, step, worst
from torch import nn
from torch.optim import SGD, Adam, SparseAdam

import tulle
from models import batches
from ranks import on_ranks
from tulle.tables import ShardGradient

TOLERANCE = 1e-12


@on_ranks(2, 3)
@pytest.mark.parametrize(
    ("kind", "placement"),
    # The norm of a row is not known where only columns of it lie: that is refused (test_split_refusals).
    [(kind, how) for kind in KINDS for how in ("rows", "columns") if how == "rows" or "max_norm" not in kind],
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
