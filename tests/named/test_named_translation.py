"""Example 04 learns the same, loss by loss, under every layout and mesh."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

import tulle
from ranks import on_ranks
from tulle import named as tn

EXAMPLES = Path(__file__).parents[2] / "examples"
ARGUMENTS = "--width 16 --batch 8 --length 12 --steps 4 --warmup 2 --dropout 0.1 --beam 2 --layers 1 1"


def example():
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    return importlib.import_module("04_named_transformer")


def losses(program, layout, mesh):
    options = program.parse([*ARGUMENTS.split(), "--layout", layout])
    dims = program.Dimensions(options, 100)
    pairs = [([3 + n % 90, 5, 2], [1, 7 + n % 80, 4, 9, 2]) for n in range(50)]
    batches = program.endless_batches(pairs, options)
    model = dims.model(options.layers)
    chosen = program.choose_layout(model, dims, next(batches), options, mesh)
    with tn.use(mesh, chosen):
        return torch.tensor(program.train(model, dims, batches, options, mesh))


def test_the_mesh_of_its_help_can_be_explained_in_columns_that_stand_under_each_other():
    program = example()
    [command] = [line for line in program.__doc__.splitlines() if "--explain" in line]
    options = program.parse(command.partition("  #")[0].split()[2:])
    dims = program.Dimensions(options, 100)
    batch = next(program.endless_batches([([3, 2], [1, 4, 2])] * options.batch, options))
    said = str(tn.explain(dims.model(options.layers), dims.sample(batch), options.mesh, program.STANDARD)).splitlines()
    ends = said[1].index("MB kept") + len("MB kept")
    assert all(line[ends - 4] == "." and line[ends : ends + 2] in ("  ", "") for line in said[2:-1])


@pytest.mark.slow
@on_ranks(4)
@pytest.mark.parametrize("sizes", [{"data": 2, "model": 2}, {"model": 4}], ids=str)
def test_the_loss_curve_does_not_depend_on_the_layout(sizes):
    torch.set_default_dtype(torch.float64)
    try:
        program, mesh = example(), tulle.init(**sizes)
        expected = losses(program, "", mesh)
        assert len(expected) == 4
        for layout in (program.STANDARD, "target:model, source:model, d_model:data", "best"):
            torch.testing.assert_close(losses(program, layout, mesh), expected, rtol=1e-11, atol=0)
    finally:
        torch.set_default_dtype(torch.float32)
