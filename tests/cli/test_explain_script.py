"""`tulle explain SCRIPT` profiles a script and explains the best plan for it; options may follow a plan."""

import gc
import json

import pytest

from profiles import cluster_of, profile_of
from tulle.cli import main
from tulle.plan import Plan, best_plan

pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # torchrun's

# Leaves behind what `tulle profile` would: the commands are under test here.
SCRIPT = """
import os, shutil, sys
run, rank = os.environ["TULLE_RUN_DIR"], os.environ["RANK"]
open(f"{run}/rank-{rank}.jsonl", "w")
if rank == "0" and "--empty" not in sys.argv: shutil.copy("made.json", f"{run}/{os.environ['TULLE_PROFILE']}")
"""


@pytest.fixture
def explain(tmp_path, monkeypatch, capsys, one_thread):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TULLE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "train.py").write_text(SCRIPT)
    profile_of(0, ranks=2).save(tmp_path / "made.json")

    def start(*words):
        code = main(["explain", *words])
        gc.collect()
        output = capsys.readouterr()
        return code, output.out, output.err

    return start


def test_a_script_is_profiled_planned_and_explained(explain, tmp_path):
    code, out, _ = explain("--processes", "2", "--run-dir", "out", "train.py", "--epochs", "3")
    assert code == 0
    assert "predicted: " in out
    assert "runner-up: " in out
    assert Plan.load(tmp_path / "out" / "best-plan.json").prediction


def test_json_has_the_plan_and_what_another_does(explain, tmp_path):
    Plan({"data": 64}).save(tmp_path / "other.json")
    code, out, _ = explain("--json", "--against", "other.json", "--run-dir", "out", "train.py")
    assert code == 0
    found = json.loads(out)
    assert found["plan"]["prediction"]["step_s"] > 0
    assert found["differences"][0].endswith("against {'data': 64}")


def test_a_script_that_trains_nothing_is_told_so(explain):
    code, out, _ = explain("--run-dir", "out", "train.py", "--empty")
    assert code == 1
    assert "No profile was made" in out


def test_options_may_stand_before_or_behind_a_plan(explain, tmp_path):
    best_plan(profile_of(0), cluster_of(2)).save(tmp_path / "a.json")
    Plan({"data": 64}).save(tmp_path / "b.json")
    before, behind = explain("--against", "b.json", "a.json"), explain("a.json", "--against", "b.json")
    assert before == behind
    assert "differs: mesh" in before[1]


def test_a_script_has_no_plan_to_compare_a_run_with(explain):
    code, _, err = explain("--measured", "runs/a", "train.py")
    assert code == 2
    assert "tulle explain PLAN.json --measured RUN" in err
