"""The example of large models: the same numbers on any mesh, and on another one after a checkpoint."""

import contextlib
import importlib
import io
import re
import sys
from pathlib import Path

import pytest

from ranks import run_on_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = "--model llama --width 16 --depth 2 --heads 2 --length 16 --batch 8 --micro-batches 2 --print-every 1"


def losses_on_ranks(mesh, steps, checkpoint=None, more=""):
    """What one rank prints of each step."""
    pytest.importorskip("transformers")
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    arguments = f"{SMALL} --mesh {mesh} --steps {steps}" + (f" --checkpoint {checkpoint}" if checkpoint else "") + more
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.setattr(sys, "argv", ["05_large_model.py", *arguments.split()])
        importlib.import_module("05_large_model").main()
    return [float(loss) for loss in re.findall(r"loss (\S+) a token", said.getvalue())]


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "ranks"), [("pipe=2", 2), ("data=2,pipe=2", 4), ("pipe=2,model=2", 4)])
def test_it_goes_on_alone_from_what_a_mesh_saved(mesh, ranks, tmp_path):
    [wanted] = run_on_ranks(1, losses_on_ranks, mesh="data=1", steps=4)
    first = run_on_ranks(ranks, losses_on_ranks, mesh=mesh, steps=2, checkpoint=tmp_path / "checkpoint")[0]
    [then] = run_on_ranks(1, losses_on_ranks, mesh="data=1", steps=4, checkpoint=tmp_path / "checkpoint")
    assert first + then == pytest.approx(wanted, abs=2e-3) or "data=2" in mesh
    assert then == pytest.approx(wanted[2:], abs=2e-3)


def too_few_samples(mesh):
    with pytest.raises(SystemExit, match="--batch 3 is too small for 4 micro-batches"):
        losses_on_ranks(mesh, 1, more=" --batch 3 --micro-batches 4")


@pytest.mark.slow
def test_more_micro_batches_than_samples_are_refused_on_every_rank():
    run_on_ranks(2, too_few_samples, mesh="pipe=2")
