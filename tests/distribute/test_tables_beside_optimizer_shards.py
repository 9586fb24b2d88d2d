"""One optimizer whose state is sharded steps tables as well: those that are split, or whose gradients are sparse."""

import copy

import pytest
import torch
from axes_models import batch_of, worst_difference
from torch import nn

import tulle
from crossing import crossed
from ranks import on_ranks
from tulle.plan import Memory, Plan
from tulle.plan.table_plan import TablePlan

OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-2),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adagrad of rows": lambda parameters: torch.optim.Adagrad(parameters, lr=0.05),
}


class Words(nn.Module):
    def __init__(self, *, sparse):
        super().__init__()
        self.words, self.tags = nn.Embedding(40, 8, sparse=sparse), nn.EmbeddingBag(40, 6, sparse=sparse)
        self.hidden, self.out = nn.Linear(8, 12), nn.Linear(18, 10)

    def forward(self, batch):
        hidden = torch.tanh(self.hidden(self.words(batch["words"]).mean(1)))
        scores = self.out(torch.cat([hidden, self.tags(batch["words"])], 1))
        return nn.functional.cross_entropy(scores, batch["targets"])


def build(kind):
    torch.manual_seed(0)
    model = Words(sparse=kind == "adagrad of rows").double()
    return model, OPTIMIZERS[kind](model.parameters())


def put(kind, way, mesh, **memory):
    model, optimizer = build(kind)
    tables = (TablePlan("words.weight", 40, 8, way, "asked for"),) if way else ()
    plan = Plan(mesh.shape, tables=tables, memory=Memory(**memory))
    return tulle.distribute(model, optimizer, mesh, plan=plan)


def train(model, optimizer, steps, rank=0, size=1):
    for step in steps:
        model(batch_of(step, rank, size)).backward()
        tulle.clip_grad_norm_(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()


def states(optimizer):
    found = optimizer.state_dict()["state"]
    return {f"{number}.{key}": value for number, kept in sorted(found.items()) for key, value in sorted(kept.items())}


@on_ranks(2, 4)
@pytest.mark.parametrize(("kind", "way"), crossed(OPTIMIZERS, ["rows", "columns", None]))
def test_it_is_one_process(kind, way, tmp_path):
    mesh = tulle.init(data=-1)
    place = (mesh.rank, mesh.size)
    reference, theirs = build(kind)
    train(reference, theirs, range(2))
    model, ours = put(kind, way, mesh, shard_optimizer=True)
    ours.load_state_dict(build(kind)[1].state_dict())  # of what has not stepped
    train(model, ours, range(2), *place)
    halfway = copy.deepcopy(theirs.state_dict())
    folder = tulle.comm.gather_values(str(tmp_path), mesh["data"], label="folder")[0]
    tulle.save(folder, model, ours)
    plain, its = build(kind)
    tulle.load(folder, plain, its)
    assert worst_difference(plain.state_dict(), reference.state_dict()) < 1e-12
    assert worst_difference(states(its), states(theirs)) < 1e-12

    train(reference, theirs, range(2, 4))
    resumed, again = put(kind, "columns" if way == "rows" else "rows", mesh, shard_optimizer=True)
    tulle.load(folder, resumed, again)
    loaded, own = put(kind, way, mesh, shard_optimizer=True)
    loaded.load_state_dict(plain.state_dict())
    own.load_state_dict(halfway)
    for one, optimizer in ((model, ours), (resumed, again), (loaded, own)):
        train(one, optimizer, range(2, 4), *place)
        assert worst_difference(tulle.full_state_dict(one, everywhere=True), reference.state_dict()) < 1e-12
    kept = [value for value in dict.values(ours.state) for value in value.values() if value.dim()]
    assert sum(value.numel() for value in kept) < sum(v.numel() for v in states(theirs).values() if v.dim())


@on_ranks(2)
def test_tables_stay_wide_beside_narrow_parameters_of_the_same_optimizer():
    mesh = tulle.init(data=-1)
    torch.manual_seed(0)
    model = Words(sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reference = copy.deepcopy(model)
    plan = Plan(mesh.shape, memory=Memory(shard_optimizer=True, precision="bf16"))
    tulle.distribute(model, optimizer, mesh, plan=plan)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1)
    batch = {name: value for name, value in batch_of(0, 0, 1).items() if name in ("words", "targets")}
    for one, its in ((model, optimizer), (reference, theirs)):
        one(batch).backward()
        its.step()
    assert {name for name, p in model.named_parameters() if p.dtype == torch.float32} == {"words.weight", "tags.weight"}
    assert model.words.weight.detach().sub(reference.words.weight).abs().max() < 1e-3
    named = dict(model.named_parameters())
    assert {name for name, p in named.items() if "master" in states_by_parameter(model, optimizer).get(name, {})} == {
        name for name in named if not name.endswith(("words.weight", "tags.weight"))
    }


def states_by_parameter(model, optimizer):
    found, names = optimizer.state_dict()["state"], [name for name, _ in model.named_parameters()]
    return {names[number]: kept for number, kept in found.items()}
