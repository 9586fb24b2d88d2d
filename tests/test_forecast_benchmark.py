"""The benchmark of forecasts picks plans that are legal, and tells errors as they are."""

import json
from functools import partial
from itertools import islice

import pytest

import benchmark_modules
from benchmark_modules import BENCHMARKS
from tulle.cost import Network
from tulle.workload import Cluster, Machine, ModuleProfile, OptimizerProfile, Profile, TableProfile

FOLDER = BENCHMARKS / "forecast"
load = partial(benchmark_modules.load, "forecast")


def profile(*tables: TableProfile) -> Profile:
    cluster = Cluster(4, 1, Machine(1e11, 1e10), Network(1e-4, 1e9))
    pieces = tuple(ModuleProfile(name, 1e-3, 2e-3, parameters_bytes=1000) for name in "abcd")
    return Profile("Net", 8, pieces, tables, OptimizerProfile(2.0, 1e-9), cluster, 0.012)


TABLE = TableProfile("words.weight", 100, 8, 4, True, ("rows", "columns"), "a")


@pytest.mark.parametrize("found", [profile(TABLE), profile()])
def test_all_rivals_fit_the_mesh_and_the_model(found):
    plans = load("plans")
    names = [piece.name for piece in found.modules]
    chosen = plans.rivals(found, 4, 14, pipes=not found.tables)
    assert len(chosen) == 14
    for plan in [*chosen.values(), *(plan for _, plan in islice(plans.at_random(found, 4, pipes=True), 30))]:
        tables = {table.name: (table.rows, table.width) for table in found.tables}
        plan.check(plan.mesh, tables, names)
        assert plan.mesh.get("pipe", 1) * plan.mesh.get("data", 1) == 4


def test_errors_are_told_by_setting_and_in_all(tmp_path):
    def told(name, predicted_s, measured_s):
        return {
            "name": name, "predicted_s": predicted_s, "measured_s": measured_s, "predicted_bytes": 90,
            "measured_bytes": 100, "plain_s": [0.1],
        }  # fmt: skip

    plans = [told("planner", 0.10, [0.11, 0.125, 0.2]), told("rows", 0.12, [0.1]), told("late", 0.1, [])]
    setting = {"hosts": 4, "rate": "1gbit", "jobs": {"recommend": {"step_s": 0.08, "plans": plans}}}
    (tmp_path / "4x1gbit.json").write_text(json.dumps(setting))
    found = load("tables").as_json(tmp_path)
    assert found["steps"] == pytest.approx({"median": 0.2, "worst": 0.2})
    assert found["memory"] == pytest.approx({"median": 0.1, "worst": 0.1})
    assert found["drift"]["worst"] == pytest.approx(0.25)
    (choice,) = found["choices"]["of"]
    assert (choice["fastest"], choice["slower"]) == ("rows", pytest.approx(0.25))
    assert "| recommend | 4 | 1gbit | 2 | 100.0 / 125.0 ms | 20% | 20% | 10% |" in load("tables").tables(tmp_path)


def test_finalists_are_compared_by_turns_that_they_took_beside_each_other(tmp_path):
    def told(name, measured_s, final_s):
        return {
            "name": name, "predicted_s": 0.1, "measured_s": [measured_s], "final_s": final_s, "predicted_bytes": 90,
            "measured_bytes": 100, "plain_s": [0.1],
        }  # fmt: skip

    plans = [
        told("planner", 0.20, [0.11, 0.12, 0.30, 0.13]),
        told("rows", 0.11, [0.10, 0.12, 0.25, 0.10]),
        told("columns", 0.12, [0.12, 0.11, 0.20, 0.16]),
        told("densify", 0.05, []),  # a stroke of luck in the first round, but the same plan as the planner's
    ]
    setting = {"hosts": 4, "rate": "1gbit", "jobs": {"recommend": {"step_s": 0.08, "plans": plans}}}
    (tmp_path / "4x1gbit.json").write_text(json.dumps(setting))
    (choice,) = load("tables").as_json(tmp_path)["choices"]["of"]
    assert (choice["fastest"], choice["slower"]) == ("rows", pytest.approx(0.15))
    assert choice["ratios"] == pytest.approx([1.1, 1.0, 1.2, 1.3])
    assert "| recommend | 4 | 1gbit | rows | +15.0% | +2.5% to +27.5% | +15.0% |" in load("tables").tables(tmp_path)


def test_what_was_measured_with_as_much_effort_is_not_measured_again(tmp_path):
    agenda = load("agenda")
    effort = agenda.Effort(plans=12, steps=5, rounds=1)
    items = [*agenda.agenda([1, 2], ["1gbit", "10gbit"], ["recommend", "named"])]
    assert [(item.hosts, item.rate) for item in items[::2]] == [(1, "1gbit"), (2, "1gbit"), (2, "10gbit")]
    first, second = items[:2]
    agenda.keep(first.path(tmp_path), first.job, {"effort": vars(effort)}, {"cores": 4})
    agenda.keep(second.path(tmp_path), second.job, {"effort": vars(agenda.Effort(3, 5, 1))}, {"cores": 4})
    assert [item.is_done(tmp_path, effort) for item in items] == [True, *[False] * 5]
    assert [path.name for path in tmp_path.iterdir()] == ["1x1gbit.json"]


def test_the_fastest_race_and_none_that_is_far_behind():
    worth_a_race = load("agenda").worth_a_race
    times_s = {"rows": 1.0, "columns": 1.2, "densify": 1.25, "ring": 1.1, "balanced": 1.5}
    assert worth_a_race(times_s, 2.0) == ["rows", "ring", "columns"]
    assert worth_a_race(times_s, 0.9) == ["rows", "ring"]
    assert worth_a_race(times_s, 0.5) == worth_a_race({}, 0.5) == []


def test_no_more_is_begun_than_ends_in_time():
    agenda = load("agenda")
    effort = agenda.Effort(plans=12, steps=5, rounds=1)
    items = [*agenda.agenda([2, 8], ["1gbit"], ["recommend", "named"])]
    seconds = sum(item.expected_s(effort) for item in items[:3])
    assert agenda.within(items, effort, seconds + 1) == items[:3]
    assert agenda.told(items, effort).startswith("4 jobs, about ")
