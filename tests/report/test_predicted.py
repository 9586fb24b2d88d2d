"""The page explains the plan: chosen, runner-up, what binds and would change it, and what came true of it."""

import json
from dataclasses import replace

import pytest
from fake_run import Fake, make_run

from profiles import cluster_of, profile_of
from tulle.cli.app import execute
from tulle.plan import Plan, Space, best_plan
from tulle.report import read, write
from tulle.report.predicted import planned

CHANGES = ("from 6 ranks on: rows instead of allgather for <words>",)


@pytest.fixture
def run(tmp_path):
    """A run of four ranks under a plan with two stages."""
    profile = profile_of(0, layers=5, ranks=2)
    plan = best_plan(profile, cluster_of(4), space=Space(mesh={"pipe": 2, "data": 2}))
    assert plan.prediction
    plan = replace(plan, prediction=replace(plan.prediction, changes=CHANGES))
    make_run(tmp_path, Fake(steps=30))
    plan.save(tmp_path / "plan.json")
    return tmp_path, plan, profile


def test_chosen_runner_up_and_measured_are_drawn_to_one_scale(run):
    folder, plan, _ = run
    found = planned(read(folder))
    lengths = {bar.name: sum(segment.percent for segment in bar.segments) for bar in found.bars}
    assert max(lengths.values()) <= 100.5
    ratio = plan.prediction.runner_up_s / plan.prediction.step_s
    assert lengths["runner-up"] / lengths["this plan"] == pytest.approx(ratio, rel=1e-6)
    assert found.changes == CHANGES
    assert found.binding == plan.prediction.binding


def test_steps_of_another_size_are_not_held_against_the_prediction(run):
    folder, plan, _ = run
    for samples, is_other in ((plan.prediction.batch // 2, False), (2 * plan.prediction.batch, True)):
        make_run(folder, Fake(steps=30, plan=False, samples=samples))
        found = planned(read(folder))
        assert (f"Those that ran were of {2 * samples} samples" in found.lead) == is_other
        assert ("against what was predicted" in found.bars[-1].detail) != is_other


def test_parts_stand_predicted_beside_measured(run):
    folder, _, _ = run
    rows = {row.part: row for row in planned(read(folder)).rows}
    assert all(float(row.ratio) > 0 for row in rows.values() if row.ratio != "–")
    assert set(rows) == {
        "forward",
        "backward, without waiting",
        "waiting for communication",
        "optimizer",
        "other",
        "step",
    }


def test_stages_are_as_wide_as_the_profile_says(run):
    folder, plan, profile = run
    plain = planned(read(folder)).stages
    assert [bar.name for bar in plain] == ["stage 0", "stage 1"]
    profile.save(folder / "profile.json")
    timed = planned(read(folder)).stages
    seconds = {one.name: one.forward_s + one.backward_s for one in profile.modules}
    wanted = [sum(seconds[name] for name, at in plan.stages.items() if at == stage) for stage in (0, 1)]
    lengths = [sum(segment.percent for segment in bar.segments) for bar in timed]
    assert lengths[0] / lengths[1] == pytest.approx(wanted[0] / wanted[1])
    assert max(lengths) == pytest.approx(100)


def test_the_page_has_it_escaped(run):
    folder, _, _ = run
    page = write(folder).read_text(encoding="utf-8")
    assert "Why this plan" in page
    assert "for &lt;words&gt;" in page
    assert "Stages of the pipeline" in page


def test_a_plan_without_a_prediction_or_of_another_version_is_not_explained(run):
    folder, _, _ = run
    Plan({"data": 4}).save(folder / "plan.json")
    assert planned(read(folder)) is None
    (folder / "plan.json").write_text(json.dumps({"tables": []}))
    assert planned(read(folder)) is None


def test_explaining_a_plan_by_a_run_under_another_one_says_so(run, tmp_path, capsys):
    folder, plan, _ = run
    micro_batches = plan.micro_batches + 1
    for other, told in ((plan, []), (replace(plan, micro_batches=micro_batches), ["micro_batches"])):
        other.save(tmp_path / "other.json")
        assert execute(["explain", str(tmp_path / "other.json"), "--measured", str(folder), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert [line.split(":")[0] for line in found["run_differs"]] == told
        assert found["measured"]
    assert execute(["explain", str(tmp_path / "other.json"), "--measured", str(folder)]) == 0
    assert f"the run was under another plan: micro_batches: {micro_batches} against" in capsys.readouterr().out


def test_a_plan_that_was_off_is_told_where_it_is_explained(run):
    folder, _, _ = run
    told = {"kind": "text", "step": 50, "name": "plan", "text": "steps take longer"}
    with (folder / "rank-0.jsonl").open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(told) + "\n")
    page = write(folder).read_text(encoding="utf-8")
    assert "After step 50: steps take longer." in page
    assert page.count("steps take longer") == 1
