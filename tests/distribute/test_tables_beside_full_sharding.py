"""A plan that shares all parameters out leaves tables as it has them: split in their own way, or replicas."""

import pytest
import torch
from axes_models import batch_of, worst_difference
from torch import nn
from torch.nn import functional

import tulle
from ranks import on_ranks, run_on_ranks
from tulle.clip import total
from tulle.memory import named_shards
from tulle.plan import Memory, Plan
from tulle.plan.table_plan import TablePlan
from tulle.tables import gradient

SHAPES = {"words.weight": (40, 8), "tags.weight": (40, 6)}
CLIPS = {
    "unclipped": None,
    "ours": lambda model: tulle.clip_grad_norm_(model, 0.05),
    "torch's": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.05),
}
OPTIMIZERS = {
    "sgd": [lambda tables, others: torch.optim.SGD([*tables, *others], lr=0.1)],
    "adam": [lambda tables, others: torch.optim.Adam([*tables, *others], lr=0.01, eps=1e-2)],
    "sparse adam": [
        lambda tables, others: torch.optim.AdamW(others, lr=0.01, eps=1e-2),
        lambda tables, others: torch.optim.SparseAdam(tables, lr=0.01, eps=1e-2),
    ],
}


class TwoTables(nn.Module):
    def __init__(self, sparse):
        super().__init__()
        self.words, self.tags = nn.Embedding(40, 8, sparse=sparse), nn.EmbeddingBag(40, 6, sparse=sparse)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8)) for _ in range(2)])
        self.out = nn.Linear(14, 10)

    def forward(self, batch):
        hidden = self.words(batch["words"]).mean(1)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        scores = self.out(torch.cat([hidden, self.tags(batch["words"])], 1))
        return functional.cross_entropy(scores, batch["targets"])


def build(kind):
    torch.manual_seed(0)
    model = TwoTables(sparse=kind == "sparse adam").double()
    tables = [model.words.weight, model.tags.weight]
    others = [p for name, p in model.named_parameters() if name not in SHAPES]
    return model, [make(tables, others) for make in OPTIMIZERS[kind]]


def train(model, optimizers, rank=0, size=1, steps=range(4), clip=None):
    norms = []
    for step in steps:
        model(batch_of(step, rank, size)).backward()
        norms += [clip(model).item()] if clip else []
        for one in optimizers:
            one.step()
            one.zero_grad()
    return norms


def shared(kind, how):
    """A model whose table of words is split in a way, that of tags a replica, and all else shared out."""
    mesh = tulle.init(data=-1)
    model, optimizers = build(kind)
    ways = {"words.weight": how, "tags.weight": "allgather" if kind == "sparse adam" else None}
    tables = [TablePlan(name, *SHAPES[name], way, "asked for") for name, way in ways.items() if way]
    plan = Plan(mesh.shape, tables=tuple(tables), memory=Memory(full_shard=True))
    tulle.distribute(model, optimizers, mesh, plan=plan)
    return model, optimizers, (mesh["data"].rank, mesh["data"].size)


def compare(kind, how, clip):
    reference, several = build(kind)
    wanted = train(reference, several, clip=CLIPS[clip])
    model, several, place = shared(kind, how)
    found = train(model, several, *place, clip=CLIPS[clip])
    assert found == pytest.approx(wanted, rel=1e-12)
    assert worst_difference(tulle.full_state_dict(model, everywhere=True), reference.state_dict()) < 1e-12
    return model


@on_ranks(2)
@pytest.mark.parametrize(("kind", "how", "clip"), [("adam", "rows", "torch's"), ("sparse adam", "columns", "ours")])
def test_it_is_one_process(kind, how, clip):
    model = compare(kind, how, clip)
    assert "words.weight" not in named_shards(model)
    assert model.words.weight.to_local().numel() < 320, "split in its own way"
    assert "layers.0.0.weight" in named_shards(model)


@on_ranks(2, 4)
@pytest.mark.slow
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("how", ["rows", "columns", "balanced"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_it_is_one_process_in_every_way(kind, how, clip):
    if kind == "sparse adam" and clip == "torch's":
        return  # which refuses sparse gradients
    compare(kind, how, clip)


@on_ranks(2)
def test_the_twin_that_counts_a_split_table_on_every_rank_is_found(monkeypatch):
    monkeypatch.setattr(total, "_own", lambda gradient, spread: gradient)
    with pytest.raises(AssertionError):
        compare("adam", "rows", "ours")


def save(path):
    model, several, place = shared("sparse adam", "rows")
    train(model, several, *place, steps=range(2))
    tulle.save(path, model, several)


def go_on(path, how):
    model, several, place = shared("sparse adam", how)
    tulle.load(path, model, several)
    train(model, several, *place, steps=range(2, 4))
    return tulle.full_state_dict(model)


@pytest.mark.parametrize(("ranks", "how"), [(1, "rows"), pytest.param(4, "columns", marks=pytest.mark.slow)])
def test_a_checkpoint_goes_on_elsewhere(ranks, how, tmp_path):
    reference, several = build("sparse adam")
    train(reference, several)
    run_on_ranks(2, save, path=tmp_path / "checkpoint")
    found = run_on_ranks(ranks, go_on, path=tmp_path / "checkpoint", how=how)
    assert worst_difference(found[0], reference.state_dict()) < 1e-12


@on_ranks(2)
def test_the_norm_of_all_gradients_takes_torch_one_exchange(monkeypatch):
    model, optimizers, place = shared("adam", "rows")
    asked: list[tuple[int, ...]] = []
    all_reduce = gradient.all_reduce

    def noted(numbers, *rest, **options):
        asked.append(tuple(numbers.shape))
        return all_reduce(numbers, *rest, **options)

    monkeypatch.setattr(gradient, "all_reduce", noted)
    train(model, optimizers, *place, steps=range(1), clip=CLIPS["torch's"])
    assert asked == [(len([*model.parameters()]),)]
