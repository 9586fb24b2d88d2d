"""What people bring along from plain PyTorch and DDP works with split tables, or says what to do instead."""

import copy
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import tulle
from ranks import on_ranks
from tulle import comm
from tulle.errors import CheckpointError, CommunicationError, DataError, ModelError, PlanError
from tulle.plan import Memory, Plan
from tulle.plan.table_plan import TablePlan

WORDS, WIDTH = 20, 6


class Tagger(nn.Module):
    """A table, bags of another, and a layer."""

    def __init__(self, *, sparse: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, sparse=sparse)
        self.tags = nn.EmbeddingBag(WORDS, WIDTH, sparse=sparse, mode="sum")
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, ids):
        return self.out(self.words(ids).sum(1) + self.tags(ids)).pow(2).mean()


def split_tagger(placement="rows", kind=Tagger):
    mesh = tulle.init(data=-1)
    torch.manual_seed(0)
    model = kind().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = {"words.weight": placement, "tags.weight": placement}
    return (mesh, *tulle.distribute(model, optimizer, mesh, plan=plan))


def batches(mesh, count):
    drawn = torch.Generator().manual_seed(mesh.rank)
    return [torch.randint(WORDS, (4, 3), generator=drawn) for _ in range(count)]


def train(model, optimizer, loader):
    for batch in loader:
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_loader_that_is_looked_ahead_in_keeps_its_attributes():
    loader = torch.utils.data.DataLoader(range(6), batch_size=2, sampler=torch.utils.data.RandomSampler(range(6)))
    ahead = copy.copy(tulle.lookahead(loader))
    assert repr(ahead) == f"Lookahead({loader!r})"
    assert (len(ahead), ahead.batch_size, ahead.sampler) == (3, 2, loader.sampler)  # for `sampler.set_epoch(epoch)`
    with pytest.raises(AttributeError, match="no attribute 'smapler'"):
        _ = ahead.smapler


@on_ranks(3)
@pytest.mark.parametrize("placement", ["rows", "columns"])
def test_a_plain_state_loads_into_split_tables(placement):
    mesh, model, optimizer = split_tagger(placement)
    torch.manual_seed(1)
    plain = Tagger().double()
    model.load_state_dict(plain.state_dict())
    whole = tulle.full_state_dict(model, everywhere=True)
    assert all(torch.equal(whole[name], value) for name, value in plain.state_dict().items())
    model.load_state_dict(model.state_dict())
    with pytest.raises(
        RuntimeError, match=rf"words.weight: .* of shape \[1\], expected \[{WORDS}, {WIDTH}\], the whole, or"
    ):
        model.load_state_dict(plain.state_dict() | {"words.weight": torch.ones(1)})
    train(model, optimizer, batches(mesh, 1))


@on_ranks(3)
@pytest.mark.parametrize("placement", ["rows", "columns"])
@pytest.mark.parametrize("memory", [Memory(), Memory(full_shard=True)], ids=["whole", "sharded"])
def test_the_state_of_a_plain_optimizer_loads_into_split_tables(placement, memory):
    mesh = tulle.init(data=-1)
    [batch] = batches(mesh, 1)
    everyone = torch.cat(comm.gather_values(batch, mesh["data"], label="batches"))
    torch.manual_seed(0)
    plain, model = Tagger(sparse=False).double(), Tagger(sparse=False).double()
    theirs, ours = (torch.optim.Adam(one.parameters(), lr=0.1) for one in (plain, model))
    for _ in range(2):
        train(plain, theirs, [everyone])
    tables = tuple(TablePlan(name, WORDS, WIDTH, placement, "given") for name in ("words.weight", "tags.weight"))
    tulle.distribute(model, ours, mesh, plan=Plan(mesh.shape, tables=tables, memory=memory))
    model.load_state_dict(plain.state_dict())
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    train(model, ours, [batch])
    ours.load_state_dict(ours.state_dict())  # of this rank's parts
    train(model, ours, [batch])
    for _ in range(2):
        train(plain, theirs, [everyone])
    whole = tulle.full_state_dict(model, everywhere=True)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(whole[name], value, rtol=1e-12, atol=1e-15)


@on_ranks(2)
@pytest.mark.parametrize("memory", [Memory(), Memory(full_shard=True)], ids=["whole", "sharded"])
def test_the_parts_of_another_rank_are_not_taken_for_ones_own(memory, tmp_path):
    """What rank 0 saved of its own, as a loop for DDP does, has the shapes that this rank's has."""
    mesh = tulle.init(data=-1)
    model = Tagger(sparse=False).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    tables = tuple(TablePlan(name, WORDS, WIDTH, "columns", "given") for name in ("words.weight", "tags.weight"))
    tulle.distribute(model, optimizer, mesh, plan=Plan(mesh.shape, tables=tables, memory=memory))
    train(model, optimizer, batches(mesh, 1))
    torch.save((model.state_dict(), optimizer.state_dict()), tmp_path / f"{mesh.rank}.pt")
    of_model, of_optimizer = torch.load(tmp_path / f"{mesh.rank}.pt")
    everyones = comm.gather_values((of_model, of_optimizer), mesh["data"], label="states")
    model.load_state_dict(of_model)
    optimizer.load_state_dict(of_optimizer)
    before = copy.deepcopy((dict(model.state_dict()), optimizer.state_dict()))
    theirs, of_theirs = everyones[1 - mesh.rank]
    other, own = f"rank {1 - mesh.rank} of 2", f"rank {mesh.rank} of 2"
    with pytest.raises(RuntimeError, match=f"words.weight: the state has the part of {other}, and this is {own}: load"):
        model.load_state_dict(theirs)
    with pytest.raises(CheckpointError, match=f"of Adam has the parts of {other} of axis 'data', and this is {own} of"):
        optimizer.load_state_dict(of_theirs)
    assert torch.equal(model.state_dict()["words.weight"], before[0]["words.weight"])
    assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], before[1]["state"][0]["exp_avg"])
    assert "tulle_part" not in str(vars(tulle.full_state_dict(model, everywhere=True))["_metadata"])


@on_ranks(2)
def test_an_optimizer_of_two_models_takes_its_own_state_again():
    mesh = tulle.init(data=-1)
    table, layer = nn.Embedding(10, 4), nn.Linear(4, 1)
    for model, plan in ((table, "rows"), (layer, "auto")):
        tulle.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), mesh, plan=plan)
    both = torch.optim.Adam([*table.parameters(), *layer.parameters()], lr=0.1)
    layer(table(torch.tensor([1, 2]))).sum().backward()
    both.step()
    kept = copy.deepcopy(both.state_dict())
    both.load_state_dict(kept)
    assert torch.equal(both.state_dict()["state"][0]["exp_avg"], kept["state"][0]["exp_avg"])


@on_ranks(2)
def test_a_plain_state_loads_into_a_softmax_whose_rows_are_split():
    mesh = tulle.init(data=-1)
    layer = nn.ModuleDict({"out": tulle.ShardedSoftmax(WORDS, WIDTH, bias=True)})
    plain = {name: torch.randn_like(value) for name, value in layer.state_dict().items()}
    torch.distributed.broadcast_object_list(held := [plain])
    tulle.distribute(layer, torch.optim.SGD(layer.parameters(), lr=0.1), mesh, plan={"out.weight": "rows"})
    layer.load_state_dict(held[0])
    whole = tulle.full_state_dict(layer, everywhere=True)
    assert all(torch.equal(whole[name], value) for name, value in held[0].items())


@on_ranks(3)
@pytest.mark.parametrize("is_given", [False, True])
def test_ranks_with_unequal_batches_are_told_where_rows_travel_ahead(is_given):
    mesh, model, optimizer = split_tagger()
    ids = (lambda batch: {"words": batch, "tags": batch}) if is_given else None
    train(model, optimizer, tulle.lookahead(batches(mesh, 5), ids=ids))
    more = tulle.lookahead(batches(mesh, 4 + (mesh.rank == 1)), ids=ids)
    if mesh.rank == 1:  # which hears of it where it next waits for the others
        with pytest.raises((DataError, CommunicationError)):
            train(model, optimizer, more)
        return
    text = f"rank {mesh.rank} of axis 'data' has no batch after the one of step 9, rank 1 has: give all ranks as many"
    with pytest.raises(DataError, match=text):
        train(model, optimizer, more)
    torch.distributed.destroy_process_group()  # as at the end of a process that failed


class OfEntries(Tagger):
    """Takes a dictionary, of which one entry may be missing."""

    def forward(self, batch):
        tags = batch.get("tags", batch["words"])
        return self.out(self.words(batch["words"]).sum(1) + self.tags(tags)).pow(2).mean()


def entries(mesh, lacking):
    """Batches, of which the last but one lacks an entry on some ranks."""
    for number, ids in enumerate(batches(mesh, 5)):
        yield {"words": ids} if number == 3 and mesh.rank in lacking else {"words": ids, "tags": ids.clone()}


@on_ranks(3)
def test_a_batch_of_another_form_on_one_rank_is_told_where_rows_travel_ahead():
    mesh, model, optimizer = split_tagger(kind=OfEntries)
    train(model, optimizer, tulle.lookahead(entries(mesh, lacking=())))
    train(model, optimizer, tulle.lookahead(entries(mesh, lacking=(0, 1, 2))))
    uneven = tulle.lookahead(entries(mesh, lacking=(1,)))
    if mesh.rank != 1:  # which hear of it where they next wait
        with pytest.raises((DataError, CommunicationError)):
            train(model, optimizer, uneven)
        return
    text = "rank 1 of axis 'data' after the one of step 13 lacks an entry in which its lookups were found until now"
    with pytest.raises(DataError, match=text):
        train(model, optimizer, uneven)
    torch.distributed.destroy_process_group()  # as at the end of a process that failed


@on_ranks(2)
def test_a_table_with_a_hook_of_its_gradient_is_not_split():
    mesh = tulle.init(data=-1)
    model = Tagger()
    model.words.weight.register_hook(lambda gradient: gradient)
    with pytest.raises(PlanError, match=r"splits 'words.weight' by rows, but a hook is registered on it"):
        tulle.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), mesh, plan="rows")


@on_ranks(2)
@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_split_table_refuses_hooks_of_its_gradient(register):
    mesh, model, optimizer = split_tagger()
    with pytest.raises(ModelError, match=r"a hook on 'words.weight' would see no gradient"):
        getattr(model.words.weight, register)(print)
    getattr(model.out.weight, register)(lambda gradient: None)
    train(model, optimizer, batches(mesh, 1))


GUIDE = (Path(__file__).parents[1] / "docs/training.md").read_text(encoding="utf-8")


@on_ranks(3)
def test_the_loop_of_the_guide_runs(tmp_path):
    [code] = re.findall(r"^```python\n(.*?)^```", GUIDE, flags=re.MULTILINE | re.DOTALL)
    place = [str(tmp_path)]
    torch.distributed.broadcast_object_list(place)
    exec(code.replace('"checkpoint"', repr(f"{place[0]}/checkpoint")), {})
    assert (Path(place[0]) / "checkpoint").is_dir()
