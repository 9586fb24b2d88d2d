"""A plan is a value: it is saved, read back, explained, and refused where it does not belong."""

import json
import math
import os
import re
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import tulle
from ranks import on_ranks
from tulle import Plan
from tulle.cost import Cost, Network
from tulle.errors import PlanError
from tulle.plan import BUCKET_BYTES, Memory, Prediction, Space, TablePlan
from tulle.sync import SCHEMES

WORDS = TablePlan(
    "words.weight",
    8000,
    256,
    "allgather",
    "5.20% of 8,000 rows touched",
    density=0.052,
    candidates={"allgather": Cost(1_280_000, 3, 0.0012), "densify": Cost(12_300_000, 6, 0.0123)},
)
TAGS = TablePlan("tags.weight", 10, 4, "auto", "to be chosen by the first gradients")
MEASURED = Network(
    3e-4,
    1.2e9,
    all_reduce_latency_s=8e-4,
    all_reduce_bytes_per_s=1.1e9,
    sum_bytes_per_s=4e9,
    copy_bytes_per_s=6e9,
    local_ranks=4,
    inside=Network(1e-5, 9e9),
    across=Network(2e-4, 3e8, sum_bytes_per_s=4e9),
)
AXES = Plan(
    {"data": 2, "pipe": 2, "model": 2},
    stages={"embed": 0, "h.0": 0, "h.1": 1},
    pipeline_schedule="gpipe",
    micro_batches=4,
    tensor_parallel=("h.0.mlp",),
    memory=Memory(shard_optimizer=True, recompute=("h.0",), offload=("h.1",), precision="bf16"),
)
MODULES = ("", "embed", "h", "h.0", "h.0.mlp", "h.1")
PLAN = Plan({"data": 4}, (WORDS, TAGS), bucket_bytes=1 << 20, network=MEASURED)
TABLES = {"words.weight": (8000, 256), "tags.weight": (10, 4)}


@pytest.mark.parametrize(
    "plan",
    [PLAN, Plan({"data": 1}), Plan({"data": 2, "pipe": 1}, (TAGS,)), AXES],
    ids=["full", "empty", "two axes", "three axes"],
)
def test_a_plan_comes_back_from_its_file_as_it_was(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert Plan.load(str(tmp_path / "plan.json")) == plan


def test_plans_that_are_alike_are_one_key(tmp_path):
    predicted = Prediction(32, 4, 0.1, {"forward": 0.1}, {}, (10**9,), bound_s=0.1)
    for plan in (PLAN, AXES, replace(PLAN, prediction=predicted)):
        plan.save(tmp_path / "plan.json")
        assert {plan: "kept"}[Plan.load(tmp_path / "plan.json")] == "kept"
        assert len({plan, replace(plan, bucket_bytes=1), replace(plan, mesh={"data": 8})}) == 3
    assert hash(replace(PLAN, tables=[WORDS, TAGS], offers=[])) == hash(PLAN)
    assert {predicted, replace(predicted)} == {predicted}


numbers = st.floats(0, 1e12, allow_nan=False)
costs = st.builds(Cost, bytes=st.integers(0, 10**15), messages=st.integers(0, 1000), seconds=numbers)
tables = st.builds(
    TablePlan,
    name=st.text(min_size=1),
    rows=st.integers(0, 10**10),
    width=st.integers(0, 10**5),
    scheme=st.sampled_from(["auto", *SCHEMES]),
    reason=st.text(),
    density=st.none() | st.floats(0, 1),
    candidates=st.none() | st.dictionaries(st.sampled_from([*SCHEMES]), costs, min_size=1),
)
above = st.floats(0, 1e12, allow_nan=False, exclude_min=True)
rates = above | st.just(math.inf)
flat = st.builds(Network, numbers, above, st.none() | numbers, st.none() | above, rates, rates)
networks = st.builds(
    replace,
    flat,
    local_ranks=st.integers(1, 64),
    inside=st.none() | flat,
    across=st.none() | flat,
)


@given(
    st.builds(
        Plan,
        mesh=st.dictionaries(st.text(min_size=1), st.integers(1, 10**6), min_size=1),
        tables=st.lists(tables, max_size=4).map(tuple),
        bucket_bytes=st.integers(1, 2**40),
        network=st.none() | networks,
    )
)
def test_every_plan_comes_back_from_json_as_it_was(plan):
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_the_file_has_the_fields_that_reports_read(tmp_path):
    PLAN.save(tmp_path / "plan.json")
    parsed = json.loads((tmp_path / "plan.json").read_text())
    assert set(parsed) == {"format", *(field.name for field in fields(Plan))}
    assert (parsed["format"], parsed["mesh"]) == (1, {"data": 4})
    assert set(parsed["network"]) == {field.name for field in fields(Network)}
    assert (parsed["network"]["latency_s"], parsed["network"]["bandwidth_bytes_per_s"]) == (3e-4, 1.2e9)
    assert parsed["network"]["inside"]["bandwidth_bytes_per_s"] == 9e9
    words = parsed["tables"][0]
    assert (words["name"], words["rows"], words["width"], words["scheme"]) == ("words.weight", 8000, 256, "allgather")
    assert (words["reason"], words["density"]) == (WORDS.reason, 0.052)
    assert words["candidates"][0] == {"scheme": "allgather", "bytes": 1_280_000, "messages": 3, "seconds": 0.0012}


def test_a_plan_that_is_written_again_replaces_the_old_one_and_leaves_nothing_beside(tmp_path):
    Plan({"data": 2}).save(tmp_path / "plan.json")
    PLAN.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == PLAN
    assert os.listdir(tmp_path) == ["plan.json"]


def test_an_axis_of_one_rank_need_not_be_there():
    replace(PLAN, mesh={"data": 4, "model": 1}).check({"data": 4}, TABLES)
    PLAN.check({"data": 4, "pipe": 1}, TABLES)


def test_a_plan_for_this_model_and_mesh_passes():
    PLAN.check({"data": 4}, TABLES)
    PLAN.check({"data": 4}, TABLES | {"more.weight": (5, 5)})


@pytest.mark.parametrize(
    ("mesh", "tables", "text"),
    [
        ({"data": 2}, TABLES, "the plan is for the mesh {'data': 4}, this one is {'data': 2}: make a plan for it"),
        ({"data": 4, "pipe": 2}, TABLES, "this one is {'data': 4, 'pipe': 2}"),
        (
            {"data": 4},
            {"words.weight": (8000, 256), "labels.weight": (10, 4)},
            "a table 'tags.weight', the model's tables with sparse gradients are: words.weight, labels.weight",
        ),
        ({"data": 4}, {}, "a table 'words.weight', the model's tables with sparse gradients are: none"),
        (
            {"data": 4},
            TABLES | {"words.weight": (8001, 256)},
            "the plan has 'words.weight' with 8000 x 256, the model has it with 8001 x 256",
        ),
    ],
)
def test_a_plan_for_another_model_or_mesh_is_refused(mesh, tables, text):
    with pytest.raises(PlanError, match=re.escape(text)):
        PLAN.check(mesh, tables)


def test_a_plan_that_has_a_table_twice_is_refused():
    twice = replace(PLAN, tables=(PLAN.tables[0], replace(PLAN.tables[0], scheme="ring")))
    with pytest.raises(PlanError, match=r"the table 'words\.weight' twice"):
        twice.check({"data": 4}, {"words.weight": (8000, 256)})


def test_a_plan_explains_each_table_and_its_candidates():
    assert replace(PLAN, bucket_bytes=BUCKET_BYTES).explain().splitlines() == [
        "mesh data=4, dense gradients all-reduced in buckets of 25 MiB",
        "words.weight (8,000 x 256): allgather: 5.20% of 8,000 rows touched",
        "  allgather                1.200 ms     1.280 MB    3 messages",
        "  densify                 12.300 ms    12.300 MB    6 messages",
        "tags.weight (10 x 4): auto: to be chosen by the first gradients",
    ]


def test_costs_of_tables_that_travel_as_one_are_told_once():
    one = PLAN.tables[0]
    other = replace(one, name="other.weight", measured=Cost(1_280_000, 3, 0.0013))
    told = replace(PLAN, tables=(one, replace(one, name="tags.weight"), other)).explain().splitlines()[1:]
    costs = ["allgather", "densify"]
    names = ["words.weight", "tags.weight", *costs, "other.weight", *costs, "measured"]
    assert [line.split()[0] for line in told] == names


def test_a_plan_for_no_tables_explains_its_mesh():
    text = Plan({"data": 2, "pipe": 1}, bucket_bytes=1 << 19).explain()
    assert text == "mesh data=2, pipe=1, dense gradients all-reduced in buckets of 0.5 MiB"


@pytest.mark.parametrize("plan", [Plan({"data": 1, "pipe": 2}), Plan({"data": 2}, memory=Memory(full_shard=True))])
def test_a_plan_speaks_of_buckets_only_where_there_are_some(plan):
    assert "buckets" not in plan.explain()


def test_a_plan_explains_what_it_does_along_each_axis():
    assert AXES.explain().splitlines()[1:] == [
        "stages (gpipe, 4 micro-batches): 0: embed, h.0; 1: h.1",
        "split over axis model: h.0.mlp",
        "optimizer state shared out over axis data",
        "recomputed in backward: h.0",
        "activations that wait on the host: h.1",
        "parameters and gradients in bf16, masters in their own dtype",
    ]
    assert Plan({"data": 1, "pipe": 2, "model": 2}, stages_per_rank=2).explain().splitlines()[1:] == [
        "stages (1f1b): by profile, 2 a rank",
        "split over axis model: all that is registered",
    ]


def test_a_single_name_stands_for_a_list_of_it():
    plan = Plan({"model": 2}, tensor_parallel="h.0", memory=Memory(recompute="h.0", offload=["h.1"]))
    assert plan == Plan({"model": 2}, tensor_parallel=("h.0",), memory=Memory(recompute=("h.0",), offload=("h.1",)))
    written = plan.to_json() | {"tensor_parallel": "h.0", "memory": {"recompute": "h.0", "offload": "h.1"}}
    assert Plan.read(written) == plan
    assert Space(schedules="step", pipeline_schedules="gpipe") == Space(
        schedules=("step",), pipeline_schedules=("gpipe",)
    )
    with pytest.raises(TypeError, match="tulle was given 3, expected names, or one"):
        Memory(recompute=3)
    with pytest.raises(TypeError, match=r"given \{'h.0': 'column'\}, expected names, or one"):
        Plan({"model": 2}, tensor_parallel={"h.0": "column"})


@pytest.mark.parametrize("wrong", [nn.Linear, [nn.Linear], {"up": "column"}], ids=str)
def test_what_is_split_is_said_by_names_alone(wrong):
    with pytest.raises(TypeError, match="expected names, or one; of modules those of named_modules"):
        Plan({"model": 2}, tensor_parallel=wrong)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"memory": {"full_shard": True}}, "memory={'full_shard': True}, expected a tulle.Memory"),
        ({"tables": {"words.weight": "rows"}}, "expected a tuple of TablePlan"),
        ({"mesh": [4]}, "expected sizes of axes by name"),
        ({"memory": Memory(precision="float8")}, "the plan has the precision 'float8'"),
        ({"wire_dtype": "int3"}, "unknown wire_dtype 'int3'"),
    ],
)
def test_what_is_no_plan_is_not_written(wrong, text, tmp_path):
    with pytest.raises(PlanError, match=text):
        Plan(**{"mesh": {"data": 2}, **wrong}).save(tmp_path / "plan.json")
    assert not list(tmp_path.iterdir())


@on_ranks(2)
def test_a_mesh_stands_for_the_sizes_of_its_axes():
    mesh = tulle.init(data=-1)
    assert Plan(mesh) == Plan({"data": mesh.size})
    assert Plan(mesh).explain() == Plan({"data": mesh.size}).explain()


def test_a_dtype_of_torch_stands_for_its_name():
    assert Plan({"data": 2}, wire_dtype=torch.bfloat16) == Plan({"data": 2}, wire_dtype="bfloat16")


def test_plans_say_what_differs():
    assert AXES.diff(AXES) == []
    assert PLAN.diff(replace(PLAN, tables=(WORDS,), network=None)) == ["tags.weight: auto against not there"]
    assert AXES.diff(replace(AXES, stages={}, memory=Memory())) == [
        "stages: {'embed': 0, 'h.0': 0, 'h.1': 1} against {}",
        f"memory: {AXES.memory} against {Memory()}",
    ]
    assert AXES.diff(replace(AXES, stages={"embed": 0, "h.0": 1})) == [
        "stages: {'h.0': 0, 'h.1': 1} against {'h.0': 1}",
    ]


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (replace(AXES, mesh={"data": 8}), "the plan has stages, but its mesh has no axis 'pipe'"),
        (replace(AXES, mesh={"pipe": 8}), "the plan splits 'h.0.mlp', but its mesh has no axis 'model'"),
        (replace(AXES, stages={"h.0": -1}), "'h.0' at stage -1, expected a number from 0"),
        (
            replace(AXES, stages={"h.7": 1}),
            "the plan's stages names 'h.7', which is not a module of the model: it has embed, h, h.0, ",
        ),
        (replace(AXES, tensor_parallel=("mlp",)), "the plan's tensor_parallel names 'mlp'"),
        (replace(AXES, memory=Memory(recompute=("h.9",))), "the plan's memory names 'h.9'"),
        (replace(AXES, micro_batches=0), "micro_batches=0, expected a positive number"),
        (replace(AXES, bucket_bytes=-1), "bucket_bytes=-1, expected a positive number"),
        (replace(AXES, bucket_bytes=2.5e7), "bucket_bytes=25000000.0, expected a positive number"),
        (replace(AXES, stages_per_rank=True), "stages_per_rank=True, expected a positive number"),
        (replace(AXES, stages={"h.0": "last"}), "the plan has 'h.0' at stage 'last', expected a number from 0"),
        (replace(AXES, stages=["h.0"]), "the plan has stages=['h.0'], expected stages of modules by name"),
        (
            replace(AXES, tables={"words": "rows"}),
            "the plan has tables={'words': 'rows'}, expected a tuple of TablePlan",
        ),
        (replace(AXES, tables=("words",)), "the plan has 'words' among its tables, expected a TablePlan"),
        (replace(AXES, tables=(replace(TAGS, scheme="zen"),)), "unknown scheme 'zen', expected one of auto, rows, "),
        (replace(AXES, memory={"full_shard": True}), "memory={'full_shard': True}, expected a tulle.Memory"),
        (replace(AXES, memory=Memory(full_shard="no")), "the plan has full_shard='no', expected True, False or 'host'"),
    ],
)
def test_a_plan_that_does_not_fit_the_axes_is_refused(plan, text):
    with pytest.raises(PlanError, match=re.escape(text)):
        plan.check(plan.mesh, {}, MODULES)
    AXES.check(AXES.mesh, {}, MODULES)
