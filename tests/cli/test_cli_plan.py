"""`tulle plan` and `tulle explain`: what they say, what they save, and what they refuse."""

import json
from dataclasses import replace

import pytest

from profiles import cluster_of, profile_of
from tulle.cli.app import execute
from tulle.plan import Plan
from tulle.workload import Profile

LINKS = ["--bandwidth", "10Gbit", "--latency", "20us"]


@pytest.fixture
def profile(tmp_path, monkeypatch):
    monkeypatch.setenv("TULLE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "profile.json"
    profile_of(layers=1).save(path)
    return path


def test_a_plan_is_made_explained_and_saved(profile, tmp_path, capsys):
    saved = tmp_path / "plan.json"
    assert execute(["plan", str(profile), "--mesh", "pipe=1,model=1", "-o", str(saved)]) == 0
    told = capsys.readouterr().out
    assert "predicted:" in told
    assert "runner-up:" in told
    assert Plan.load(saved).mesh == {"data": 2}
    assert execute(["explain", str(saved)]) == 0
    assert capsys.readouterr().out.split() == told.split()


def test_a_terminal_shows_that_a_plan_is_looked_for_and_a_pipe_has_nothing_of_it(profile, monkeypatch, capsys):
    command = ["plan", str(profile), "--mesh", "data=2", "--json", "--anew"]
    assert execute(command) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("FORCE_COLOR", "1")  # by which rich takes it for a terminal
    assert execute(command) == 0
    told = capsys.readouterr()
    assert "looking for the fastest plan" in told.err
    assert Plan.from_json(json.loads(told.out)).mesh == {"data": 2}


def test_a_plan_that_cannot_be_kept_is_told_all_the_same(profile, monkeypatch, capsys):
    monkeypatch.setenv("TULLE_CACHE", str(profile))  # a file
    assert execute(["plan", str(profile), "--mesh", "data=2", "--json"]) == 0
    told = capsys.readouterr()
    assert Plan.from_json(json.loads(told.out)).mesh == {"data": 2}
    assert told.err.startswith("tulle: the plan is not kept for the next time: ")


def test_a_plan_is_made_for_the_cluster_that_is_asked_for(profile, capsys):
    options = ["--hosts", "4", "--bandwidth", "10Gbit", "--memory", "1GB"]
    assert execute(["plan", str(profile), *options, "--mesh", "data=4", "--json"]) == 0
    plan = Plan.from_json(json.loads(capsys.readouterr().out))
    assert plan.mesh == {"data": 4}
    assert max(plan.prediction.memory_bytes) <= 10**9


def test_links_that_nobody_knows_are_not_guessed_in_silence(profile, tmp_path, capsys):
    measured, saved = Profile.load(profile), str(tmp_path / "plan.json")
    replace(measured, cluster=cluster_of(1, 2)).save(profile)
    commands = ["plan", str(profile), "-o", saved], ["simulate", saved, "--profile", str(profile)]
    for command in commands:
        for options, is_guessed in ([], False), (["--hosts", "2"], True), (["--hosts", "2", *LINKS], False):
            assert execute([*command, *options, "--json"]) == 0
            told = capsys.readouterr()
            assert json.loads(told.out)
            assert ("Give --bandwidth and --latency" in told.err) == is_guessed


def test_a_mesh_that_is_given_is_no_want_of_memory(profile, capsys):
    profile_of(layers=2).save(profile)  # which a pipeline would run faster
    assert execute(["plan", str(profile), "--mesh", "data=2", "--memory", "1TB"]) == 0
    assert "binding: memory" not in capsys.readouterr().out


def test_a_plan_that_was_made_is_taken_again(profile, tmp_path, capsys):
    command = ["plan", str(profile), "--mesh", "data=2"]
    assert execute(command) == 0
    first = capsys.readouterr().out
    [kept] = (tmp_path / "cache" / "plans").iterdir()
    kept.write_text(kept.read_text().replace('"bucket_bytes": ', '"bucket_bytes": 1'))
    assert execute(command) == 0
    assert capsys.readouterr().out != first
    assert execute([*command, "--anew"]) == 0
    assert capsys.readouterr().out == first


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--memory", "16"], "--memory '16' is no size"),
        (["--memory", "1e400GB"], "--memory '1e400GB' is no size"),
        (["--memory", "0.001B"], "--memory '0.001B' is no size"),
        (["--mesh", "data=2,data=4"], "--mesh 'data=2,data=4' names an axis twice"),
        (["--mesh", ""], "--mesh '': expected AXIS=N"),
        (["--mesh", "expert=2"], "--mesh 'expert=2': expected AXIS=N"),
        (["--bandwidth", "fast"], "--bandwidth 'fast' is no bandwidth"),
    ],
)
def test_what_is_no_quantity_is_refused(profile, options, told, capsys):
    assert execute(["plan", str(profile), *options]) == 2
    assert told in capsys.readouterr().err


def test_no_plan_fits_in_too_little(profile, capsys):
    assert execute(["plan", str(profile), "--memory", "1kB"]) == 1
    assert "no plan fits in 1,000 bytes" in capsys.readouterr().err


def test_a_plan_without_prediction_cannot_be_compared(tmp_path, capsys):
    Plan({"data": 2}).save(tmp_path / "plan.json")
    assert execute(["explain", str(tmp_path / "plan.json"), "--measured", str(tmp_path)]) == 1
    assert "has no prediction to compare with" in capsys.readouterr().err


def test_what_a_run_without_steps_measured_is_null_in_json(profile, tmp_path, capsys):
    saved, run = tmp_path / "plan.json", tmp_path / "run"
    run.mkdir()
    (run / "rank-0.jsonl").touch()
    assert execute(["plan", str(profile), "--mesh", "data=2", "-o", str(saved)]) == 0
    capsys.readouterr()
    assert execute(["explain", str(saved), "--measured", str(run), "--json"]) == 0
    told = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert told["measured"][-1]["part"] == "step"
    assert {one["measured_s"] for one in told["measured"]} == {None}


def test_two_plans_are_compared(tmp_path, capsys):
    for name, data in (("a", 2), ("b", 4)):
        Plan({"data": data}).save(tmp_path / f"{name}.json")
    assert execute(["explain", str(tmp_path / "a.json"), "--against", str(tmp_path / "b.json")]) == 0
    assert "differs: mesh: {'data': 2} against {'data': 4}" in capsys.readouterr().out
    assert execute(["explain", str(tmp_path / "a.json"), "--against", str(tmp_path / "a.json")]) == 0
    assert "differs: nothing" in capsys.readouterr().out


def test_a_plan_that_cannot_be_saved_is_told_of(profile, tmp_path, capsys):
    assert execute(["plan", str(profile), "--mesh", "pipe=1,model=1", "-o", str(tmp_path)]) == 1
    assert "cannot be saved as" in capsys.readouterr().err
    assert not list(tmp_path.glob(".*"))
