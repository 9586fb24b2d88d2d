"""Architectures that are listed nowhere equal one process, with batches of other sizes from step to step."""

import copy

import pytest
import torch
from pipeline_networks import WIDTH, make, one_process, spread, train, worst_gradient
from pipeline_strangers import STRANGERS, Decoder, Rivals, rival_losses, twice

import tulle
from ranks import on_ranks
from tulle import pipeline
from tulle.pipeline import placement_of


def differs(kind: type, mesh: tulle.Mesh, sizes: tuple[int, ...]) -> float:
    """The largest relative difference of a gradient after steps of so many samples."""
    model = make(kind)
    reference = copy.deepcopy(model)
    pipeline.place(model, mesh["pipe"], spread(model, mesh.size, depth=3))
    placed = placement_of(model)
    step = pipeline.step(micro_batches=2)(train)
    generator = torch.Generator().manual_seed(2)
    for samples in sizes:
        x = torch.randn(samples, WIDTH, generator=generator, dtype=torch.float64)
        first = placed.runtime.programs + 1
        losses = step(model, x)
        expected = one_process(reference, x, 2, first, placed.runtime.seed)
        torch.testing.assert_close(
            losses.stack(), torch.tensor(expected, dtype=losses.stack().dtype), rtol=1e-12, atol=0
        )
    return worst_gradient(model, reference)


# torch.compile looks at the gradients of what it is given
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@on_ranks(3)
@pytest.mark.parametrize("kind", STRANGERS, ids=lambda kind: kind.__name__)
def test_models_of_strangers_equal_one_process(kind):
    assert differs(kind, tulle.init(pipe=-1), (6, 5, 8)) < 1e-12


@on_ranks(2)
@pytest.mark.parametrize(("kind", "function"), [(Rivals, rival_losses), (Decoder, twice)])
def test_step_functions_with_several_backwards_equal_one_process(kind, function):
    mesh = tulle.init(pipe=-1)
    model = make(kind)
    reference = copy.deepcopy(model)
    pipeline.place(model, mesh["pipe"], spread(model, 2, depth=3))
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    losses = pipeline.step(micro_batches=2)(function)(model, x)
    expected = pipeline.step(micro_batches=2)(function)(reference, x)
    torch.testing.assert_close(losses.stack(), expected.stack().detach(), rtol=1e-12, atol=0)
    assert worst_gradient(model, reference) < 1e-12


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@on_ranks(2, 4)
@pytest.mark.parametrize("kind", STRANGERS, ids=lambda kind: kind.__name__)
def test_models_of_strangers_equal_one_process_on_other_numbers_of_ranks(kind):
    assert differs(kind, tulle.init(pipe=-1), (6, 5, 8)) < 1e-12
