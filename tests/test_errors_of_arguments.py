"""What is of another type than a function takes is refused by name, before anything is sent."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import tulle
from raised_alike import every_rank_raises, sgd
from ranks import on_ranks
from tulle.cost import Network
from tulle.errors import CheckpointError, GradientError, MeshError, ModelError, PlanError, TulleError

CLIPPED = "expected a model, a parameter, or several: model, or model.parameters()"
MODEL, SAMPLE = nn.Linear(2, 1), torch.ones(4, 2)
BY_HEADS = tulle.Plan({"data": 2}, memory=tulle.Memory(recompute=("heads",)))
Call = Callable[[], object]


def of_a_step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).sum()


GIVEN: list[tuple[type[TulleError], str, Call]] = [
    (PlanError, "micro_batches=True, expected a positive number", lambda: tulle.step(micro_batches=True)),
    (PlanError, "decorates a step function, but was given 3", lambda: tulle.step(micro_batches=2)(3)),
    (PlanError, "split=3, expected dimensions by names", lambda: tulle.step(micro_batches=2, split=3)),
    (PlanError, "split={'batch': '1'}, expected a dimension", lambda: tulle.step(split={"batch": "1"})),
    (PlanError, "given True, expected the number of a stage", lambda: tulle.stage(True).__enter__()),
    (GradientError, f"given a int, {CLIPPED}", lambda: tulle.clip_grad_norm_(3, 1.0)),
    (GradientError, f"given a SGD, {CLIPPED}", lambda: tulle.clip_grad_norm_(sgd(MODEL), 1.0)),
    (
        GradientError,
        f"given a tuple among the parameters, {CLIPPED}",
        lambda: tulle.clip_grad_norm_(MODEL.named_parameters(), 1.0),
    ),
    (GradientError, "max_norm='1', expected a number", lambda: tulle.clip_grad_norm_(MODEL, "1")),
    (GradientError, "norm_type='two', expected the order of a norm", lambda: tulle.clip_grad_norm_(MODEL, 1.0, "two")),
    (MeshError, "a int as mesh, expected what tulle.init returns", lambda: tulle.estimate(MODEL, SAMPLE, 3)),
    (MeshError, "data='2', expected a positive number", lambda: tulle.estimate(MODEL, SAMPLE, {"data": "2"})),
    (MeshError, "date=2, expected the axes 'data', 'pipe'", lambda: tulle.estimate(MODEL, SAMPLE, {"date": 2})),
    (PlanError, "plan=3, expected a Plan, its JSON", lambda: tulle.estimate(MODEL, SAMPLE, {"data": 2}, 3)),
    (
        PlanError,
        "the plan's tensor_parallel names 'heads', which is not a module of the model",
        lambda: tulle.estimate(MODEL, SAMPLE, {"model": 2}, tulle.Plan({"model": 2}, tensor_parallel=("heads",))),
    ),
    (
        PlanError,
        "the plan's memory names 'heads', which is not a module of the model",
        lambda: tulle.estimate(MODEL, SAMPLE, {"data": 2}, BY_HEADS),
    ),
    (
        ModelError,
        "loss=3, expected a function from the model's result",
        lambda: tulle.estimate(MODEL, SAMPLE, {"data": 2}, loss=3),
    ),
    (
        ModelError,
        "a int as optimizer, expected one or several of torch.optim",
        lambda: tulle.estimate(MODEL, SAMPLE, {"data": 2}, optimizer=3),
    ),
    (CheckpointError, "a int was given for the file, expected its name", lambda: tulle.save_safetensors(3, MODEL)),
    (PlanError, "Plan.load was given a NoneType, expected the path", lambda: tulle.Plan.load(None)),
    (PlanError, "Plan.diff was given a int, expected a Plan", lambda: tulle.Plan({"data": 1}).diff(3)),
    (PlanError, "network=3, expected a network or None", lambda: tulle.Plan({"data": 1}, network=3).check_values()),
    (PlanError, "offers=3, expected a tuple", lambda: tulle.Plan({"data": 1}, offers=3).check_values()),
    (PlanError, "axis data='1', expected a positive number", lambda: tulle.Plan({"data": "1"}).check_values()),
    (PlanError, "mesh=['data'], expected sizes of axes by name", lambda: tulle.Plan(["data"]).explain()),
    (PlanError, "micro_batches='4', expected a positive", lambda: tulle.Plan({"pipe": 2}, micro_batches="4").explain()),
]


@on_ranks(1, 2)
def test_each_is_told_what_was_given_and_what_was_expected():
    for kind, text, call in GIVEN:
        with every_rank_raises(kind, text):
            call()


def test_what_is_of_the_right_type_passes():
    tulle.Plan({"data": 1}, network=Network(1e-4, 1e9), offers=["one"]).check_values()
    assert tulle.clip_grad_norm_(MODEL, torch.tensor(1.0), "inf") == 0
    results = tulle.step(micro_batches=2, split={"batch": -2})(of_a_step)(MODEL, SAMPLE)
    assert results.stack().shape == (2,)
    with pytest.raises(tulle.errors.DataError, match="is to be cut along dimension -3, but has the shape"):
        tulle.step(micro_batches=2, split={"batch": -3})(of_a_step)(MODEL, SAMPLE)
