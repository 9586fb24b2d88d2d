"""The promise of exactness for split tables: both splits, every optimizer, any ranks, ahead of time or late."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import combinations, product
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import models
import tulle
import tulle.engine.split_tables
from models import batches, build, difference_of_parts
from rank_process import patches
from ranks import run_on_ranks

STEPS = 10
SAMPLES_A_RANK = 3
WIDTH = 9  # of which eight ranks have a column each, and one two
TOLERANCE = 1e-12


class Tables(nn.Module):
    """A table of words, and one of pairs in bags, with gradients of one kind."""

    def __init__(self, *, is_sparse: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(models.WORDS, WIDTH, sparse=is_sparse, padding_idx=3)
        self.pairs = nn.EmbeddingBag(models.WORDS, WIDTH, sparse=is_sparse, mode="mean")
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, ids: Tensor) -> Tensor:
        """Mean loss of a batch `[samples, length]`."""
        return self.out(torch.tanh(self.words(ids).sum(1) + self.pairs(ids[:, 1:]))).pow(2).mean()


class Tied(nn.Module):
    """A language model of one table, which also scores the next word where its rows lie."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(models.WORDS, WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.softmax = tulle.ShardedSoftmax(weight=self.words.weight, bias=True)

    def forward(self, ids: Tensor) -> Tensor:
        """Mean loss of a batch `[samples, length]`."""
        return self.softmax(torch.tanh(self.hidden(self.words(ids[:, :-1]))), ids[:, 1:])


def sparse() -> nn.Module:
    return Tables(is_sparse=True)


def dense() -> nn.Module:
    return Tables(is_sparse=False)


class Case(NamedTuple):
    """One way to train."""

    kind: Callable[[], nn.Module]
    recipe: Callable[[nn.Module], list[Optimizer]]
    placement: str
    ranks: int
    ahead: bool
    schedule: str

    def __str__(self) -> str:
        how = f"{self.placement}-{'ahead' if self.ahead else 'as_asked'}-{self.schedule}"
        return f"{self.kind.__name__}-{self.recipe.__name__}-{how}-{self.ranks}_ranks"


RECIPES = {
    sparse: [models.momentum, models.adagrad, models.sparse_adam_and_adam],
    dense: [models.momentum, models.adagrad, models.adam, models.adamw],
    Tied: [models.momentum, models.adagrad, models.adam, models.adamw],
}


def legal() -> Iterator[Case]:
    """All ways to train; a table over which a softmax is taken is split by rows."""
    for kind, recipes in RECIPES.items():
        placements = ["rows"] if kind is Tied else ["rows", "columns"]
        for combination in product(recipes, placements, [2, 3, 4, 8], [True, False], ["read", "step"]):
            yield Case(kind, *combination)


def pairs_of(case: Case) -> set[object]:
    """Each two of its values, with what they are values of."""
    return {*combinations(enumerate(case), 2)}


def covering(cases: Iterable[Case]) -> list[Case]:
    """Few of the cases, in which every pair of values occurs that occurs in any: always the one with most new pairs."""
    cases = [*cases]
    wanted = set().union(*map(pairs_of, cases))
    chosen: list[Case] = []
    while wanted:
        chosen.append(max(cases, key=lambda case: len(pairs_of(case) & wanted)))
        wanted -= pairs_of(chosen[-1])
    return chosen


def train(model, optimizers, data: Iterable[Tensor]) -> None:
    for ids in data:
        model(ids).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def check(case: Case) -> None:
    """Train in one way, and in one process; compare parameters and state."""
    mesh = tulle.init(data=-1)
    patches.setattr(tulle.engine.split_tables, "WORTH_S", 0.0)  # small tables never pay
    data = batches(STEPS, SAMPLES_A_RANK * mesh.size)
    reference, model = build(case.kind, 0), build(case.kind, mesh.rank)
    theirs, ours = case.recipe(reference), case.recipe(model)
    train(reference, theirs, data)
    plan = tulle.plan(model, ours, mesh)
    names = [name for name in ("words.weight", "pairs.weight") if name.split(".")[0] in dict(model.named_children())]
    plan = plan.with_rows_split({name: (models.WORDS, WIDTH) for name in names}, "a test")
    tables = [replace(table, scheme=case.placement) if table.name in names else table for table in plan.tables]
    tulle.distribute(model, ours, mesh, plan=replace(plan, tables=tuple(tables), schedule=case.schedule))
    shares = [ids.chunk(mesh.size)[mesh.rank] for ids in data]
    train(model, ours, tulle.lookahead(shares) if case.ahead else shares)
    difference, name = difference_of_parts(model, ours, reference, theirs)
    assert difference < TOLERANCE, f"{name} differs by {difference:.1e}"


COVERING = covering(legal())


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] if case.ranks > 2 else [], id=str(case)) for case in COVERING]
)
def test_parameters_and_state_are_those_of_one_process(case):
    run_on_ranks(case.ranks, check, case=case)


def test_a_few_cases_hold_every_pair_of_values():
    assert set().union(*map(pairs_of, COVERING)) == set().union(*map(pairs_of, legal()))
    assert len(COVERING) < 25 < len([*legal()])
