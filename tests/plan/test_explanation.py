"""What binds a plan and what would change it; plans that are kept; predictions that turn out wrong."""

import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from profiles import cluster_of, network, profile_of
from tulle.cost import Network
from tulle.errors import PlanError
from tulle.plan import Drift, Memory, Plan, Prediction, Shelf, Space, TablePlan, best_plan, differences, explained
from tulle.plan.choice import PLAN, replayed
from tulle.plan.shelf import key_of
from tulle.workload import Cluster, Machine, ModuleProfile, OptimizerProfile, Profile

SPACE = Space(mesh={"pipe": 1, "model": 1}, schedules=("step",))
PREDICTION = Prediction(32, 4, 0.1, {"forward": 0.06, "waiting": 0.04}, {"dense": 0.05}, (2**30,), bound_s=0.08)


def planner_of(profile, batch=None):
    return partial(best_plan, profile, batch=batch, space=SPACE)


def test_a_faster_runner_up_says_why_it_was_not_taken():
    told = replace(PREDICTION, runner_up=("updates when read",), runner_up_s=0.097).explain()
    line = next(line for line in told if line.startswith("runner-up"))
    assert line.startswith("runner-up: 97 ms (-3.0%): updates when read; not taken: it must gain 5%, as loops that")
    slower = replace(PREDICTION, runner_up=("updates when read",), runner_up_s=0.103).explain()
    assert not any("not taken" in line for line in slower)


def test_one_sample_is_not_several():
    for batch, told in ((1, "a step of 1 sample on 4 ranks"), (2, "a step of 2 samples on 4 ranks")):
        assert told in Prediction(batch, 4, 0.1, {"forward": 0.1}, {}, (10**9,), bound_s=0.1).explain()[0]


def test_it_does_not_say_of_a_plan_that_none_is_faster_if_the_runner_up_is():
    pieces = tuple(
        ModuleProfile(f"{number}", 1e-3, 2e-3, parameters_bytes=10**7, reads={f"{number - 1}": 8} if number else {})
        for number in range(4)
    )
    cluster = Cluster(2, 1, Machine(1e12, 1e11), Network(1e-4, 1e8))
    profile = Profile("Chain", 8, pieces, (), OptimizerProfile(2.0, 1e-10), cluster, step_s=0.013)
    found = best_plan(profile, cluster, space=Space(mesh={"pipe": 1})).prediction
    assert found.runner_up_s < found.step_s, "which gains less than it must"
    assert found.bound_s <= found.runner_up_s
    assert not found.is_exact
    assert not any("no plan is faster" in line for line in found.explain())


def test_it_does_not_say_when_rows_are_told_where_nobody_is_there_to_be_told():
    profile = profile_of(1, ranks=2)
    space = replace(SPACE, schemes={table.name: "rows" for table in profile.tables if table.is_sparse})
    told = [best_plan(profile, cluster_of(hosts), space=space).explain() for hosts in (1, 2)]
    assert ["rows of split tables are told" in one for one in told] == [False, True]


def test_a_profile_in_which_nothing_takes_time_is_refused():
    cluster = cluster_of(2)
    piece = ModuleProfile("all", 0.0, 0.0)
    profile = Profile("Net", 8, (piece,), (), OptimizerProfile(0.0, 0.0), cluster, step_s=0.0)
    with pytest.raises(PlanError, match="by its profile a step takes no time"):
        best_plan(profile, cluster)


def test_it_says_where_another_choice_begins():
    profile = profile_of(1, ranks=4)
    cluster = cluster_of(2, bandwidth_bytes_per_s=1e8)
    planner = planner_of(profile)
    found = explained(planner(cluster), cluster, planner)
    assert found.prediction.changes
    for change in found.prediction.changes:
        assert "instead of" in change or "optimizer state" in change, change


def test_what_it_says_of_bandwidth_is_so():
    """Beside the point where the choice changes, the planner chooses as is told."""
    profile, cluster = profile_of(1, ranks=4), cluster_of(4, bandwidth_bytes_per_s=1e8)
    planner = planner_of(profile)
    plan = planner(cluster)
    faster = [planner(cluster_of(4, bandwidth_bytes_per_s=1e8 * 2**power)) for power in range(1, 5)]
    changed = [one for one in faster if differences(plan, one)]
    told = [change for change in explained(plan, cluster, planner).prediction.changes if "and more" in change]
    assert bool(changed) == bool(told)
    if changed:
        assert told[0].endswith("; ".join(differences(plan, changed[0])))


def test_memory_binds_where_more_of_it_would_help():
    profile, cluster = profile_of(3, layers=2, activations=40), cluster_of(2)
    planner = partial(best_plan, profile, space=Space(mesh={"pipe": 1, "model": 1}))
    limit_bytes = int(0.6 * max(planner(cluster).prediction.memory_bytes))
    limited = replace(cluster, machine=replace(cluster.machine, memory_bytes=limit_bytes))
    found = explained(planner(limited), limited, planner, memory_bytes=limit_bytes)
    assert found.prediction.binding.startswith("memory: without a limit a step would take")


def test_a_plan_without_prediction_cannot_be_explained():
    with pytest.raises(PlanError, match="no prediction that could be explained"):
        explained(Plan({"data": 2}), cluster_of(2), planner_of(profile_of()))


def test_differences_are_told_in_words():
    tables = tuple(TablePlan(name, 10, 4, "rows") for name in ("a", "b"))
    before = Plan({"data": 4}, tables, memory=Memory(shard_optimizer=True))
    after = Plan({"pipe": 2, "data": 2}, tuple(replace(table, scheme="allgather") for table in tables))
    assert differences(before, after) == [
        "mesh pipe=2, data=2 instead of data=4",
        "optimizer state whole on every rank",
        "allgather instead of rows for a, b",
    ]
    assert differences(before, before) == []


def test_the_explanation_says_how_sure_it_is():
    assert "no plan takes less than 80 ms" in PREDICTION.explain()[0]
    assert "no plan is faster" in replace(PREDICTION, bound_s=0.1).explain()[0]


def test_a_prediction_is_no_part_of_a_plans_decisions():
    plain, predicted = Plan({"data": 4}), Plan({"data": 4}, prediction=PREDICTION)
    assert plain == predicted
    assert plain.diff(predicted) == []


@pytest.mark.parametrize(
    ("step_s", "is_off"), [(0.1, False), (0.12, False), (0.126, True), (0.081, False), (0.07, True)]
)
def test_predictions_that_are_off_by_a_quarter_are_told_once(step_s, is_off):
    drift = Drift(predicted_s=0.1)
    said = [drift.note(step_s) for _ in range(100)]
    assert [bool(one) for one in said].count(True) == is_off
    assert bool(said[49]) == is_off


@pytest.mark.parametrize(("samples", "is_other"), [(16, False), (64, True), (4, True), (0, False)])
def test_steps_of_another_size_than_predicted_are_told_as_such(samples, is_other):
    drift = Drift.of(Plan({"data": 2, "pipe": 2}, prediction=PREDICTION))
    said = ""
    for _ in range(50):
        for _ in range(2):  # micro-batches
            drift.called(samples // 2)
        said = drift.note(0.3) or said
    assert ("give, as sample=, a batch as steps have it" in said) == is_other
    assert (f"of 16 samples a replica, the last 50 were of {samples}" in said) == is_other


def test_one_slow_step_is_no_drift():
    drift = Drift.of(Plan({"data": 4}, prediction=PREDICTION))
    assert not any(drift.note(5.0 if step == 3 else 0.1) for step in range(60))


def test_a_plan_without_prediction_is_not_watched():
    assert Drift.of(Plan({"data": 4})) is None


def test_plans_are_kept_where_the_user_says(tmp_path):
    assert Shelf.of({"TULLE_CACHE": str(tmp_path)}).folder == tmp_path / "plans"
    assert Shelf.of({"XDG_CACHE_HOME": "/x"}).folder == Path("/x/tulle/plans")
    assert Shelf.of({"HOME": "/home/ada"}).folder == Path("/home/ada/.cache/tulle/plans")


def test_a_plan_that_is_kept_is_found_again_and_can_be_forgotten(tmp_path):
    shelf = Shelf(tmp_path)
    shelf.put("key", Plan({"data": 4}, prediction=PREDICTION))
    assert shelf.find("key").prediction == PREDICTION
    shelf.forget("key")
    assert shelf.find("key") is None


def test_a_plan_that_cannot_be_read_counts_as_none(tmp_path):
    (tmp_path / "key.json").write_text("{}")
    assert Shelf(tmp_path).find("key") is None


def test_the_key_is_that_of_model_cluster_and_limits():
    profile, cluster = profile_of(), cluster_of(4)
    key = key_of(profile, cluster, memory_bytes=None)
    assert key_of(replace(profile, fixed_share=0.3), cluster, memory_bytes=None) == key
    others = [
        key_of(replace(profile, step_s=3 * profile.step_s), cluster, memory_bytes=None),  # of a busy machine
        key_of(profile, cluster_of(8), memory_bytes=None),
        key_of(profile, cluster_of(4, bandwidth_bytes_per_s=1e9), memory_bytes=None),
        key_of(profile_of(1), cluster, memory_bytes=None),
        key_of(profile, cluster, memory_bytes=10**9),
        key_of(profile_of(activations=3), cluster, memory_bytes=None),  # of longer samples
        key_of(profile, replace(cluster, inside=network(1e9)), memory_bytes=None),
        key_of(replace(profile, lookahead=True), cluster, memory_bytes=None),
        key_of(replace(profile, optimizer=replace(profile.optimizer, state_share=0.5)), cluster, memory_bytes=None),
    ]
    assert len({key, *others}) == 10


def test_the_environment_names_what_stands_in_for_auto(monkeypatch):
    monkeypatch.setitem(os.environ, PLAN, "plan.json")
    assert replayed("auto") == Path("plan.json")
    assert replayed("densify") == "densify"
    assert replayed({"words": "rows"}) == {"words": "rows"}


def test_numbers_of_ranks_without_a_mesh_of_the_axes_that_are_fixed_are_passed_over():
    profile, cluster = profile_of(3, layers=2), cluster_of(4)
    planner = partial(best_plan, profile, space=Space(mesh={"pipe": 2}, schedules=("step",)))
    told = explained(planner(cluster), cluster, planner).prediction.changes
    assert any(change.startswith("with 2 ranks or fewer: mesh") for change in told)
    assert not any("fits in memory" in change for change in told), "odd numbers of ranks have no mesh"


def test_where_nothing_changes_only_the_furthest_clusters_are_planned():
    profile = profile_of()
    cluster = cluster_of(4)
    plan, asked = best_plan(profile, cluster), []

    def planner(other):
        asked.append((other.ranks, other.across.bandwidth_bytes_per_s))
        return plan

    assert explained(plan, cluster, planner).prediction.changes == ()
    assert len(asked) == 4
    assert min(asked)[0] == 2
    assert max(asked)[0] > 4
