"""Bad plans and schemes raise the same clear error on every rank."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import tulle
from models import Words, build
from raised_alike import every_rank_raises, last, sgd
from ranks import on_ranks
from tulle.cost import Network
from tulle.errors import PlanError


@on_ranks(1, 2)
@pytest.mark.parametrize("plan", ["zen", {"words.weight": "zen"}], ids=str)
def test_an_unknown_scheme(plan):
    mesh = tulle.init(data=-1)
    model = build(Words, 0)
    with every_rank_raises(PlanError, "unknown scheme 'zen', expected one of auto, ", found_by=0):
        tulle.distribute(model, sgd(model), mesh, plan=plan)


@on_ranks(2)
def test_a_misspelt_scheme_or_table_is_told_beside_what_was_meant():
    mesh = tulle.init(data=-1)
    model = build(Words, 0)
    for plan, meant in (("row", "rows"), ({"words.wieght": "rows"}, "words.weight")):
        with every_rank_raises(PlanError, f"; was {meant!r} meant?", found_by=0):
            tulle.distribute(model, sgd(model), mesh, plan=plan)


@on_ranks(1, 2)
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"scheme": "zen"}, "unknown scheme 'zen', expected one of auto, densify, allgather"),
        ({"op": "max"}, "unknown operation 'max', expected one of mean, sum"),
        ({"wire_dtype": "int3"}, "unknown wire_dtype 'int3', expected None or one of "),
    ],
    ids=["scheme", "op", "wire_dtype"],
)
def test_an_unknown_scheme_or_operation_of_an_all_reduce(options, text):
    axis = tulle.init(data=-1)["data"]
    with every_rank_raises(PlanError, text, found_by=0):
        tulle.sync.all_reduce(torch.ones(2, 2), axis, **options)
    with every_rank_raises(PlanError, text, found_by=last()):  # the others' are right
        tulle.sync.all_reduce(torch.ones(2, 2), axis, **(options if axis.rank == last() else {}))


@on_ranks(1, 2)
def test_a_plan_that_is_missing(tmp_path):
    mesh = tulle.init(data=-1)
    model = build(Words, 0)
    path = tmp_path / "plan.json"
    with every_rank_raises(PlanError, f"cannot read a plan from {str(path)!r}: ", found_by=0):
        tulle.distribute(model, sgd(model), mesh, plan=path)


@on_ranks(3)
def test_a_plan_that_is_missing_on_one_rank_only(tmp_path):
    mesh = tulle.init(data=-1)
    model = build(Words, 0)
    tulle.Plan({"data": mesh.size}).save(tmp_path / f"plan-{mesh.rank}.json")
    name = "no.json" if mesh.rank == last() else f"plan-{mesh.rank}.json"
    with every_rank_raises(PlanError, f"cannot read a plan from {str(tmp_path / 'no.json')!r}: ", found_by=last()):
        tulle.distribute(model, sgd(model), mesh, plan=tmp_path / name)


@on_ranks(1, 2)
def test_a_plan_of_another_model():
    mesh = tulle.init(data=-1)
    other = nn.Embedding(5, 4, sparse=True)
    plan = tulle.plan(other, sgd(other), mesh, sample=torch.tensor([1]))
    model = build(Words, 0)
    text = "the plan has a table 'weight', the model's tables with sparse gradients are: words.weight, tags.weight, nev"
    with every_rank_raises(PlanError, text, found_by=0):
        tulle.distribute(model, sgd(model), mesh, plan=plan)


@on_ranks(2)
def test_a_plan_of_another_mesh():
    mesh = tulle.init(data=-1)
    model = build(Words, 0)
    text = "the plan is for the mesh {'data': 8}, this one is {'data': 2}: make a plan for it"
    with every_rank_raises(PlanError, text, found_by=0):
        tulle.distribute(model, sgd(model), mesh, plan=tulle.Plan({"data": 8}))


@on_ranks(2)
def test_a_plan_that_no_mesh_can_have():
    mesh = tulle.init(data=-1)
    model = build(Words, 0)
    plan = tulle.Plan({"data": mesh.size}, bucket_bytes=-1)
    for given in (mesh, None):
        with every_rank_raises(PlanError, "the plan has bucket_bytes=-1, expected a positive number", found_by=0):
            tulle.distribute(model, sgd(model), given, plan=plan)


@on_ranks(3)
def test_ranks_with_different_plans():
    mesh = tulle.init(data=-1)
    model = build(Words, 0)
    plain = tulle.Plan({"data": mesh.size})
    network = Network(latency_s=1e-4, bandwidth_bytes_per_s=1e9)
    apart = {
        "a plan, rank 0 'auto' with wire_dtype=None: give all": ("densify", "auto"),
        "another plan than rank 0, bucket_bytes: 8 against 26214400; micro_batches: 2 against 1: give": (
            replace(plain, bucket_bytes=8, micro_batches=2),
            plain,
        ),
        "the plan of rank 0 with another network: give all ranks the same": (replace(plain, network=network), plain),
    }
    for text, (lasts, others) in apart.items():
        with every_rank_raises(PlanError, f"rank {last()} was given {text}"):
            tulle.distribute(model, sgd(model), mesh, plan=lasts if mesh.rank == last() else others)
