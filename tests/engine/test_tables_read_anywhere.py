"""A split table may be read anywhere without a gradient: what takes all of it has it gathered, rows are looked up."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

import tulle
import tulle.engine.split_tables
from rank_process import patches
from ranks import on_ranks
from tulle.comm import traffic
from tulle.errors import CommunicationError, ModelError

USERS, ITEMS, WIDTH = 9, 13, 6


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.users, self.items, self.scale = nn.Embedding(USERS, WIDTH), nn.Embedding(ITEMS, WIDTH), nn.Linear(1, 1)

    def forward(self, users, items):
        return self.scale((self.users(users) * self.items(items)).sum(-1, keepdim=True))

    def loss(self, users, items):
        return self(users, items).pow(2).mean() + self.items.weight[items].pow(2).sum(1).mean()

    def rank_items(self, users):
        return (self.users(users) @ self.items.weight.T).topk(4)


def built():
    torch.manual_seed(0)
    return Recommender().double()


def distributed(scheme, schedule="step"):
    patches.setattr(tulle.engine.split_tables, "WORTH_S", 0.0)  # small tables never pay
    mesh, model = tulle.init(data=-1), built()
    optimizer = torch.optim.Adam(model.parameters(), 0.01, eps=1e-3)
    shapes = {"users.weight": (USERS, WIDTH), "items.weight": (ITEMS, WIDTH)}
    plan = tulle.plan(model, optimizer, mesh).with_rows_split(shapes, "a test")
    tables = tuple(replace(table, scheme=scheme) for table in plan.tables)
    return (*tulle.distribute(model, optimizer, mesh, plan=replace(plan, tables=tables, schedule=schedule)), mesh)


def pairs(rank, ranks):
    for step in range(5):
        generator = torch.Generator().manual_seed(step)
        users, items = (torch.randint(top, (12,), generator=generator) for top in (USERS, ITEMS))
        yield users.chunk(ranks)[rank], items.chunk(ranks)[rank]


def train(model, optimizer, batches):
    """Steps, after each of which the loop makes rows as long as one, and keeps the first at zero."""
    seen = []
    for users, items in batches:
        model.loss(users, items).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.items.weight.data.div_(model.items.weight.data.norm(dim=1, keepdim=True))
        with torch.no_grad():
            model.users.weight[0] = 0
            seen.append((model.users.weight[:3] @ model.items.weight.T).topk(4).values)
    return seen


def close(one, other):
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("scheme", ["rows", "columns"])
@pytest.mark.parametrize("schedule", ["step", "read"])
@on_ranks(2, 3)
def test_loops_that_read_and_write_tables_are_as_in_one_process(scheme, schedule):
    reference = built()
    expected = train(reference, torch.optim.Adam(reference.parameters(), 0.01, eps=1e-3), pairs(0, 1))
    model, optimizer, mesh = distributed(scheme, schedule)
    batches = pairs(mesh.rank, mesh.size)
    if schedule == "read":
        batches = tulle.lookahead(batches, {"users": 0, "items": 1})
    close(train(model, optimizer, batches), expected)
    with torch.no_grad():
        close(model.rank_items(torch.arange(3)).values, reference.rank_items(torch.arange(3)).values)
    state = tulle.full_state_dict(model)
    assert mesh.rank or close(dict(state), dict(reference.state_dict())) is None


@pytest.mark.parametrize("scheme", ["rows", "columns"])
@on_ranks(2, 3)
def test_values_are_those_of_all_of_it(scheme):
    (model, _, _), whole = distributed(scheme), built().items.weight
    weight = model.items.weight
    assert weight.detach().numpy() == pytest.approx(whole.detach().numpy(), rel=1e-12)
    assert weight.data[2].tolist() == pytest.approx(whole[2].tolist(), rel=1e-12)
    close(weight.detach().flatten().median(), whole.flatten().median())
    with torch.no_grad():
        close(weight.norm(dim=1).topk(3).values, whole.norm(dim=1).topk(3).values)
        close(weight.mean(0, keepdim=True).argmax(), whole.mean(0, keepdim=True).argmax())
        close(torch.cdist(weight[:3], weight), torch.cdist(whole[:3], whole))
        pretrained = torch.arange(ITEMS * WIDTH, dtype=torch.float64).view(ITEMS, WIDTH)
        weight.copy_(pretrained)
        close(model.items(torch.arange(ITEMS)), pretrained)


@on_ranks(2)
def test_rows_that_are_scaled_by_their_norms_do_not_travel():
    model, _, _ = distributed("rows")
    before = traffic.total.messages
    model.items.weight.data.div_(model.items.weight.data.norm(dim=1, keepdim=True))
    with torch.no_grad():
        model.users.weight.copy_(functional.normalize(model.users.weight, dim=1))
    assert traffic.total.messages == before


@on_ranks(2)
def test_what_wants_a_gradient_of_all_of_it_is_refused():
    model, _, _ = distributed("rows")
    with pytest.raises(ModelError, match=r"T was given the table 'items\.weight' .* read it within torch\.no_grad\(\)"):
        model.rank_items(torch.arange(3))


@pytest.mark.slow  # a time-out
@on_ranks(2)
def test_a_rank_that_reads_alone_is_told_that_all_must():
    model, _, mesh = distributed("rows")
    if not mesh.rank:
        with pytest.raises(CommunicationError, match=r"every rank must read it: do so in front of `if rank == 0:`"):
            model.items.weight.detach().numpy()
