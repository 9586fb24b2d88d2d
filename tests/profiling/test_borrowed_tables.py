"""A profile takes no second copy of tables that are only looked up, and writes in none of them."""

import math

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer, SparseAdam

import tulle
from resident import peak_over_now
from tulle.profiling import measure
from tulle.profiling.borrowed import borrowed
from tulle.profiling.measure import default_loss
from tulle.profiling.steps import Twin

ROWS, WIDTH = 500, 8
IDS = torch.tensor([[1, 2, 2], [3, 499, 0]])


@pytest.fixture(autouse=True)
def _no_time_of_pipelines(monkeypatch):
    """Which is measured with models of its own."""
    monkeypatch.setattr(measure, "with_run_time", lambda machine, _axis: machine)


class Bag(nn.Module):
    def __init__(self, scale=1.0, **options):
        super().__init__()
        self.table = nn.EmbeddingBag(ROWS, WIDTH, **{"sparse": True, **options})
        self.head = nn.Linear(WIDTH, 1)
        self.scale = scale

    def forward(self, ids):
        return self.head(self.table(ids)) * self.scale


class WritesRows(Bag):
    def forward(self, ids):
        self.table.weight.data[7] += 1
        return super().forward(ids)


class SubclassOfSgd(SGD):
    pass


def of_rows(model):
    """An optimizer that takes sparse gradients alone for the table, and another for the rest."""
    return [SparseAdam([model.table.weight]), AdamW(model.head.parameters())]


def twin_of(model, optimizers):
    return Twin.of(model, optimizers, [IDS], default_loss, borrows=True)


def is_borrowed(model, optimizers):
    return twin_of(model, optimizers).model.table.weight.data_ptr() == model.table.weight.data_ptr()


@pytest.mark.parametrize(
    "made",
    [lambda m: [SGD(m.parameters(), 0.1, momentum=0.5)], lambda m: [Adagrad(m.parameters())], of_rows],
    ids=["sgd", "adagrad", "sparse-adam"],
)
def test_steps_of_a_twin_leave_the_memory_that_it_reads_as_it_was(made):
    model = Bag(scale=math.inf)  # gradients are infinite or none, and no learning rate makes nothing of them
    with torch.no_grad():
        model.table.weight[2] = -0.0
    optimizers = made(model)
    twin, before = twin_of(model, optimizers), model.table.weight.detach().clone()
    assert twin.model.table.weight.data_ptr() == model.table.weight.data_ptr()
    for _ in range(2):
        twin.step(IDS)
    assert torch.equal(model.table.weight.view(torch.int32), before.view(torch.int32))
    stepped = next(p for group in twin.optimizers[0].param_groups for p in group["params"] if p.shape == before.shape)
    assert not stepped[IDS.unique()].isfinite().all(), "the optimizer wrote elsewhere"


@pytest.mark.parametrize("kind", [AdamW, SubclassOfSgd], ids=["dense", "unknown"])
def test_what_an_optimizer_might_write_elsewhere_is_copied(kind: type[Optimizer]):
    model = Bag(sparse=kind is SubclassOfSgd)
    assert not is_borrowed(model, [kind(model.parameters(), lr=0.1)])
    assert not borrowed(model, [kind(model.parameters(), lr=0.1)])


def test_what_lookups_write_is_copied():
    model = Bag(max_norm=1.0)
    assert not is_borrowed(model, [SGD(model.parameters())])


def test_what_a_hook_sees_is_copied():
    model = Bag()
    model.table.register_forward_pre_hook(lambda module, ids: module.weight.data.mul_(2))
    assert not is_borrowed(model, [SGD(model.parameters())])


def test_a_tied_table_is_copied():
    model = Bag()
    model.output = nn.Linear(WIDTH, ROWS)
    model.output.weight = model.table.weight
    assert not is_borrowed(model, [SGD(model.parameters())])


def test_a_frozen_table_is_only_read():
    model = Bag(sparse=False)
    model.table.weight.requires_grad_(False)
    assert is_borrowed(model, [AdamW(model.head.parameters())])


def test_a_model_that_holds_its_optimizer_steps_a_copy():
    model = Bag()
    model.optimizer = SGD(model.parameters())
    assert not is_borrowed(model, [model.optimizer])


@pytest.mark.parametrize("kind", [Bag, WritesRows])
def test_a_profile_changes_no_table(kind):
    model = kind()
    before = model.table.weight.detach().clone()
    tulle.profile(model, SGD(model.parameters(), 0.1), IDS)
    assert torch.equal(model.table.weight, before)


@pytest.mark.parametrize(
    "made",
    [lambda m: SGD(m.parameters()), lambda m: Adagrad(m.parameters()), of_rows],
    ids=["sgd", "adagrad", "sparse-adam"],
)
def test_a_profile_says_of_borrowed_tables_what_it_says_of_copies(made, monkeypatch):
    model = Bag()
    seen = tulle.profile(model, made(model), IDS)
    monkeypatch.setattr("tulle.profiling.steps.borrowed", lambda *_: {})
    of_copies = tulle.profile(model, made(model), IDS)
    assert seen.tables == of_copies.tables
    assert seen.peak_bytes == of_copies.peak_bytes
    assert seen.optimizer.state_share == of_copies.optimizer.state_share
    assert seen.optimizer.updates_all_rows == of_copies.optimizer.updates_all_rows


@pytest.mark.parametrize("is_borrowing", [True, False])
@pytest.mark.parametrize("kind", [SGD, Adagrad, SparseAdam])
def test_a_profile_needs_no_second_table(kind, is_borrowing, monkeypatch):
    model = nn.Sequential(nn.EmbeddingBag(2**19, 128, sparse=True), nn.Linear(128, 1))  # of 256 MiB
    optimizers = [kind(model[0].parameters()), SGD(model[1].parameters())]
    tulle.profile(Bag(), SGD(Bag().parameters()), IDS)  # what a process needs once
    if not is_borrowing:
        monkeypatch.setattr("tulle.profiling.steps.borrowed", lambda *_: {})
    grown_bytes = peak_over_now(lambda: tulle.profile(model, optimizers, IDS))
    assert (grown_bytes < model[0].weight.nbytes * 3 / 4) is is_borrowing, grown_bytes
