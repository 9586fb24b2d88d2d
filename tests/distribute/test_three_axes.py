"""Along axes data, pipe and model at once a model trains as in one process."""

from unittest.mock import patch

import pytest
import torch
from axes_models import batch_of, build, distributed, optimizers, train, worst_difference
from torch import nn

import tulle
from ranks import on_ranks
from tulle.distribute import layers
from tulle.engine import engine_of
from tulle.errors import PlanError
from tulle.parts import local_of
from tulle.plan import Memory, TablePlan

CUBE = {"data": 2, "pipe": 2, "model": 2}


def compare(kind, shape, clip=None, **options):
    reference = build(kind)
    wanted = train(reference, optimizers(reference), clip=clip)
    model, several, place = distributed(kind, shape, **options)
    found = train(model, several, *place, clip=clip)
    assert worst_difference(tulle.full_state_dict(model, everywhere=True), reference.state_dict()) < 1e-12
    if place == (0, 1):
        assert found == pytest.approx(wanted, rel=1e-12)
    return model


def clip(model):
    return tulle.clip_grad_norm_(model, 0.1).item()


@on_ranks(4)
@pytest.mark.parametrize(
    ("kind", "shape"), [("words", {"data": 2, "pipe": 2}), ("stack", {"pipe": 2, "model": 2})], ids=str
)
def test_two_axes_are_one_process(kind, shape):
    compare(kind, shape, clip)


@on_ranks(4)
@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("stack", {"pipe": 2, "model": 2}),
        pytest.param("words", {"data": 2, "pipe": 2}, marks=pytest.mark.slow),
        pytest.param("gpt2", {"data": 2, "model": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_what_the_planner_chooses_on_two_axes_is_one_process(kind, shape):
    compare(kind, shape, clip, plan="auto")


@on_ranks(4)
@pytest.mark.parametrize(
    ("kind", "shape", "memory"),
    [
        ("words", {"data": 2, "pipe": 2}, Memory(full_shard=True)),
        pytest.param("words", {"data": 2, "pipe": 2}, Memory(shard_optimizer=True), marks=pytest.mark.slow),
        pytest.param("stack", {"pipe": 2, "model": 2}, Memory(), marks=pytest.mark.slow),
        pytest.param("gpt2", {"pipe": 4}, Memory(recompute=("network.transformer.h.1",)), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_weights_that_are_put_off_are_one_process(kind, shape, memory):
    compare(kind, shape, clip, plan=tulle.Plan(shape, pipeline_schedule="zb-h1", memory=memory))


@on_ranks(4)
def test_a_rank_that_counts_no_gradient_clips_by_the_same_factor():
    first_alone = {"words": 0, "encoder.layers.0": 1, "encoder.layers.1": 1, "out": 1}
    shape = {"pipe": 2, "model": 2}
    compare("stack", shape, clip, plan=tulle.Plan(shape, stages=first_alone))


@on_ranks(4)
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["words", "stack", "gpt2"])
@pytest.mark.parametrize("shape", [{"data": 2, "model": 2}, {"data": 2, "pipe": 2}, {"pipe": 2, "model": 2}], ids=str)
def test_any_two_axes_are_one_process(kind, shape):
    compare(kind, shape, clip)


@on_ranks(8, deadline_s=240.0)
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["words", "stack", "gpt2"])
def test_three_axes_are_one_process(kind):
    compare(kind, CUBE, clip)


@on_ranks(4)
@pytest.mark.parametrize(
    ("how", "shape"),
    [
        ("rows", {"data": 2, "pipe": 2}),
        pytest.param("columns", {"data": 2, "pipe": 2}, marks=pytest.mark.slow),
        pytest.param("rows", {"data": 2, "model": 2}, marks=pytest.mark.slow),
        pytest.param("columns", {"data": 2, "model": 2}, marks=pytest.mark.slow),
    ],
)
def test_a_table_is_split_over_the_replicas_of_its_stage(how, shape):
    compare("words", shape, clip, plan={"words.weight": how})


@on_ranks(4)
@pytest.mark.parametrize(
    "stages", [{"layers.2": 1, "layers.3": 1}, {"layers.0": 0, "layers.2": 1, "tags": 1, "out": 1}], ids=["one", "both"]
)
def test_a_split_table_of_which_no_stage_is_said_is_at_the_first(stages):
    shape = {"data": 2, "pipe": 2}
    tables = (TablePlan("words.weight", 40, 8, "rows"),)
    compare("words", shape, clip, plan=tulle.Plan(shape, stages=stages, tables=tables))


@on_ranks(8, deadline_s=240.0)
@pytest.mark.slow
@pytest.mark.parametrize("how", ["rows", "columns"])
def test_a_split_table_among_three_axes_is_one_process(how):
    compare("words", CUBE, clip, plan={"words.weight": how})


@on_ranks(4)
def test_norms_of_one_stage_alone_would_be_others():
    model, several, place = distributed("stack", {"data": 2, "pipe": 2})
    train(model, several, *place, steps=[0], clip=lambda model: 0.0)  # the twin: gradients are gone by then
    loss = model(batch_of(1, *place))
    loss.backward()
    mine = [p.grad.as_subclass(torch.Tensor) for p in model.parameters() if p.grad is not None]
    alone = nn.utils.get_total_norm(mine)
    assert abs(alone.item() / clip(model) - 1) > 1e-3


@on_ranks(2)
@pytest.mark.parametrize("name", ["Adafactor", "Muon", "LBFGS"])
def test_an_optimizer_that_needs_wholes_is_refused_where_layers_are_split(name):
    model = nn.Sequential(nn.Linear(8, 8, bias=False))
    optimizer = getattr(torch.optim, name)(model.parameters())
    with pytest.raises(PlanError, match=f"{name} (does not treat every element|looks at all parameters)"):
        tulle.distribute(model, optimizer, tulle.init(model=-1), plan="densify")


@on_ranks(2)
def test_a_table_that_has_a_scheme_stays_whole_where_layers_are_split():
    model = nn.Sequential(nn.Embedding(1024, 256), nn.Linear(256, 1024))  # each large enough to be split
    optimizer = torch.optim.SGD(model.parameters())
    tulle.distribute(model, optimizer, tulle.init(model=-1), plan={"0.weight": "rows"})
    assert [list(local_of(layer.weight).shape) for layer in model] == [[1024, 256], [512, 256]]


class Prodigy(torch.optim.SGD):
    """One of those that look at all gradients at once; tulle does not know it."""


@on_ranks(2)
def test_an_optimizer_that_is_not_known_is_doubted_on_stages():
    mesh = tulle.init(pipe=-1)
    for kind in (torch.optim.SGD, Prodigy):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        plan = tulle.Plan(mesh.shape, stages={"0": 0, "1": 1})
        with patch.object(layers.logger, "warning") as warn:
            tulle.distribute(model, kind(model.parameters(), lr=0.1), mesh, plan=plan)
        is_told = kind is Prodigy and mesh.rank == 0
        assert [call.args[1] for call in warn.call_args_list] == (["Prodigy"] if is_told else [])


def pair():
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).double() for _ in range(2)]


def judged(models, x):
    loss = models["judge"](models["maker"](x)).pow(2).mean()
    loss.backward()


def weighed(models, x):
    loss = (models["maker"](x) @ models["judge"][2].weight).pow(2).mean()
    loss.backward()


@on_ranks(4)
@pytest.mark.parametrize("function", [judged, weighed])
def test_gradients_of_all_models_that_a_step_reads_travel_once(function):
    mesh, references = tulle.init(data=2, pipe=2), pair()
    models, rank = pair(), mesh["data"].rank
    stages = tulle.Plan(mesh.shape, stages={"0": 0, "1": 0, "2": 1})
    steppers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (*models, *references)]
    for model, optimizer in zip(models, steppers, strict=False):
        tulle.distribute(model, optimizer, mesh, plan=stages)
    both = {"maker": models[0], "judge": models[1]}
    step = tulle.step(micro_batches=4)(lambda maker, x: function({**both, "maker": maker}, x))
    for number in range(2):
        x = torch.randn(16, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        step(models[0], x.chunk(2)[rank])
        function(dict(zip(both, references, strict=True)), x)
        for optimizer in steppers:
            optimizer.step()
            optimizer.zero_grad()
    for model, reference in zip(models, references, strict=True):
        assert worst_difference(tulle.full_state_dict(model, everywhere=True), reference.state_dict()) < 1e-12
        assert engine_of(model).steps == 2


CUT = {"encoder.layers.1.self_attn": 0} | {f"encoder.layers.1.{n}": 1 for n in ("linear1", "linear2", "norm1", "norm2")}
STAGES = {"words": 0, "encoder.layers.0": 0, **CUT, "out": 1}
"""Those that cut the second layer."""


@on_ranks(4)
def test_a_layer_may_be_cut_into_stages_that_the_plan_leaves_whole():
    shape = {"pipe": 2, "model": 2}
    compare("stack", shape, clip, plan=tulle.Plan(shape, stages=STAGES, tensor_parallel=("encoder.layers.0",)))
    mesh, model = tulle.init(**shape), build("stack")
    match = (
        r"cuts 'encoder.layers.1' into stages \[0, 1\], but it is split over axis 'model' as one: place it as a whole"
    )
    with pytest.raises(PlanError, match=match):
        tulle.distribute(model, optimizers(model), mesh, plan=tulle.Plan(shape, stages=STAGES))
