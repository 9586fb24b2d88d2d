"""Split tables: on any number of ranks, by rows or columns, the numbers of one process."""

import pytest
import torch
from torch import nn

import models
import tulle
from crossing import crossed
from models import Words, batches, build
from ranks import on_ranks
from tulle.comm import traffic
from tulle.parts import local_of
from tulle.tables import split_of

STEPS = 10
TOLERANCE = 1e-12
SAMPLES_A_RANK = 4
RECIPES = [models.sgd, models.momentum, models.adagrad, models.sparse_adam_and_adam]
DENSE_RECIPES = [models.momentum, models.adam, models.adamw, models.adagrad]


def dense_words() -> nn.Module:
    return Words(is_sparse=False)


def train(model, optimizers, data, *, lookahead=False):
    losses = []
    for ids in tulle.lookahead(data) if lookahead else data:
        loss = model(ids)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def check_parts(model: nn.Module, reference: nn.Module) -> None:
    """Each parameter is this rank's part of the reference's."""
    theirs = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        split = split_of(parameter)
        expected = theirs[name] if split is None else split.take(theirs[name])
        part = local_of(parameter)
        assert part.shape == expected.shape
        worst = (part - expected).abs().max().item() / max(1e-3, expected.abs().max().item())
        assert worst < TOLERANCE, f"{name} differs by {worst:.1e}"


def check_against_one_process(kind, recipe, plan, *, lookahead=False) -> None:
    mesh = tulle.init(data=-1)
    data = batches(STEPS, SAMPLES_A_RANK * mesh.size)
    reference = build(kind, seed=0)
    train(reference, recipe(reference), data)
    model = build(kind, seed=mesh.rank)  # other weights on each rank: rank 0's must win
    model, optimizers = tulle.distribute(model, recipe(model), mesh, plan=plan)
    train(model, optimizers, [ids.chunk(mesh.size)[mesh.rank] for ids in data], lookahead=lookahead)
    check_parts(model, reference)


@on_ranks(3)
@pytest.mark.parametrize(("placement", "recipe"), crossed(["rows", "columns"], RECIPES))
def test_sparse_tables_are_those_of_one_process(recipe, placement):
    check_against_one_process(Words, recipe, dict.fromkeys(["words.weight", "tags.weight"], placement))


@on_ranks(2)
@pytest.mark.parametrize("placement", ["rows", "columns"])
@pytest.mark.parametrize("recipe", DENSE_RECIPES, ids=lambda recipe: recipe.__name__)
def test_tables_with_dense_gradients_are_those_of_one_process(recipe, placement):
    check_against_one_process(dense_words, recipe, placement)


@on_ranks(2)
@pytest.mark.parametrize("placement", ["rows", "columns"])
def test_tables_that_are_given_to_optimizers_after_distribute_are_those_of_one_process(placement):
    mesh = tulle.init(data=-1)
    model, reference = (build(Words, seed=0) for _ in range(2))
    optimizers = [torch.optim.Adagrad(one.out.parameters(), lr=0.1) for one in (model, reference)]
    tulle.distribute(model, optimizers[0], mesh, plan=dict.fromkeys(["words.weight", "tags.weight"], placement))
    data = batches(6, SAMPLES_A_RANK * mesh.size)
    for one, optimizer in zip((model, reference), optimizers, strict=True):
        mine = [ids.chunk(mesh.size)[mesh.rank] for ids in data] if one is model else data
        train(one, [optimizer], mine[:2])
        one.zero_grad()
        optimizer.add_param_group({"params": [one.tags.weight], "lr": 0.2})
        train(one, [optimizer, torch.optim.SparseAdam([one.words.weight], lr=0.05)], mine[2:])
    check_parts(model, reference)


@on_ranks(2)
@pytest.mark.parametrize("placement", ["rows", "columns"])
def test_an_optimizer_that_keeps_sums_from_its_making_may_be_made_after_distribute(placement):
    mesh = tulle.init(data=-1)
    model, reference = (build(Words, seed=0) for _ in range(2))
    unused = torch.optim.SGD(model.parameters(), lr=0.1)
    tulle.distribute(model, unused, mesh, plan=dict.fromkeys(["words.weight", "tags.weight"], placement))
    data = batches(STEPS, SAMPLES_A_RANK * mesh.size)
    train(reference, [torch.optim.Adagrad(reference.parameters(), lr=0.1)], data)
    mine = [ids.chunk(mesh.size)[mesh.rank] for ids in data]
    train(model, [torch.optim.Adagrad(model.parameters(), lr=0.1)], mine)
    check_parts(model, reference)


@on_ranks(1)
def test_one_rank_splits_nothing():
    check_against_one_process(Words, models.momentum, "rows", lookahead=True)


@on_ranks(4)
@pytest.mark.parametrize("placement", ["rows", pytest.param("columns", marks=pytest.mark.slow)])
@pytest.mark.parametrize("recipe", [models.adagrad, models.sparse_adam_and_adam], ids=lambda recipe: recipe.__name__)
def test_lookahead_changes_no_number(recipe, placement):
    check_against_one_process(Words, recipe, dict.fromkeys(["words.weight", "tags.weight"], placement), lookahead=True)


class WordModel(nn.Module):
    """A language model whose one table is looked up, and scores the next word where its rows lie."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(models.WORDS, models.WIDTH)
        self.hidden = nn.Linear(models.WIDTH, models.WIDTH)
        self.softmax = tulle.ShardedSoftmax(weight=self.words.weight, bias=True, label_smoothing=0.1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.softmax(torch.tanh(self.hidden(self.words(ids[:, :-1]))), ids[:, 1:])


@on_ranks(2, 3)
@pytest.mark.parametrize("plan", ["auto", "rows"])
@pytest.mark.parametrize("recipe", [models.momentum, models.adamw], ids=lambda recipe: recipe.__name__)
def test_a_table_that_is_tied_to_a_softmax_is_split_and_gives_the_numbers_of_one_process(recipe, plan):
    check_against_one_process(WordModel, recipe, plan, lookahead=True)


@on_ranks(2)
def test_a_large_output_layer_is_offered_a_softmax_where_its_rows_lie():
    mesh = tulle.init(data=-1)
    model = nn.Sequential(nn.Embedding(20_000, 4), nn.Linear(4, 20_000))
    plan = tulle.plan(model, torch.optim.SGD(model.parameters(), lr=0.1), mesh)
    assert "offered: 1 (Linear 4 x 20,000)" in plan.explain()
    assert tulle.Plan.from_json(plan.to_json()) == plan


def adagrad_from_a_sum(model):
    """Its state is there before the parameters have values."""
    return [torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.2)]


@on_ranks(1, 2, 3)
@pytest.mark.parametrize(
    ("placement", "recipe"), [("rows", adagrad_from_a_sum), ("columns", models.sgd), ("auto", models.sgd)]
)
def test_a_model_that_is_built_without_memory_has_the_numbers_of_one_process(placement, recipe):
    mesh = tulle.init(data=-1)
    data = batches(3, SAMPLES_A_RANK * mesh.size)
    torch.manual_seed(0)
    reference = Words()
    train(reference, recipe(reference), data)
    torch.manual_seed(mesh.rank)  # rank 0's numbers must win
    with tulle.deferred_init():
        model = Words()
    assert all(parameter.is_meta for parameter in model.parameters())
    model, optimizers = tulle.distribute(model, recipe(model), mesh, plan=placement)
    assert mesh.size == 1 or split_of(model.words.weight) is not None
    train(model, optimizers, [ids.chunk(mesh.size)[mesh.rank] for ids in data])
    theirs = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        split = split_of(parameter)
        torch.testing.assert_close(parameter, theirs[name] if split is None else split.take(theirs[name]))


class Pair(nn.Module):
    """Tables whose rows travel as one, but not in equal numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.many = nn.Embedding(600, 8, sparse=True)
        self.few = nn.Embedding(600, 8, sparse=True)

    def forward(self, many, few):
        return (self.many(many).sum() + self.few(few).sum()).square()


@on_ranks(2)
@pytest.mark.parametrize("placement", ["rows", "columns"])
def test_bytes_of_tables_that_travel_as_one_count_by_their_rows(placement):
    model = Pair()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = tulle.distribute(model, optimizer, tulle.init(data=-1), plan=placement)
    batch = torch.arange(600), torch.arange(0, 600, 10)
    sent = {}
    for ids in tulle.lookahead([batch] * 6):
        sent = traffic.take_labels() or sent  # of the step before, when there was one
        model(*ids).backward()
        optimizer.step()
    many, few = sent["many.weight"].bytes_sent, sent["few.weight"].bytes_sent
    assert 9 < many / few < 11


@on_ranks(3)
@pytest.mark.parametrize("is_sparse", [True, False])
@pytest.mark.parametrize("placement", ["rows", "columns"])
def test_a_mean_in_half_precision_is_finite_where_the_sum_is_not(placement, is_sparse):
    mesh = tulle.init(data=-1)
    words = nn.Embedding(models.WORDS, models.WIDTH, sparse=is_sparse, dtype=torch.float16)
    tulle.distribute(words, torch.optim.SGD(words.parameters(), lr=1e-4), mesh, plan={"weight": placement})
    words(torch.arange(models.WORDS)).mul(30_000).sum().backward()
    assert words.weight.grad.to_dense().abs().max() == 30_000
