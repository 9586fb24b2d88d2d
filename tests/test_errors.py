"""Bad input raises the same clear error on every rank: what was given, what was expected, and the mend.

Each body ends with a barrier: it hangs, and fails the test, if any rank has been left inside a collective.
"""

import math
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

import models
import mortal
import tulle
from models import Words, batches, build
from ranks import on_ranks
from tulle.cost import Network
from tulle.errors import GradientError, MeshError, ModelError, PlanError, TulleError


@contextmanager
def every_rank_raises(kind: type[TulleError], text: str, *, found_by: int | None = None) -> Iterator[None]:
    """The body must raise `kind` with `text` in it on every rank.

    Args:
        kind: The error's class.
        text: A part of it, literally.
        found_by: The one rank that found the cause, whose number the others must be told.
    """
    with pytest.raises(kind) as raised:
        yield
    assert type(raised.value) is kind
    message = str(raised.value)
    assert text in message
    told = message.removeprefix(f"rank {found_by}: ")
    assert (told != message) == (found_by is not None and found_by != dist.get_rank())
    everybodys = [told] * dist.get_world_size()
    dist.all_gather_object(everybodys, told)
    assert everybodys == [told] * dist.get_world_size()


def last() -> int:
    return dist.get_world_size() - 1


def sgd(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=0.1)


# The mesh.


@on_ranks(1, 2)
def test_a_mesh_that_does_not_multiply():
    size = dist.get_world_size()
    run = f"{size} run{'s' if size == 1 else ''}"
    text = f"tulle.init was given data={size} x pipe=2, which needs {2 * size} processes, but {run}: change the sizes"
    with every_rank_raises(MeshError, text):
        tulle.init(data=size, pipe=2)


@on_ranks(1, 2)
def test_an_unknown_axis():
    mesh = tulle.init(data=-1)
    with every_rank_raises(MeshError, f"the mesh has no axis 'model', it has Mesh(data={mesh.size})"):
        mesh["model"]


@on_ranks(2)
def test_a_mesh_with_an_axis_of_another_name():
    model = build(Words, 0)
    text = "the mesh has axis replicas=2; tulle.distribute knows 'data', 'pipe' and 'model': give tulle.init"
    with every_rank_raises(MeshError, text):
        tulle.distribute(model, sgd(model), tulle.init(replicas=-1))


@on_ranks(2)
def test_a_mesh_with_stages_and_nothing_to_cut_by():
    model = build(Words, 0)
    text = "the mesh has axis pipe=2, and nothing says which module lives where: give sample= one batch to measure on"
    with every_rank_raises(PlanError, text):
        tulle.distribute(model, sgd(model), tulle.init(data=1, pipe=2))


@on_ranks(1, 2)
def test_something_else_than_a_mesh():
    model = build(Words, 0)
    tulle.init(data=-1)
    with every_rank_raises(MeshError, "tulle was given a dict as mesh, expected what tulle.init returns"):
        tulle.distribute(model, sgd(model), {"data": 2})


@on_ranks(1, 2)
def test_a_mesh_where_an_axis_is_expected():
    mesh = tulle.init(data=-1)
    for by in (tulle.sync.all_reduce, tulle.sync.characteristics):
        with pytest.raises(MeshError, match=r"was given a Mesh as axis, expected one of a mesh: mesh\['data'\], say"):
            by(torch.ones(3, 2), mesh)


# The plan.


@on_ranks(1, 2)
@pytest.mark.parametrize("plan", ["zen", {"words.weight": "zen"}], ids=str)
def test_an_unknown_scheme(plan):
    mesh = tulle.init(data=-1)
    model = build(Words, 0)
    with every_rank_raises(PlanError, "unknown scheme 'zen', expected one of auto, ", found_by=0):
        tulle.distribute(model, sgd(model), mesh, plan=plan)


@on_ranks(1, 2)
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"scheme": "zen"}, "unknown scheme 'zen', expected one of auto, densify, allgather"),
        ({"op": "max"}, "unknown operation 'max', expected one of mean, sum"),
    ],
    ids=["scheme", "op"],
)
def test_an_unknown_scheme_or_operation_of_an_all_reduce(options, text):
    axis = tulle.init(data=-1)["data"]
    with every_rank_raises(PlanError, text):
        tulle.sync.all_reduce(torch.ones(2, 2), axis, **options)


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


# Model and optimizer.


def distribute(model: object, optimizer: object) -> None:
    tulle.distribute(model, optimizer, tulle.init(data=-1))


@on_ranks(1, 2)
def test_a_model_that_is_none():
    with every_rank_raises(ModelError, "given a function as model, expected a torch.nn.Module", found_by=0):
        distribute(lambda x: x, sgd(nn.Linear(1, 1)))


@on_ranks(1, 2)
def test_an_optimizer_that_is_none():
    model = build(Words, 0)
    scheduler = LambdaLR(sgd(model), lambda step: 1.0)
    expected = "as optimizer, expected a torch.optim.Optimizer or a list of them"
    with every_rank_raises(ModelError, f"given a LambdaLR {expected}", found_by=0):
        distribute(model, scheduler)
    with every_rank_raises(ModelError, f"given a list {expected}", found_by=0):
        distribute(model, [])
    with every_rank_raises(ModelError, "given a LambdaLR among the optimizers, expected torch.optim's", found_by=0):
        distribute(model, [sgd(model), scheduler])
    wrapper = torch.optim.Optimizer.__new__(type("Lookahead", (torch.optim.Optimizer,), {}))
    wrapper.param_groups = sgd(model).param_groups
    with every_rank_raises(ModelError, "Lookahead is an Optimizer whose __init__ did not call super()", found_by=0):
        distribute(model, wrapper)


@on_ranks(1, 2)
def test_an_optimizer_of_another_model():
    model = build(Words, 0)
    text = (
        "parameter 0 of group 0 of SGD, of shape [40, 6], is not a parameter of this Words: "
        "make it from model.parameters() after the model is complete"
    )
    with every_rank_raises(ModelError, text, found_by=0):
        distribute(model, sgd(build(Words, 0)))


@on_ranks(3)
def test_an_optimizer_of_another_model_on_one_rank_only():
    model = build(Words, 0)
    others = SGD([{"params": [model.out.bias]}, {"params": [model.out.weight, nn.Parameter(torch.ones(3))]}], lr=0.1)
    with every_rank_raises(ModelError, "parameter 1 of group 1 of SGD, of shape [3], is not", found_by=last()):
        distribute(model, others if dist.get_rank() == last() else sgd(model))


def widened(model: Words) -> None:
    model.hidden = nn.Linear(models.WIDTH, 9).double()


def halved(model: Words) -> None:
    model.hidden.weight = nn.Parameter(model.hidden.weight.half())


def frozen(model: Words) -> None:
    model.hidden.weight.requires_grad_(requires_grad=False)


def lengthened(model: Words) -> None:
    model.register_buffer("more", torch.zeros(2))


@on_ranks(3)
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (widened, "parameter hidden.weight float64 [6, 6] against parameter hidden.weight float64 [9, 6]"),
        (halved, "parameter hidden.weight float64 [6, 6] against parameter hidden.weight float16 [6, 6]"),
        (frozen, "parameter hidden.weight float64 [6, 6] against parameter hidden.weight float64 [6, 6] frozen"),
        (lengthened, "buffer more float32 [2] is only on one of them"),
    ],
)
def test_ranks_whose_models_differ_are_told_where(change, text):
    model = build(Words, 0)
    if dist.get_rank() == last():
        change(model)
    whole = f"the models of rank 0 and rank {last()} of axis 'data' differ: {text}: build the same model on every rank"
    with every_rank_raises(ModelError, whole):
        distribute(model, sgd(model))


@on_ranks(2)
def test_ranks_whose_lookups_or_optimizers_differ_are_told_where():
    rank = dist.get_rank()
    model = nn.Sequential(nn.Embedding(9, 2, sparse=rank == 1))
    text = "differ: lookup 0 Embedding(9, 2) against lookup 0 Embedding(9, 2, sparse=True): build the same"
    with every_rank_raises(ModelError, text):
        distribute(model, sgd(model))
    model = nn.Sequential(nn.Embedding(9, 2))
    with every_rank_raises(ModelError, "differ: optimizer SGD lr=0.1 "):
        distribute(model, SGD(model.parameters(), lr=0.1 + rank))


@on_ranks(1, 2)
def test_a_model_on_the_meta_device_that_nothing_fills():
    model = nn.Module()
    model.register_parameter("scale", nn.Parameter(torch.empty(2, device="meta")))
    text = "'scale' is on device meta, and Module has no reset_parameters that fills it: build the model within tulle."
    with pytest.raises(ModelError, match=text):
        distribute(model, sgd(model))


@on_ranks(1, 2)
def test_a_model_with_a_lazy_layer():
    model = nn.Sequential(nn.LazyLinear(3))
    text = "parameter '0.weight' has no shape yet (a lazy module): call the model once before"
    with every_rank_raises(ModelError, text, found_by=0):
        distribute(model, SGD([nn.Parameter(torch.ones(1))], lr=0.1))


@on_ranks(1, 2)
def test_a_model_that_is_distributed_already():
    model = build(Words, 0)
    distribute(model, sgd(model))
    with every_rank_raises(ModelError, "the model is distributed already: call tulle.distribute once", found_by=0):
        distribute(model, sgd(model))


@on_ranks(1, 2)
def test_a_model_that_ddp_wraps():
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
    text = "the model is wrapped in DistributedDataParallel, expected a plain one: give model.module"
    with every_rank_raises(ModelError, text, found_by=0):
        distribute(model, sgd(model))


@on_ranks(1, 2)
def test_a_distributed_model_is_not_wrapped_by_ddp_which_would_overwrite_parts():
    model = nn.Sequential(nn.Embedding(8, 2), nn.Linear(2, 1))
    tulle.distribute(model, sgd(model), tulle.init(data=-1), plan="rows")
    before = model[0].weight.detach().clone()
    with pytest.raises(ModelError, match="the model is distributed already, and DistributedDataParallel would write"):
        nn.parallel.DistributedDataParallel(model)
    assert torch.equal(model[0].weight.detach(), before)


@on_ranks(2)
@pytest.mark.parametrize("is_sparse", [True, False])
def test_a_table_that_scales_by_frequency(is_sparse):
    model = nn.Sequential(nn.Embedding(9, 2, sparse=is_sparse, scale_grad_by_freq=True))
    text = "'0' has scale_grad_by_freq=True, which counts in one rank's batch only: split the table, tulle.distribute"
    with every_rank_raises(ModelError, text, found_by=0):
        distribute(model, sgd(model))


@on_ranks(2)
def test_a_table_with_max_norm_and_dense_gradients():
    model = nn.Sequential(nn.Embedding(9, 2, max_norm=1.0))
    text = "'0' has max_norm=1.0 and dense gradients, so that ranks do not learn which rows the others looked up"
    with every_rank_raises(ModelError, text, found_by=0):
        distribute(model, sgd(model))


@on_ranks(2)
def test_a_table_that_is_the_model_has_no_name_and_its_plan_a_key():
    model = nn.Embedding(9, 2, max_norm=1.0)
    with pytest.raises(ModelError, match=r"^(rank 0: )?the Embedding has max_norm=1.0 .*plan={'weight': 'rows'}\)"):
        distribute(model, sgd(model))


@on_ranks(1)
def test_alone_every_table_will_do():
    model = nn.Sequential(nn.Embedding(9, 2, max_norm=1.0), nn.Embedding(9, 2, scale_grad_by_freq=True))
    distribute(model, sgd(model))


# Gradients.


@on_ranks(1, 2)
def test_indices_out_of_range():
    tulle.init(data=-1)
    with every_rank_raises(GradientError, "given row 9, expected rows in 0..5 (num_rows is 6)"):
        tulle.RowSparse(torch.tensor([0, 9]), torch.ones(2, 3), num_rows=6)


@on_ranks(3)
@pytest.mark.parametrize(
    ("first", "other", "text"),
    [
        (
            torch.ones(4, 2),
            torch.ones(4, 3),
            "float32 [4, 3] on rank {last} of axis 'data' and float32 [4, 2] on rank 0",
        ),
        (torch.ones(4), torch.ones(4, 1), "float32 [4, 1] on rank {last} of axis 'data' and float32 [4] on rank 0"),
        (
            torch.ones(4, 2),
            torch.ones(4, 2).double(),
            "float64 [4, 2] on rank {last} of axis 'data' and float32 [4, 2]",
        ),
    ],
    ids=["shape", "dimensions", "dtype"],
)
def test_gradients_of_different_shape_or_dtype(first, other, text):
    axis = tulle.init(data=-1)["data"]
    grad = other if axis.rank == last() else first
    whole = f"tulle.sync.all_reduce was given {text.format(last=last())}"
    with every_rank_raises(GradientError, whole):
        tulle.sync.all_reduce(grad, axis)


@on_ranks(2)
def test_rows_of_tables_of_different_size():
    axis = tulle.init(data=-1)["data"]
    rows = tulle.RowSparse(torch.tensor([0]), torch.ones(1, 2), num_rows=4 + axis.rank)
    with every_rank_raises(GradientError, "given float32 [5, 2] on rank 1 of axis 'data' and float32 [4, 2] on rank 0"):
        tulle.sync.all_reduce(rows, axis)


@on_ranks(1, 3)
@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (
            torch.sparse_coo_tensor(torch.zeros(0, 1), torch.ones(1, 3), (3,), check_invariants=True),
            "given a torch.sparse_coo tensor without a sparse dimension, expected a dense one or sparse COO",
        ),
        (torch.ones(3, dtype=torch.int64), "given torch.int64 of 1 dimensions, expected a floating-point dtype"),
        ([1.0, 2.0], "given a list, expected a RowSparse, a sparse COO tensor or a dense tensor"),
    ],
    ids=["nothing sparse", "integers", "list"],
)
def test_a_gradient_of_another_kind_on_one_rank_only(wrong, text):
    axis = tulle.init(data=-1)["data"]
    grad = wrong if axis.rank == last() else torch.eye(3)
    with every_rank_raises(GradientError, text, found_by=last()):
        tulle.sync.all_reduce(grad, axis)


def spoil(value: float):
    def hook(gradient: Tensor) -> Tensor:
        values = gradient._values() if gradient.is_sparse else gradient
        values.view(-1)[0] = value
        return gradient

    return hook


@on_ranks(1, 2, 3)
@pytest.mark.parametrize(
    ("name", "value", "found"),
    [("words.weight", math.nan, "1 NaN and 0 infinite"), ("hidden.bias", -math.inf, "0 NaN and 1 infinite")],
)
def test_a_gradient_that_is_not_finite_is_named_with_rank_and_step(name, value, found):
    mesh = tulle.init(data=-1)
    model = build(Words, 0)
    model, optimizer = tulle.distribute(model, sgd(model), mesh, check_finite=True)
    first, second = (ids.chunk(mesh.size)[mesh.rank] for ids in batches(2, 4 * mesh.size))
    model(first).backward()
    optimizer.step()
    optimizer.zero_grad()
    if mesh.rank == last():
        model.get_parameter(name).register_hook(spoil(value))
    loss = model(second)
    with every_rank_raises(GradientError, f"the gradient of {name!r} has {found} of "):
        loss.backward()


@on_ranks(1, 2)
def test_the_rank_and_the_step_of_a_nan_are_in_the_text():
    mesh = tulle.init(data=-1)
    model = nn.Linear(2, 1)
    model, optimizer = tulle.distribute(model, sgd(model), mesh, check_finite=True)
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.zero_grad()
    batch = torch.full((1, 2), math.nan if mesh.rank == last() else 1.0)
    loss = model(batch).sum()
    text = (
        f"the gradient of 'weight' has 2 NaN and 0 infinite of 2 values on rank {last()} of axis 'data' in step 3, "
        "expected finite numbers: lower the learning rate, clip with tulle.clip_grad_norm_, or look at that rank's"
    )
    with every_rank_raises(GradientError, text):
        loss.backward()


@on_ranks(1, 2)
def test_unless_asked_for_gradients_are_not_looked_at():
    mesh = tulle.init(data=-1)
    model = nn.Linear(2, 1)
    model, _ = tulle.distribute(model, sgd(model), mesh)
    model(torch.full((1, 2), math.nan)).sum().backward()
    assert model.weight.grad.isnan().all()


@on_ranks(1, 2)
def test_after_a_gradient_that_was_not_finite_training_can_go_on():
    mesh = tulle.init(data=-1)
    model = nn.Linear(2, 1)
    model, optimizer = tulle.distribute(model, sgd(model), mesh, check_finite=True)
    for step in range(4):
        loss = model(torch.full((1, 2), math.nan if step == 2 and mesh.rank == 0 else 1.0)).sum()
        if step == 2:
            with pytest.raises(GradientError):
                loss.backward()
        else:
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()
    assert all(p.isfinite().all() for p in model.parameters())


# A rank that dies.


class DiskError(Exception):
    pass


def die(gradient: Tensor) -> None:
    raise DiskError("the disk is gone")


def be_killed(gradient: Tensor) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stand_still(gradient: Tensor) -> None:
    signal.pause()


def fall_in_backward(folder: Path, how, after: int, timeout_s: float) -> None:
    """Train until the last rank falls in the backward of step `after + 1`."""
    mesh = tulle.init(data=-1, timeout=timeout_s)
    model = build(Words, 0)
    model, optimizer = tulle.distribute(model, sgd(model), mesh)
    for step in range(after + 1):
        if step == after and mesh.rank == last():
            model.hidden.weight.register_hook(how)
        model(batches(1, 4)[0]).backward()
        optimizer.step()
        optimizer.zero_grad()


RANK_1_IS_LATE = "rank 1 did not come to it: see the log there"


@pytest.mark.parametrize(
    ("how", "ranks", "after", "timeout_s", "cause", "exit_code"),
    [
        (die, 2, 0, 300, "rank 1 failed first with DiskError: the disk is gone", 1),
        (die, 3, 2, 300, "rank 2 failed first with DiskError: the disk is gone", 1),
        (be_killed, 2, 2, 300, RANK_1_IS_LATE, -signal.SIGKILL),
        (stand_still, 2, 2, 3, RANK_1_IS_LATE, -signal.SIGKILL),
    ],
    ids=["raises-at-once", "raises", "is-killed", "stands-still"],
)
def test_when_a_rank_falls_in_backward_the_others_raise_and_say_who(
    how, ranks, after, timeout_s, cause, exit_code, tmp_path
):
    arguments = {"how": how, "after": after, "timeout_s": timeout_s}
    with mortal.start(fall_in_backward, tmp_path, ranks=ranks, **arguments) as processes:
        assert mortal.join(processes[:-1]) == [1] * (ranks - 1)
        processes[-1].kill()  # for the one that stands still
        assert mortal.join(processes)[-1] == exit_code
    for rank in range(ranks - 1):
        message = (tmp_path / f"stderr-{rank}").read_text().strip().splitlines()[-1]
        assert re.match(
            rf"\[rank{rank}\]: tulle.errors.CommunicationError: .+ in step {after + 1} failed on rank {rank} "
            rf"of axis 'data[^']*' \({ranks} ranks, timeout {timeout_s} s\): {cause}. The backend said: ",
            message,
        )


@on_ranks(1, 2)
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_a_row_that_the_table_has_not_is_named(kind):
    mesh = tulle.init(data=-1)
    model = nn.Sequential(kind(10, 2, sparse=True), nn.Linear(2, 1))
    model, _ = tulle.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), mesh)
    model(torch.tensor([[1, 9]])).sum().backward()
    with pytest.raises((IndexError, RuntimeError)) as failure:
        model(torch.tensor([[1, 12]]))
    assert failure.value.__notes__ == [
        f"tulle: the table '0' was asked for row 12 on rank {mesh.rank}, expected rows 0..9: "
        "check the vocabulary that made the ids, or make the table larger"
    ]
