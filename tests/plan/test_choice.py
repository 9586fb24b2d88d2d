"""From what was asked for, or measured, to a plan: each kind of argument, and the choice by cost."""

import json
import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tulle import Plan
from tulle.cost import Characteristics, Network
from tulle.errors import PlanError
from tulle.plan import Candidate, TablePlan, plan_as_given, plan_by_cost, plan_for_later
from tulle.sync import SCHEMES
from tulle.sync.schemes import ALIKE, FLAT

MESH = {"data": 2}
SHAPES = {"words.weight": (1000, 8), "tags.weight": (10, 4)}
GIVEN = Plan(MESH, (TablePlan("tags.weight", 10, 4, "densify", "given"),))
NETWORK = Network(latency_s=5e-4, bandwidth_bytes_per_s=1.2e8)


def test_auto_is_left_to_the_measurement():
    assert plan_as_given("auto", MESH, SHAPES) is None


def test_one_scheme_is_for_all_tables():
    plan = plan_as_given("densify", MESH, SHAPES)
    assert plan.schemes == {"words.weight": "densify", "tags.weight": "densify"}
    assert (plan.mesh, plan.network) == (MESH, None)
    assert [(table.rows, table.width) for table in plan.tables] == [(1000, 8), (10, 4)]


def test_a_mapping_is_by_table_and_leaves_the_others_to_auto():
    plan = plan_as_given({"tags.weight": "allgather"}, MESH, SHAPES)
    assert plan.schemes == {"words.weight": "auto", "tags.weight": "allgather"}


def test_a_mapping_may_name_a_table_by_its_module():
    plan = plan_as_given({"tags": "allgather"}, MESH, SHAPES)
    assert plan.schemes == {"words.weight": "auto", "tags.weight": "allgather"}
    with pytest.raises(PlanError, match="the plan names 'tags'"):  # nothing is dropped of what was said twice
        plan_as_given({"tags": "allgather", "tags.weight": "densify"}, MESH, SHAPES)


def test_who_gives_stages_for_schemes_is_told_where_they_go():
    with pytest.raises(PlanError, match=r"the plan names 'encoder', .*; stages of modules go into tulle\.Plan\("):
        plan_as_given({"encoder": 0, "decoder": 1}, MESH, SHAPES)


def test_a_plan_stays_as_it_is_also_as_json():
    assert plan_as_given(GIVEN, MESH, SHAPES) is GIVEN
    assert plan_as_given(GIVEN.to_json(), MESH, SHAPES) == GIVEN


@pytest.mark.parametrize("kind", [str, Path])
def test_a_path_is_loaded(kind, tmp_path):
    GIVEN.save(tmp_path / "plan.json")
    assert plan_as_given(kind(tmp_path / "plan.json"), MESH, SHAPES) == GIVEN


def test_a_path_object_may_have_any_suffix(tmp_path):
    GIVEN.save(tmp_path / "plan.txt")
    assert plan_as_given(tmp_path / "plan.txt", MESH, SHAPES) == GIVEN


def test_a_model_without_tables_takes_any_scheme():
    assert plan_as_given("allgather", MESH, {}) == Plan(MESH)


KNOWN = f"expected one of auto, rows, columns, the path of a saved plan (*.json), {', '.join(SCHEMES)}"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("zen", f"unknown scheme 'zen', {KNOWN}"),
        ("plan.txt", f"unknown scheme 'plan.txt', {KNOWN}"),
        ("", "unknown scheme ''"),
        ("no-such-plan.json", "cannot read a plan from 'no-such-plan.json'"),
        ({"tags.weight": "zen"}, f"unknown scheme 'zen', expected one of auto, rows, columns, {', '.join(SCHEMES)}"),
        ({"labels": "densify"}, "names 'labels', the model's tables with sparse gradients are: words.weight, tags.wei"),
        (3, "plan was given a int, expected 'auto', a scheme, a mapping, a Plan or a path"),
        (None, "plan was given a NoneType, expected"),
        (Plan({"data": 3}), "the plan is for the mesh {'data': 3}, this one is {'data': 2}"),
        (Plan(MESH, (TablePlan("words.weight", 1, 8, "auto"),)), "'words.weight' with 1 x 8"),
    ],
)
def test_what_stands_for_no_plan_is_refused(given, text):
    with pytest.raises(PlanError, match=re.escape(text)):
        plan_as_given(given, MESH, SHAPES)


def test_a_table_in_a_model_that_has_none_is_refused():
    with pytest.raises(PlanError, match=r"names 'words', the model's tables with sparse gradients are: none$"):
        plan_as_given({"words": "densify"}, MESH, {})


def test_later_means_auto_for_every_table():
    plan = plan_for_later(MESH, SHAPES)
    assert set(plan.schemes.values()) == {"auto"}
    assert plan.tables[0].reason == "to be chosen by the first gradients"


def test_few_rows_travel_as_rows_and_a_full_table_is_reduced():
    looks = {
        "few": Candidate(Characteristics(500_000, 128, 4, (960, 970, 955, 961))),
        "full": Candidate(Characteristics(500, 64, 4, (500, 500, 499, 500))),
    }
    plan = plan_by_cost({"data": 4}, looks, NETWORK, 4)
    few, full = plan.tables
    assert full.candidates[full.scheme].bytes < 1.01 * full.candidates["densify"].bytes
    assert full.candidates[full.scheme].bytes < 0.6 * full.candidates["allgather"].bytes
    assert full.candidates[full.scheme].seconds <= full.candidates["densify"].seconds
    assert few.candidates[few.scheme].bytes < few.candidates["densify"].bytes / 100
    assert plan.network == NETWORK
    assert (few.rows, few.width) == (500_000, 128)
    assert few.density == pytest.approx(961.5 / 500_000)
    assert few.reason.startswith(f"0.19% of 500,000 rows touched a rank and step, 4 ranks: {few.scheme} predicted at ")
    assert set(few.candidates) == set(FLAT)


@given(
    num_rows=st.integers(1, 10**5),
    width=st.integers(1, 1024),
    shares=st.lists(st.floats(0, 1), min_size=2, max_size=16),
    latency_s=st.floats(1e-6, 1e-1),
    bandwidth=st.floats(1e6, 1e11),
)
def test_the_choice_is_the_simplest_candidate_of_about_the_least_seconds(num_rows, width, shares, latency_s, bandwidth):
    looks = Characteristics(num_rows, width, 4, tuple(round(share * num_rows) for share in shares))
    network = Network(latency_s, bandwidth)
    [table] = plan_by_cost({"data": len(shares)}, {"words": Candidate(looks)}, network, len(shares)).tables
    seconds = {name: scheme.cost(looks, network, len(shares)).seconds for name, scheme in FLAT.items()}
    assert seconds[table.scheme] <= ALIKE * min(seconds.values())
    simpler = list(seconds)[: list(seconds).index(table.scheme)]
    assert all(seconds[name] > ALIKE * min(seconds.values()) for name in simpler), "of what is alike, the simplest"
    assert {name: cost.seconds for name, cost in table.candidates.items()} == seconds


def test_a_plan_of_one_process_is_strict_json():
    alone = Network(latency_s=0.0, bandwidth_bytes_per_s=math.inf)
    plan = plan_by_cost({"data": 1}, {"words": Candidate(Characteristics(100, 8, 4, (7,)))}, alone, 1)
    # Other programs than Python read it, and JSON has no infinity.
    text = json.dumps(plan.to_json(), allow_nan=False)
    assert Plan.from_json(json.loads(text)) == plan


MANY = Characteristics(132_777, 512, 4, (1500,) * 8)


def test_a_table_is_split_where_that_is_predicted_to_take_clearly_less():
    tables = {
        "words": Candidate(MANY, ("rows", "columns")),
        "tags": Candidate(Characteristics(10, 4, 4, (3,) * 8), ("rows", "columns")),
        "out": Candidate(MANY, ("rows", "columns"), is_dense=True),
        "tied": Candidate(MANY, (), is_dense=True),
    }
    plan = plan_by_cost({"data": 8}, tables, NETWORK, 8)
    assert plan.placements == {"words": "rows", "out": "rows"}
    assert "tied" not in plan.schemes, "dense gradients have no scheme"
    words = plan.tables[0]
    assert words.candidates["rows"].seconds < 0.8 * min(words.candidates[name].seconds for name in FLAT)
    assert "split by rows" in words.reason
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))).placements == plan.placements


def test_a_placement_is_given_by_table_or_for_all_also_for_tables_with_dense_gradients():
    dense = {"out.weight": (500, 8)}
    assert plan_as_given("rows", MESH, SHAPES, dense).placements == dict.fromkeys([*SHAPES, *dense], "rows")
    assert plan_as_given({"out.weight": "columns"}, MESH, SHAPES, dense).placements == {"out.weight": "columns"}
    with pytest.raises(PlanError, match=r"those that can be split besides: out.weight; was 'out.weight' meant\?"):
        plan_as_given({"out.wieght": "rows"}, MESH, SHAPES, dense)
    assert plan_as_given({"out.weight": "allgather"}, MESH, SHAPES, dense).schemes["out.weight"] == "allgather"
    with pytest.raises(PlanError, match=r"unknown scheme 'colums', .*was 'columns' meant"):
        plan_as_given({"out.weight": "colums"}, MESH, SHAPES, dense)
