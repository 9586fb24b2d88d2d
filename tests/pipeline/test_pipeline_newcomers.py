"""Models that were once got wrong or refused equal one process, cut by hand and by profile."""

import copy
from collections import Counter

import pytest
import torch
from pipeline_networks import WIDTH, make, one_process, spread, train, worst_gradient
from pipeline_newcomers import NEWCOMERS, Averaging, Counting, Remembering, Revisited, Sliced, Visited
from pipeline_profiled import PROFILED

import tulle
from ranks import on_ranks
from tulle import pipeline
from tulle.errors import ModelError
from tulle.pipeline import placement_of
from tulle.pipeline.carried import Carried
from tulle.pipeline.mailbox import Mailbox
from tulle.pipeline.messages import Key


def differs(kind: type, mesh: tulle.Mesh, *, by_profile: bool) -> float:
    """The largest relative difference of a loss or gradient after two steps of 4 micro-batches."""
    model = make(kind)
    reference = copy.deepcopy(model)
    batches = [torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in (10, 8)]
    if by_profile:
        pipeline.place(model, mesh["pipe"], sample=batches[0])
    else:
        pipeline.place(model, mesh["pipe"], spread(model, mesh.size, depth=1))
    runtime, worst = placement_of(model).runtime, 0.0
    for x in batches:
        first = runtime.programs + 1
        losses = pipeline.step(micro_batches=4)(train)(model, x).stack()
        expected = torch.tensor(one_process(reference, x, 4, first, runtime.seed), dtype=losses.dtype)
        worst = max(worst, ((losses - expected).abs() / expected.abs()).max().item(), worst_gradient(model, reference))
    expected = dict(reference.named_buffers())
    for name, buffer in model.named_buffers():
        worst = worst if buffer.is_meta else max(worst, (buffer - expected[name]).abs().max().item())
    return worst


@on_ranks(3)
def test_newcomers_equal_one_process():
    mesh = tulle.init(pipe=-1)
    assert {kind.__name__: differs(kind, mesh, by_profile=False) for kind in NEWCOMERS} == pytest.approx(
        dict.fromkeys((kind.__name__ for kind in NEWCOMERS), 0.0), abs=1e-12
    )


@pytest.mark.slow
@on_ranks(2)
def test_newcomers_that_are_cut_by_profile_equal_one_process():
    mesh = tulle.init(pipe=-1)
    assert {kind.__name__: differs(kind, mesh, by_profile=True) for kind in PROFILED} == pytest.approx(
        dict.fromkeys((kind.__name__ for kind in PROFILED), 0.0), abs=1e-12
    )


def come_late(patch: pytest.MonkeyPatch) -> None:
    """Have no message be there before whoever needs it has given way to others, however fast it came."""
    asked, has = Counter[object](), Mailbox.has

    def is_there(self: Mailbox, key: Key) -> bool:
        asked[key] += 1
        return asked[key] > 2 and has(self, key)  # by the micro-batch itself, and by who chooses the next

    patch.setattr(Mailbox, "has", is_there)


@on_ranks(2)
def test_micro_batches_that_pass_one_another_where_something_is_remembered_are_noticed():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Carried, "is_likely", False)
        come_late(patch)
        found = torch.tensor(differs(Averaging, tulle.init(pipe=-1), by_profile=False))
        torch.distributed.all_reduce(found)
        assert found > 1e-6


@on_ranks(2)
def test_only_models_that_remember_go_in_order_after_the_first_step():
    mesh = tulle.init(pipe=-1)
    remembering = [Averaging, Remembering, Revisited, Visited, Counting]
    for kind in (*remembering, Sliced):
        model = make(kind)
        pipeline.place(model, mesh["pipe"], spread(model, 2, depth=1))
        carried = placement_of(model).resident.carried
        assert carried.is_likely
        pipeline.step(micro_batches=2)(train)(model, torch.randn(4, WIDTH, dtype=torch.float64))
        seen = torch.tensor(float(carried.is_likely))
        torch.distributed.all_reduce(seen)
        assert bool(seen) == (kind in remembering)


@on_ranks(2)
def test_a_module_of_another_stage_that_a_function_calls_is_named():
    mesh = tulle.init(pipe=-1, timeout=10)
    model = make(PROFILED[2])
    names = {"first": 0, "body.layers.0": 0, "body.layers.1": 1, "last": 1}
    pipeline.place(model, mesh["pipe"], names)
    with pytest.raises(tulle.TulleError, match=r"body\.layers\.1.* is called from within 'Again'") as raised:
        pipeline.step(micro_batches=1)(train)(model, torch.randn(4, WIDTH, dtype=torch.float64))
    assert mesh.rank == 1 or isinstance(raised.value, ModelError)
