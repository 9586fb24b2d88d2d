"""The recommender example: its generated clicks, its measure, and that ranks and plans give the same of it."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import tulle
from ranks import run_on_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = "--most-rows 300 --steps 8 --valid-every 4 --batch 240 --valid 500 --width 5 --hidden 8 --learning-rate 0.02"


@pytest.fixture(scope="module")
def recommend() -> Any:
    return _example()


def _example() -> Any:
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    return importlib.import_module("03_recommend")


# The clicks


def test_clicks_are_a_function_of_their_number_and_the_seed(recommend: Any):
    drawn = [recommend.Clicks([50, 7], seed).draw(number, 40) for seed, number in ((1, 5), (1, 5), (1, 6), (2, 5))]
    assert all(torch.equal(one, other) for one, other in zip(drawn[0], drawn[1], strict=True))
    for other in drawn[2:]:
        assert not torch.equal(drawn[0][0], other[0])


def test_few_categories_are_met_often_and_every_table_is_large_enough(recommend: Any):
    rows = [3, 1000, 10131227]
    ids, _, clicked = recommend.Clicks(rows, 1).draw(0, 20_000)
    assert [int(column.min()) for column in ids.T] == [0, 0, 0]
    assert all(int(column.max()) < count for column, count in zip(ids.T, rows, strict=True))
    assert (ids[:, 1] == 0).float().mean() == pytest.approx(0.1, abs=0.02)  # log 2 / log 1001
    assert 0.2 < clicked.mean() < 0.5


def test_what_comes_of_a_click_can_be_learned_from_what_is_seen(recommend: Any):
    clicks = recommend.Clicks([50] * 26, 1)
    ids, numbers, clicked = clicks.draw(0, 5000)
    assert recommend.auc(clicks.truth(ids, numbers), clicked) > 0.8
    assert recommend.auc(clicks.truth(ids.flip(0), numbers.flip(0)), clicked) == pytest.approx(0.5, abs=0.03)


# The measure and the model


def test_auc_is_the_share_of_pairs_in_order(recommend: Any):
    generator = torch.manual_seed(0)
    scores = torch.randint(6, (40,), generator=generator).float()  # so that there are ties
    labels = torch.randint(2, (40,), generator=generator).float()
    clicked, others = scores[labels == 1, None], scores[labels == 0]
    expected = ((clicked > others).double() + 0.5 * (clicked == others)).mean()
    assert recommend.auc(scores, labels) == pytest.approx(expected.item(), rel=1e-12)


def test_the_factorization_is_the_sum_over_pairs(recommend: Any):
    vectors = torch.randn(4, 5, 3, dtype=torch.float64)
    expected = sum((vectors[:, i] * vectors[:, j]).sum(1) for j in range(5) for i in range(j))
    torch.testing.assert_close(recommend.factorization(vectors), expected)


# The whole


def measured_aucs(arguments: str) -> list[float]:
    """What the example measures on this rank."""
    measured: list[float] = []

    def log(**values: Any) -> None:
        measured.extend(values[name] for name in values if name == "valid_auc")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["03_recommend.py", *arguments.split()])
        patch.setattr(tulle, "log", log)
        _example().main()
    return measured


def test_all_ranks_and_plans_give_one_auc_and_it_rises():
    expected = run_on_ranks(1, measured_aucs, arguments=SMALL)[0]
    assert 0.5 < expected[0] < expected[1]
    for size, plan in ((2, "rows"), (2, "allgather"), (3, "columns")):
        for measured in run_on_ranks(size, measured_aucs, arguments=f"{SMALL} --plan {plan}"):
            assert measured == pytest.approx(expected, abs=2e-4)  # a pair of nearly equal scores may change places
