"""A simulated step takes what one counts by hand."""

import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from steps_of_tasks import one_f_one_b

from tulle.errors import PlanError
from tulle.simulate import Noise, Step, Stragglers, Task, run, telling_ranks
from tulle.simulate.run import _on_all_ranks


def backward_and_buckets(*, buckets, backward_s, bucket_s):
    """Each piece of backward fills a bucket, which travels while the next piece computes; then all is updated."""
    tasks = []
    for number in range(buckets):
        after = (2 * number - 2,) if number else ()
        tasks.append(Task(f"backward {number}", "device", backward_s, after=after))
        tasks.append(
            Task(f"bucket {number}", "link", bucket_s, after=(2 * number,), axis="data", kind="dense", sent_bytes=10)
        )
    tasks.append(Task("update", "device", 1.0, after=(2 * buckets - 1,), kind="update"))
    return tuple(tasks)


def test_what_a_device_does_takes_the_sum():
    tasks = (Task("forward", "device", 1.0), Task("backward", "device", 2.0))
    forecast = run(Step({"data": 4}, tasks))
    assert forecast.step_s == forecast.device_s == 3.0
    assert forecast.exposed_s == forecast.idle_s == 0.0


def test_communication_hides_behind_computation():
    #   device  B0 B1 B2 u
    #   link       b0 b1 b2     buckets of 1 s behind pieces of 2 s: only the last one shows
    tasks = backward_and_buckets(buckets=3, backward_s=2.0, bucket_s=1.0)
    forecast = run(Step({"data": 4}, tasks))
    assert forecast.step_s == 3 * 2.0 + 1.0 + 1.0
    assert forecast.exposed_s == 1.0
    assert forecast.by_kind == {"compute": 6.0, "dense": 3.0, "update": 1.0}
    assert forecast.sent_bytes == 30


def test_a_slow_link_shows():
    tasks = backward_and_buckets(buckets=3, backward_s=2.0, bucket_s=5.0)
    forecast = run(Step({"data": 4}, tasks))
    assert forecast.step_s == 2.0 + 3 * 5.0 + 1.0
    assert forecast.standing_by_kind == {"dense": 15.0 - 4.0}


def test_tasks_of_a_resource_run_in_the_order_of_the_list_even_if_a_later_one_could_start():
    tasks = (
        Task("long", "device", 4.0),
        Task("waits", "link", 1.0, after=(0,)),
        Task("could start at once", "link", 1.0),
    )
    starts = [span.start_s for span in run(Step({}, tasks)).timeline(0)]
    assert starts == [0.0, 4.0, 5.0]


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (2, 2), (4, 8), (8, 5)])
def test_one_forward_one_backward_has_the_bubble_of_the_formula(stages, micro_batches):
    forecast = run(one_f_one_b(stages, micro_batches, forward_s=1.0, backward_s=2.0))
    work_s = 3.0 * micro_batches
    assert forecast.step_s == pytest.approx(work_s + 3.0 * (stages - 1))
    assert forecast.idle_s / forecast.step_s == pytest.approx((stages - 1) / (micro_batches + stages - 1))


def test_messages_between_stages_lengthen_the_way_down_and_up():
    forecast = run(one_f_one_b(3, 1, forward_s=1.0, backward_s=2.0, message_s=0.5))
    assert forecast.step_s == 3 * 3.0 + 4 * 0.5


def test_a_straggler_is_waited_for_once_at_the_collective():
    tasks = backward_and_buckets(buckets=1, backward_s=2.0, bucket_s=1.0)
    one_in_four = run(Step({"data": 4}, tasks), stragglers=Stragglers(0.25, 1.5))
    assert one_in_four.step_s == pytest.approx(3.0 + 1.0 + 1.5)  # the slow rank is slow in its update as well
    assert one_in_four.by_kind["dense"] == 1.0
    starts = sorted(one_in_four.timeline(rank)[1].start_s for rank in range(4))
    assert starts == [3.0] * 4


def test_ranks_that_share_no_collective_do_not_wait_for_each_other():
    tasks = (Task("forward", "device", 1.0), Task("reduce", "link", 1.0, after=(0,), axis="model"))
    forecast = run(Step({"data": 2, "model": 2}, tasks), stragglers=Stragglers(0.25, 3.0))
    ends = sorted(forecast.timeline(rank)[-1].end_s for rank in range(4))
    assert ends == [2.0, 2.0, 4.0, 4.0]


def test_a_collective_along_the_pipe_waits_for_all_stages():
    tasks = (
        Task("long", "device", 5.0, stage=1),
        Task("short", "device", 1.0, stage=0),
        Task("clip", "link", 1.0, after=(0, 1), axis="pipe"),
    )
    forecast = run(Step({"pipe": 2}, tasks))
    assert forecast.step_s == 6.0
    assert forecast.timeline(0)[-1].start_s == 5.0


def test_a_step_that_is_carried_over_hides_what_it_sends_behind_the_next_one():
    #   device  F B     F B     F B       without overlap: 2 + 4 + 2 = 8 s;
    #   link        r       r             with it the all-reduce of 3 s runs beside the next forward of 4 s
    forward = Task("forward", "device", 4.0)
    backward = Task("backward", "device", 2.0, after=(0,), after_last=(2,))
    reduced = Task("all-reduce", "link", 3.0, after=(1,), axis="data", kind="dense")
    carried = run(Step({"data": 2}, (forward, backward, reduced)))
    assert carried.step_s == 6.0
    assert carried.exposed_s == 0.0
    waited = run(Step({"data": 2}, (forward, Task("backward", "device", 2.0, after=(0,)), reduced)))
    assert waited.step_s == 9.0
    assert waited.exposed_s == 3.0


def test_a_link_that_is_carried_over_and_too_slow_sets_the_pace():
    forward = Task("forward", "device", 1.0, after_last=(1,))
    reduced = Task("all-reduce", "link", 3.0, after=(0,), axis="data", kind="dense")
    forecast = run(Step({"data": 2}, (forward, reduced)))
    assert forecast.step_s == 4.0
    assert forecast.exposed_s == 3.0


def test_noise_has_the_mean_and_the_coefficient_that_were_asked_for():
    factors = Noise(0.2).factors((100_000,), np.random.default_rng(0))
    assert factors.mean() == pytest.approx(1.0, abs=3e-3)
    assert factors.std() == pytest.approx(0.2, abs=3e-3)


def test_more_ranks_wait_longer_for_the_slowest_of_them():
    tasks = backward_and_buckets(buckets=1, backward_s=1.0, bucket_s=0.1)
    times_s = [run(Step({"data": n}, tasks), noise=Noise(0.1), steps=20).step_s for n in (1, 10, 1000)]
    assert times_s[0] < times_s[1] < times_s[2]
    # The expected maximum of n normals is about sqrt(2 ln n) deviations off.
    assert times_s[2] - times_s[0] == pytest.approx(0.1 * math.sqrt(2 * math.log(1000)) * 2.0, rel=0.3)


def test_the_same_seed_gives_the_same_noise_and_another_does_not():
    step = Step({"data": 10}, backward_and_buckets(buckets=2, backward_s=1.0, bucket_s=0.1))

    def seconds(seed):
        return run(step, noise=Noise(0.1), stragglers=Stragglers(0.1, 2.0), steps=3, seed=seed).steps_s

    assert seconds(1) == seconds(1)
    assert seconds(1) != seconds(2)


@st.composite
def any_step(draw):
    mesh = {"pipe": draw(st.integers(1, 3)), "data": draw(st.integers(1, 3)), "model": draw(st.integers(1, 2))}
    count = draw(st.integers(1, 12))
    tasks = []
    for index in range(count):
        earlier = st.lists(st.integers(0, index - 1), max_size=2) if index else st.just([])
        tasks.append(
            Task(
                str(index),
                draw(st.sampled_from(["device", "link"])),
                draw(st.integers(0, 5)) / 4,
                after=tuple(draw(earlier)),
                after_last=tuple(draw(st.lists(st.integers(0, count - 1), max_size=1))),
                stage=draw(st.none() | st.integers(0, mesh["pipe"] - 1)),
                axis=draw(st.sampled_from([None, "data", "model", "pipe"])),
            )
        )
    return Step(mesh, tuple(tasks))


@settings(max_examples=60, deadline=None)
@given(any_step())
def test_the_short_way_for_replicas_that_are_alike_gives_what_all_ranks_give(step):
    short = run(step, steps=2)
    long = run(step, steps=2, stragglers=Stragglers(1.0, 1.0))
    assert short.steps_s == pytest.approx(long.steps_s)
    assert short.standing_by_kind == pytest.approx(long.standing_by_kind)
    assert short.by_kind == pytest.approx(long.by_kind)
    for rank in range(step.ranks):
        assert short.timeline(rank) == long.timeline(rank)


@settings(max_examples=25, deadline=None)
@given(any_step())
def test_computing_waiting_and_standing_idle_make_up_the_step(step):
    forecast = run(step, steps=2, noise=Noise(0.3))
    assert forecast.device_s + forecast.exposed_s + forecast.idle_s == pytest.approx(forecast.step_s)
    computed_s = [
        sum(span.end_s - span.start_s for span in forecast.timeline(rank) if span.task.resource == "device")
        for rank in range(step.ranks)
    ]
    assert [forecast.computed_s[step.coordinates(rank)] for rank in range(step.ranks)] == pytest.approx(computed_s)
    assert max(computed_s[rank] for rank in telling_ranks(forecast)) == pytest.approx(max(computed_s))
    if not step.is_carried_over:
        assert forecast.device_s <= np.mean(computed_s) + 1e-9


def test_a_mutated_order_is_seen():
    """The twin of the tests above: a collective that forgets its group is found out by a straggler."""
    tasks = backward_and_buckets(buckets=1, backward_s=2.0, bucket_s=1.0)
    forgetful = tuple(Task(task.name, task.resource, task.seconds, task.after) for task in tasks)
    slowness = np.ones((1, 4, 1))
    slowness[0, 0, 0] = 1.5
    starts = [
        next(_on_all_ranks(Step({"data": 4}, each), iter([slowness]))).starts[1].ravel().tolist()
        for each in (tasks, forgetful)
    ]
    assert starts == [[3.0] * 4, [3.0, 2.0, 2.0, 2.0]]


@pytest.mark.parametrize(
    ("task", "text"),
    [
        (Task("x", "device", 1.0, after=(0,)), "task 0 ('x') waits for task 0"),
        (Task("x", "device", 1.0, after_last=(1,)), "in the step before for one of its 1"),
        (Task("x", "wire", 1.0), "needs the resource 'wire': device or link"),
        (Task("x", "device", 1.0, stage=2), "is of stage 2, axis pipe has 2 ranks"),
        (Task("x", "link", 1.0, axis="batch"), "is a collective of axis 'batch': pipe, data, model"),
        (Task("x", "link", math.inf), "takes inf s: a finite time is needed"),
    ],
)
def test_a_step_that_cannot_be_is_refused(task, text):
    with pytest.raises(PlanError, match=re.escape(text)):
        Step({"pipe": 2}, (task,))


def test_an_axis_that_is_not_simulated_is_refused():
    with pytest.raises(PlanError, match="axes pipe, data, model; 'expert' is none of them"):
        Step({"expert": 2}, ())


def test_no_ranks_and_no_steps_are_refused():
    with pytest.raises(PlanError, match="a simulated mesh has data=0, expected a positive number of ranks"):
        Step({"pipe": 2, "data": 0}, ())
    with pytest.raises(PlanError, match="given steps=0, expected a positive number"):
        run(Step({"data": 2}, (Task("x", "device", 1.0),)), steps=0)


@pytest.mark.parametrize("make", [lambda: Noise(-0.1), lambda: Stragglers(2.0, 1.5), lambda: Stragglers(0.1, 0.0)])
def test_noise_that_cannot_be_is_refused(make):
    with pytest.raises(PlanError, match="needed"):
        make()


def test_ranks_are_numbered_as_the_mesh_says():
    step = Step({"data": 2, "pipe": 3, "model": 2}, ())
    assert [step.coordinates(rank) for rank in (0, 1, 2, 6, 11)] == [
        (0, 0, 0),
        (0, 0, 1),
        (1, 0, 0),
        (0, 1, 0),
        (2, 1, 1),
    ]
    assert [step.rank_at(*step.coordinates(rank)) for rank in range(step.ranks)] == [*range(step.ranks)]
