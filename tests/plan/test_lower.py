"""A plan as tasks: what a step does, in the run-time's order, and what it must wait for."""

from dataclasses import replace

import pytest

from profiles import cluster_of, profile_of
from tulle.cost import all_reduce_cost
from tulle.errors import PlanError
from tulle.pipeline.schedule import held_at_once
from tulle.plan import Memory, Plan, Prediction, TablePlan, footprints, lower
from tulle.plan.deal import LOOKUP_CALLS, SPLIT_LOOKUP_CALLS, TRIPS
from tulle.plan.turns import turns
from tulle.plan.update import AHEAD_CALLS
from tulle.simulate import run
from tulle.workload import Machine, Split

CLUSTER = cluster_of(4)


def plan_of(profile, scheme="rows", **fields):
    tables = tuple(TablePlan(table.name, table.rows, table.width, scheme) for table in profile.tables)
    return Plan(fields.pop("mesh", {"data": 4}), fields.pop("tables", tables), **fields)


def in_two(profile, micro_batches=4, **fields):
    stages = {piece.name: 2 * number // len(profile.modules) for number, piece in enumerate(profile.modules)}
    return plan_of(profile, mesh={"pipe": 2, "data": 2}, stages=stages, micro_batches=micro_batches, **fields)


def names_of(step, kind=None):
    return [task.name for task in step.tasks if kind in (None, task.kind)]


def seconds_of(step, kind):
    return sum(task.seconds for task in step.tasks if task.kind == kind)


def test_one_rank_does_what_was_measured():
    profile = profile_of()
    step = lower(plan_of(profile, "auto", mesh={"data": 1}), profile, cluster_of(1))
    assert run(step).step_s == pytest.approx(profile.step_s, rel=1e-2)
    assert {task.resource for task in step.tasks if task.seconds} == {"device"}


def test_dense_gradients_are_reduced_once():
    profile = profile_of()
    step = lower(plan_of(profile, bucket_bytes=2**20), profile, CLUSTER)
    dense_bytes = sum(piece.parameters_bytes for piece in profile.modules)
    reduced = [task for task in step.tasks if task.kind == "dense"]
    assert len(reduced) > 1
    promised = all_reduce_cost(dense_bytes, CLUSTER.network(4), 4).bytes
    assert sum(task.sent_bytes for task in reduced) == pytest.approx(promised, rel=1e-5)


def test_what_is_gathered_over_axis_model_is_not_called_a_sum():
    profile = replace(profile_of(), tables=())
    body = replace(profile.modules[-1], split=Split(1.0, 0, 10_000, 10_000))
    profile = replace(profile, modules=(*profile.modules[:-1], body))
    names = names_of(lower(Plan({"model": 4}), profile, CLUSTER), "model")
    assert f"gather {body.name}" in names
    assert f"all-reduce gradient of {body.name}" in names
    assert f"all-reduce {body.name}" not in names


def test_rows_are_fetched_before_they_are_looked_up_and_pushed_after():
    step = lower(plan_of(profile := profile_of()), profile, CLUSTER)
    names = names_of(step)
    fetch, push = names.index("fetch embed.weight"), names.index("push embed.weight")
    forward = next(task for task in step.tasks if task.name.startswith("forward embed"))
    assert fetch in forward.after
    assert step.tasks[push].after == (names.index("backward embed"),)


def starts_of(step, rank=0):
    return {span.task.name: span.start_s for span in reversed(run(step).timeline(rank))}


def test_without_lookahead_the_step_waits_until_row_numbers_are_told():
    profile = profile_of(tables=2, rows=8000)
    first, second = profile.tables
    profile = replace(profile, tables=(first, replace(second, width=16)))  # which travels by itself
    plan = plan_of(profile)
    ahead, late = (lower(plan, profile, CLUSTER, lookahead=told) for told in (True, False))
    told = [task for task in late.tasks if task.name.startswith("tell")]
    assert [task.kind for task in told] == ["rows", "rows"]
    assert starts_of(late)["fetch embed.weight"] == pytest.approx(sum(task.seconds for task in told))
    assert run(late).step_s - run(ahead).step_s == pytest.approx(sum(task.seconds for task in told), rel=0.05)
    assert lower(plan, profile, CLUSTER) == late, "nobody has seen lookahead"
    assert lower(plan, replace(profile, lookahead=True), CLUSTER) == ahead
    predicted = replace(plan, prediction=Prediction(32, 4, 0.1, {}, {}, (1,), 0.1, lookahead=True))
    assert lower(predicted, profile, CLUSTER) == ahead, "as the plan was made for"


def test_without_lookahead_a_stage_tells_rows_when_it_comes_to_the_lookup():
    profile = profile_of()
    table = replace(profile.tables[0], module="layers.2")
    profile = replace(profile, tables=(table,))
    ahead, late = (starts_of(lower(in_two(profile), profile, CLUSTER, lookahead=a), rank=2) for a in (True, False))
    name = "tell rows of embed.weight"
    assert ahead["fetch embed.weight"] == 0
    assert late[name] > 0
    assert late[name] < late["fetch embed.weight"] < late["forward layers.2, micro-batch 0"]


def test_a_piece_waits_for_the_rows_of_all_tables_that_it_looks_up():
    profile = profile_of(tables=2)
    tables = tuple(
        TablePlan(t.name, t.rows, t.width, way) for t, way in zip(profile.tables, ("rows", "ring"), strict=True)
    )
    step = lower(plan_of(profile, tables=tables), profile, CLUSTER, lookahead=True)
    fetch = names_of(step).index("fetch embed.weight")
    assert fetch in next(task for task in step.tasks if task.name.startswith("forward embed")).after


def test_a_stage_whose_parameters_are_gathered_waits_for_the_stage_before():
    profile = profile_of(tables=0)
    step = lower(in_two(profile, memory=Memory(full_shard=True)), profile, CLUSTER)
    sent = names_of(step).index("send 0 to stage 1")
    first = next(t for t in step.tasks if t.stage == 1 and t.name.startswith("forward layers"))
    assert sent in first.after


def test_the_gradient_of_a_dense_table_travels_in_the_buckets():
    profile = profile_of(is_sparse=False)
    plans = plan_of(profile, tables=()), plan_of(profile)
    whole, split = (sum(t.sent_bytes for t in lower(p, profile, CLUSTER).tasks if t.kind == "dense") for p in plans)
    table_bytes = profile.tables[0].rows * profile.tables[0].width * 4
    assert whole - split == pytest.approx(all_reduce_cost(table_bytes, CLUSTER.network(4), 4).bytes, rel=1e-4)


def test_updates_that_wait_for_reads_hide_communication():
    profile = profile_of()
    in_step, when_read = (lower(plan_of(profile, schedule=when), profile, CLUSTER) for when in ("step", "read"))
    assert run(when_read).step_s < run(in_step).step_s
    assert any(task.after_last for task in when_read.tasks)


def test_updates_do_not_wait_for_reads_in_a_pipeline():
    profile = profile_of()
    with pytest.raises(PlanError, match="in a pipeline give schedule='step'"):
        lower(in_two(profile, schedule="read"), profile, CLUSTER)


def test_a_pipeline_needs_a_stage_for_each_piece():
    profile = profile_of()
    with pytest.raises(PlanError, match=r"no stage for 'embed'"):
        lower(plan_of(profile, mesh={"pipe": 2, "data": 2}), profile, CLUSTER)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_stages_without_pieces_take_nothing(stage):
    profile, cluster = replace(profile_of(0), tables=()), cluster_of(3)
    plan = Plan({"pipe": 3}, stages={piece.name: stage for piece in profile.modules}, micro_batches=2)
    forecast = run(lower(plan, profile, cluster, batch=24))
    alone = run(lower(Plan({"data": 1}, micro_batches=2), profile, cluster_of(1), batch=24))
    assert forecast.step_s == pytest.approx(alone.step_s, rel=0.05)  # and what the run-time takes of a pipeline


def test_a_stage_of_a_module_holds_for_what_is_within():
    profile = profile_of()
    by_prefix = replace(in_two(profile), stages={"embed": 0, "layers": 1})
    step = lower(by_prefix, profile, CLUSTER)
    assert {task.stage for task in step.tasks if "layers" in task.name and task.resource == "device"} == {1}


def test_what_fewer_samples_do_not_make_shorter_is_paid_for_each_micro_batch():
    profile, cluster = profile_of(tables=0), cluster_of(1)
    plan = Plan({"data": 1}, micro_batches=4)
    plain, fixed = (run(lower(plan, one, cluster)).step_s for one in (profile, replace(profile, fixed_share=0.4)))
    computed_s = sum(piece.forward_s + piece.backward_s for piece in profile.modules)
    assert 0 < fixed - plain <= 3 * 0.4 * computed_s


def with_calls(cluster, call_s):
    return replace(cluster, machine=replace(cluster.machine, call_s=call_s))


def test_every_rank_of_a_pipeline_runs_the_program_past_the_modules_of_all():
    profile, micro_batches = profile_of(tables=0, layers=3), 4
    plan = in_two(profile, micro_batches)
    dear, free = (lower(plan, profile, with_calls(CLUSTER, call_s)) for call_s in (1e-3, 0.0))
    for stage in (0, 1):
        spent = [sum(t.seconds for t in s.tasks if (t.stage, t.resource) == (stage, "device")) for s in (dear, free)]
        assert spent[0] - spent[1] == pytest.approx(micro_batches * len(profile.modules) * 1e-3)


def test_a_stage_that_waits_runs_the_program_meanwhile():
    profile = profile_of(tables=0, layers=3)
    plan = in_two(profile, micro_batches=1)
    dear, free = (run(lower(plan, profile, with_calls(CLUSTER, call_s))).step_s for call_s in (1e-4, 0.0))
    assert dear - free <= 1.5 * len(profile.modules) * 1e-4  # what a micro-batch passes, not as much on each rank


def test_operations_between_modules_cost_every_rank_and_those_within_placed_ones_nothing():
    profile, micro_batches = replace(profile_of(tables=0, layers=3), between={"": 3, "layers.0": 5}), 4
    plan = in_two(profile, micro_batches)
    machines = [replace(CLUSTER.machine, operation_s=operation_s) for operation_s in (1e-3, 0.0)]
    dear, free = (lower(plan, profile, replace(CLUSTER, machine=machine)) for machine in machines)
    assert "layers.0" in plan.stages
    for stage in (0, 1):
        spent = [sum(t.seconds for t in s.tasks if (t.stage, t.resource) == (stage, "device")) for s in (dear, free)]
        assert spent[0] - spent[1] == pytest.approx(micro_batches * 3 * 1e-3)


@pytest.mark.parametrize(("scheme", "calls"), [("rows", SPLIT_LOOKUP_CALLS), ("allgather", LOOKUP_CALLS)])
def test_lookups_in_tables_whose_rows_travel_take_the_processor(scheme, calls):
    profile = profile_of(tables=3)
    dear, free = (lower(plan_of(profile, scheme), profile, with_calls(CLUSTER, call_s)) for call_s in (1e-3, 0.0))
    assert seconds_of(dear, "compute") - seconds_of(free, "compute") == pytest.approx(3 * calls * 1e-3)


@pytest.mark.parametrize(("scheme", "trips"), [("rows", TRIPS), ("allgather", 0.0)])
def test_trips_of_split_tables_take_the_processor(scheme, trips):
    profile, free = profile_of(), replace(CLUSTER, machine=replace(CLUSTER.machine, micro_batch_s=0.0))
    dear_s, free_s = (seconds_of(lower(plan_of(profile, scheme), profile, one), "compute") for one in (CLUSTER, free))
    assert dear_s - free_s == pytest.approx(trips * CLUSTER.machine.micro_batch_s)


def test_rows_are_found_ahead_only_where_some_go_later():
    profile = profile_of()
    slow = cluster_of(4, bandwidth_bytes_per_s=1e5)
    updates = [
        seconds_of(lower(plan_of(profile, schedule=schedule), one, cluster, lookahead=is_ahead), "update")
        for cluster, is_ahead in ((CLUSTER, True), (slow, False), (slow, True))
        for schedule in ("read", "step")
        for one in [replace(profile, optimizer=replace(profile.optimizer, table_s=1.0))]
    ]
    assert updates[0] == pytest.approx(updates[1])
    assert updates[2] == pytest.approx(updates[3]), "nobody knows what the next batch wants"
    assert updates[4] - updates[5] == pytest.approx(AHEAD_CALLS)


@pytest.mark.parametrize("lookahead", [True, False])
def test_where_updates_wait_for_reads_rows_are_fetched_before_the_update_only_where_some_go_later(lookahead):
    profile = profile_of()
    slow = cluster_of(4, bandwidth_bytes_per_s=1e5)
    begins = {
        cluster: starts_of(lower(plan_of(profile, schedule="read"), profile, cluster, lookahead=lookahead))
        for cluster in (CLUSTER, slow)
    }
    assert begins[CLUSTER]["fetch embed.weight"] >= 0
    assert (begins[slow]["fetch embed.weight"] < 0) == lookahead


def test_dense_gradients_that_wait_are_sent_before_rows_that_are_not_there_yet():
    profile = profile_of()
    profile = replace(profile, step_s=profile.step_s + 1)  # between the update and the next forward
    step = lower(plan_of(profile, schedule="read", bucket_bytes=2**20), profile, CLUSTER, lookahead=True)
    names = names_of(step)
    reduced = [names.index(name) for name in names if name.startswith("all-reduce bucket")]
    assert len(reduced) > 1
    backward = next(number for number, name in enumerate(names) if name.startswith("backward"))
    assert min(reduced) > backward, "none is carried over"


@pytest.mark.parametrize("row_fixed_share", [0.0, 0.5, 1.0])
def test_fewer_columns_of_all_rows_take_longer_than_all_columns_of_fewer(row_fixed_share):
    profile = profile_of()
    profile = replace(profile, optimizer=replace(profile.optimizer, row_fixed_share=row_fixed_share))
    rows_s, columns_s, replica_s = (
        seconds_of(lower(plan_of(profile, scheme), profile, CLUSTER), "update")
        - seconds_of(lower(plan_of(profile_of(tables=0)), profile_of(tables=0), CLUSTER), "update")
        for scheme in ("rows", "columns", "allgather")
    )
    assert rows_s == pytest.approx(replica_s / CLUSTER.ranks)
    assert columns_s == pytest.approx(replica_s * (row_fixed_share + (1 - row_fixed_share) / CLUSTER.ranks))


def test_a_model_on_one_stage_needs_no_calls():
    profile = profile_of(tables=0)
    steps = [lower(plan_of(profile), profile, with_calls(CLUSTER, call_s)) for call_s in (1e-3, 0.0)]
    assert steps[0] == steps[1]


def test_more_micro_batches_leave_a_smaller_bubble():
    profile = profile_of(layers=4)
    one, four = (run(lower(in_two(profile, micro), profile, CLUSTER, batch=3200)).step_s for micro in (1, 4))
    assert four < one


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_no_rank_holds_more_than_it_may(schedule):
    held = [0, 0, 0]
    for turn in turns(schedule, (1.0, 3.0, 2.0), (2.0, 5.0, 4.0), 3, 8):
        held[turn.stage] += -1 if turn.is_backward else 1
        assert held[turn.stage] <= held_at_once(schedule, turn.stage, 3, 3, 8)
    assert held == [0, 0, 0]


def test_layers_that_are_split_compute_less_and_are_summed():
    profile = profile_of(2)
    names = tuple(piece.name for piece in profile.modules if piece.split)
    mesh = {"data": 2, "model": 2}
    whole = lower(plan_of(profile, mesh={"data": 4}), profile, CLUSTER, batch=32)
    split = lower(plan_of(profile, mesh=mesh, tensor_parallel=names), profile, CLUSTER, batch=16)
    assert names
    assert seconds_of(split, "compute") < seconds_of(whole, "compute")
    assert seconds_of(split, "model") > 0 == seconds_of(whole, "model")


@pytest.mark.parametrize(
    ("memory", "less"),
    [
        (Memory(shard_optimizer=True), "optimizer_bytes"),
        (Memory(full_shard=True), "parameters_bytes"),
        (Memory(recompute=("layers",)), "activations_bytes"),
        (Memory(precision="bf16"), "gradients_bytes"),
    ],
)
def test_memory_is_saved_at_a_price(memory, less):
    profile = profile_of(activations=10)
    plain, saving = plan_of(profile), plan_of(profile, memory=memory)
    [before], [after] = (footprints(plan, profile, CLUSTER) for plan in (plain, saving))
    assert getattr(after, less) < getattr(before, less)
    if memory.precision:  # masters and state are whole on every rank
        assert after.optimizer_bytes == pytest.approx(before.optimizer_bytes)
        assert after.parameters_bytes > before.parameters_bytes
    else:
        assert run(lower(saving, profile, CLUSTER)).step_s > run(lower(plain, profile, CLUSTER)).step_s * 0.999


def test_a_split_table_takes_its_part_of_the_memory():
    profile = profile_of()
    [whole], [split] = (footprints(plan_of(profile, scheme), profile, CLUSTER) for scheme in ("densify", "rows"))
    table_bytes = profile.tables[0].rows * profile.tables[0].width * 4
    assert whole.parameters_bytes - split.parameters_bytes == pytest.approx(table_bytes * 3 / 4)


def test_what_the_measured_peak_had_beyond_the_sum_comes_and_goes():
    profile = profile_of()
    [before] = footprints(plan_of(profile, mesh={"data": 1}), profile, cluster_of(1))
    measured = replace(profile, peak_bytes=2 * before.peak_bytes)
    [after] = footprints(plan_of(profile, mesh={"data": 1}), measured, cluster_of(1))
    assert after.peak_bytes > before.peak_bytes


def test_the_batch_stays_that_of_a_rank_on_other_meshes():
    profile = profile_of()
    told = Prediction(64, 2, 0.1, {}, {}, (1,), 0.1)
    plain, doubled = plan_of(profile), plan_of(profile, prediction=replace(told, batch=4 * profile.batch))
    computing = [seconds_of(lower(plan, profile, CLUSTER), "compute") for plan in (plain, doubled)]
    assert computing[1] > 1.5 * computing[0]


def test_computation_and_exchange_disturb_each_other():
    profile = profile_of()
    slow = replace(CLUSTER, machine=replace(CLUSTER.machine, slowdown=1.5, link_slowdown=1.2))
    plan = plan_of(profile, bucket_bytes=2**20)
    calm, busy = (run(lower(plan, profile, cluster)) for cluster in (CLUSTER, slow))
    assert calm.step_s < busy.step_s < 1.5 * calm.step_s


def test_a_faster_machine_computes_faster():
    profile = profile_of()
    of_run_time = {"call_s": CLUSTER.machine.call_s / 2, "micro_batch_s": CLUSTER.machine.micro_batch_s / 2}
    fast = replace(CLUSTER, machine=Machine(2e11, 2e10, **of_run_time))
    plan = plan_of(profile)
    assert seconds_of(lower(plan, profile, fast), "compute") == pytest.approx(
        seconds_of(lower(plan, profile, CLUSTER), "compute") / 2
    )


def test_an_axis_that_no_plan_speaks_of_is_refused():
    profile = profile_of()
    with pytest.raises(PlanError, match="axis 'expert', a forecast knows pipe, data, model"):
        lower(plan_of(profile, mesh={"data": 2, "expert": 2}), profile, CLUSTER)
