"""Split tables: on any number of ranks, by rows or columns, the numbers of one process."""

import pytest
from torch import nn

import models
import tulle
from models import Words, batches, build
from ranks import on_ranks
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
        assert parameter.shape == expected.shape
        worst = (parameter - expected).abs().max().item() / max(1e-3, expected.abs().max().item())
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


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("placement", ["rows", "columns"])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.__name__)
def test_sparse_tables_are_those_of_one_process(recipe, placement):
    check_against_one_process(Words, recipe, dict.fromkeys(["words.weight", "tags.weight"], placement))


@on_ranks(2, 3)
@pytest.mark.parametrize("placement", ["rows", "columns"])
@pytest.mark.parametrize("recipe", DENSE_RECIPES, ids=lambda recipe: recipe.__name__)
def test_tables_with_dense_gradients_are_those_of_one_process(recipe, placement):
    check_against_one_process(dense_words, recipe, placement)


@on_ranks(2, 3)
@pytest.mark.parametrize("placement", ["rows", "columns"])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.__name__)
def test_lookahead_changes_no_number(recipe, placement):
    check_against_one_process(Words, recipe, dict.fromkeys(["words.weight", "tags.weight"], placement), lookahead=True)
