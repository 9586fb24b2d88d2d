"""Who reads a parameter whose update waits is kept until its bucket is there, no longer, and sees the truth."""

import atexit
import copy
import gc
import pickle
import warnings
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from late_networks import (
    SAMPLES,
    TOLERANCE,
    Deep,
    Normed,
    after_a_step,
    held_back,
    late,
    late_names,
    one_step,
    states_differ,
    step,
)
from torch import Tensor, nn

import models
import mortal
import tulle
from models import batches, build, worst_difference
from ranks import on_ranks
from tulle.comm.pending import Pending
from tulle.engine.late_tensors import LateGradient
from tulle.engine.late_updates import LateUpdates
from tulle.errors import CommunicationError


@on_ranks(2, 3)
def test_a_step_returns_before_the_other_ranks_have_their_gradients():
    mesh = tulle.init(data=-1)
    model, *others = after_a_step(mesh)
    held_back(mesh, lambda: one_step(model, *others, mesh))
    assert len(late_names(model)) == len(list(model.parameters()))
    assert worst_difference(model, others[1])[0] < TOLERANCE
    assert not late_names(model)


@on_ranks(2)
def test_the_comparison_can_fail_where_a_read_does_not_wait():
    mesh = tulle.init(data=-1)
    model, ours, reference, theirs = after_a_step(mesh)
    found: list[float] = []

    def act() -> None:
        one_step(model, ours, reference, theirs, mesh)
        if not mesh.rank:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Pending, "wait", lambda pending: None)
                found.append(worst_difference(model, reference)[0])

    held_back(mesh, act)
    assert all(difference > 1e-6 for difference in found)
    assert mesh.rank or found


@on_ranks(2)
def test_a_read_waits_for_its_bucket_only():
    mesh = tulle.init(data=-1)
    model, ours, reference, theirs = after_a_step(mesh)
    one_step(model, ours, reference, theirs, mesh)
    before = late_names(model)
    assert torch.allclose(model.layers[2].weight, reference.layers[2].weight, rtol=TOLERANCE, atol=0)
    assert 0 < len(before) - len(late_names(model)) <= 2
    assert set(late_names(model)) < set(before)


def read_by_copy(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def read_by_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def read_by_parameter(model: nn.Module) -> nn.Module:
    copied = build(Deep, 0)
    for (_, mine), (_, other) in zip(copied.named_parameters(), model.named_parameters(), strict=True):
        mine.data = copy.deepcopy(other)
    return copied


def read_by_numpy(model: nn.Module) -> nn.Module:
    copied = build(Deep, 0)
    for mine, other in zip(copied.parameters(), model.parameters(), strict=True):
        mine.data = torch.from_numpy(other.data.numpy())
    return copied


def read_in_inference(model: nn.Module) -> nn.Module:
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        model(batches(1, 2)[0])
    return model


def read_by_function(model: nn.Module) -> nn.Module:
    copied = build(Deep, 0)
    copied.load_state_dict({name: torch.add(input=p, other=0) for name, p in model.named_parameters()})
    return copied


@on_ranks(2)
@pytest.mark.parametrize(
    "read", [read_by_copy, read_by_pickle, read_by_parameter, read_by_numpy, read_in_inference, read_by_function]
)
def test_whoever_reads_sees_the_truth(read):
    mesh = tulle.init(data=-1)
    model, ours, reference, theirs = after_a_step(mesh)
    for _ in range(2):
        one_step(model, ours, reference, theirs, mesh)
        assert late_names(model)
        copied = read(model)
        assert not late_names(model)
        assert all(type(parameter) is nn.Parameter for parameter in copied.parameters())
        assert worst_difference(copied, reference)[0] < TOLERANCE


@on_ranks(2)
def test_an_optimizers_state_is_true_where_it_is_asked_for():
    mesh = tulle.init(data=-1)
    model, ours, reference, theirs = after_a_step(mesh)
    one_step(model, ours, reference, theirs, mesh)
    assert late_names(model)
    assert states_differ([ours], [theirs]) < TOLERANCE
    assert not late_names(model)
    one_step(model, ours, reference, theirs, mesh)
    copied = copy.deepcopy(ours)
    assert states_differ([copied], [theirs]) < TOLERANCE


@on_ranks(2)
def test_a_backward_that_reads_nothing_new_finds_all_done():
    mesh = tulle.init(data=-1)
    model, ours, reference, theirs = after_a_step(mesh)
    for keeps in (True, False, True):
        losses = [one.out(torch.ones(1, 8, dtype=torch.float64)).sum() for one in (model, reference)]
        one_step(model, ours, reference, theirs, mesh)
        if keeps:
            one_step(model, ours, reference, theirs, mesh)
        for loss in losses:  # of a bias and a weight: neither gradient needs the parameter
            loss.backward()
    assert torch.allclose(model.out.bias.grad, reference.out.bias.grad)
    step([ours])
    step([theirs])
    assert worst_difference(model, reference)[0] < TOLERANCE


@on_ranks(2)
def test_after_a_read_that_failed_no_old_value_is_taken_for_a_new_one():
    def fail(pending: object) -> None:
        raise CommunicationError("a rank is gone")

    mesh = tulle.init(data=-1)
    model, ours, reference, theirs = after_a_step(mesh)
    one_step(model, ours, reference, theirs, mesh)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pending, "wait", fail)
        for _ in range(2):
            with pytest.raises(CommunicationError, match="a rank is gone"):
                model.state_dict()
    assert worst_difference(model, reference)[0] < TOLERANCE


@on_ranks(2)
def test_a_compiled_model_is_refused_before_it_computes():
    mesh = tulle.init(data=-1)
    model = build(Normed, 0)
    [optimizer] = models.sgd(model)
    late(model, optimizer, mesh)
    compiled = torch.compile(model, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        compiled(batches(1, 4)[0]).backward()
        optimizer.step()
        with pytest.raises(Exception, match=r"compiled code does unseen: give tulle\.distribute the plan with"):
            compiled(batches(1, 4)[0])
    torch.compiler.reset()


@on_ranks(2)
def test_a_model_that_is_dropped_while_it_waits_is_freed():
    mesh = tulle.init(data=-1)

    def use() -> weakref.ref[nn.Module]:
        model, ours, reference, theirs = after_a_step(mesh)
        one_step(model, ours, reference, theirs, mesh)
        return weakref.ref(model)

    left = use()
    gc.collect()
    assert left() is None
    torch.distributed.barrier()


@on_ranks(2)
@pytest.mark.parametrize("is_stepped", [False, True])
def test_gradients_that_nobody_reads_hold_no_model_and_one_that_is_kept_is_true(is_stepped):
    mesh = tulle.init(data=-1)
    model, ours, reference, _ = after_a_step(mesh)
    ids = batches(1, SAMPLES)[0]
    model(ids.chunk(mesh.size)[mesh.rank]).backward()
    reference(ids).backward()
    if is_stepped:
        ours.step()
    gradient = model.out.weight.grad
    assert type(gradient) is LateGradient
    held = [weakref.ref(parameter) for parameter in model.parameters()]
    del model, ours
    gc.collect()
    assert [parameter() for parameter in held] == [None] * len(held)
    assert type(gradient) is LateGradient
    assert (gradient - reference.out.weight.grad).abs().max() < TOLERANCE
    assert type(gradient) is Tensor


def leave_with_an_update_on_the_way(folder: Path) -> None:
    mesh = tulle.init(data=-1)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tulle.distribute(model, optimizer, mesh, plan=tulle.Plan(mesh.shape, schedule="read"))
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    make_all_true = LateUpdates.make_all_true

    def note(updates: LateUpdates) -> None:
        (folder / f"left-{mesh.rank}").write_text(f"{len(updates._waiting)} on the way, {dist.is_initialized()}")
        make_all_true(updates)

    LateUpdates.make_all_true = note
    atexit._run_exitfuncs()  # as the interpreter's end does, which a forked process does not come to


def test_what_is_on_the_way_at_the_end_is_awaited_before_process_groups_end(tmp_path):
    with mortal.start(leave_with_an_update_on_the_way, tmp_path, ranks=2) as processes:
        assert mortal.join(processes) == [0, 0]
    assert [(tmp_path / f"left-{rank}").read_text() for rank in (0, 1)] == ["1 on the way, True"] * 2
