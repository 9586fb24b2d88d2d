"""What a plan with `"zb-h1"` is predicted to take: less than with 1F1B by what fills the bubble."""

import pytest
import torch
from torch import nn

import tulle
from tulle.cost import Network
from tulle.memory import Memory
from tulle.pipeline.schedule import kept_at_once
from tulle.plan import Plan, Space, best_plan
from tulle.plan.lower import lower
from tulle.plan.moving import on_machine
from tulle.plan.turns import turns
from tulle.simulate import run
from tulle.workload import Cluster, Machine, ModuleProfile, OptimizerProfile, Profile

RANKS = 4
CLUSTER = Cluster(RANKS, 1, Machine(1e12, 1e11), Network(1e-6, 1e10))


def profile(*, weights_s: float = 1e-2) -> Profile:
    """A chain whose forward, backward and gradients of weights take 10 ms each."""
    pieces = tuple(
        ModuleProfile(
            f"{number}",
            1e-2,
            2e-2,
            parameters_bytes=4,
            activations_bytes=1000,
            reads={f"{number - 1}": 8} if number else {},
            weights_s=weights_s,
        )
        for number in range(RANKS)
    )
    return Profile("Chain", 8, pieces, (), OptimizerProfile(0.0, 1e-12), CLUSTER, step_s=0.12)


def plan(schedule: str, **options: object) -> Plan:
    stages = {f"{number}": number for number in range(RANKS)}
    return Plan({"pipe": RANKS}, stages=stages, micro_batches=8, pipeline_schedule=schedule, **options)


def seconds(schedule: str, profile: Profile, **options: object) -> float:
    return run(lower(plan(schedule, **options), profile, CLUSTER, batch=64)).step_s


def replayed(found, forward_s: float, backward_s: float, weights_s: float) -> float:
    """When turns end that each begin as soon as their rank, and what they need, is there."""
    free_s, ends_s = [0.0] * RANKS, {}
    for turn in found:
        needed = [(turn.stage + 1, turn.micro_batch, True)] if turn.is_backward else []
        needed = needed if turn.is_backward else [(turn.stage - 1, turn.micro_batch, False)]
        takes_s = backward_s - (weights_s if turn.stage else 0.0) if turn.is_backward else forward_s
        if turn.weights:
            free_s[turn.stage] += turn.weights * weights_s
            continue
        free_s[turn.stage] = max(free_s[turn.stage], *(ends_s.get(key, 0.0) for key in needed)) + takes_s
        ends_s[turn.stage, turn.micro_batch, turn.is_backward] = free_s[turn.stage]
    return max(free_s)


@pytest.mark.parametrize("micro_batches", [4, 8, 16])
def test_the_bubble_is_that_of_the_paper(micro_batches):
    """Zero Bubble Pipeline Parallelism, table 1: (p - 1)(F + B - W) for ZB-H1, (p - 1)(F + B + W) for 1F1B."""
    given = ((1.0,) * RANKS, (2.0,) * RANKS, RANKS, micro_batches)
    usual = replayed(turns("1f1b", *given), 1.0, 2.0, 0.0)
    split = replayed(turns("zb-h1", *given, (0.0, *(1.0,) * (RANKS - 1))), 1.0, 2.0, 1.0)
    assert usual == pytest.approx(3 * micro_batches + 3 * (RANKS - 1))
    assert split == pytest.approx(3 * micro_batches + RANKS - 1)


def test_all_that_is_put_off_is_done_and_no_more_is_kept_than_the_first_rank_holds():
    found = turns("zb-h1", (1.0,) * RANKS, (2.0,) * RANKS, RANKS, 8, (0.0, *(1.0,) * (RANKS - 1)))
    for stage in range(1, RANKS):
        mine = [turn for turn in found if turn.stage == stage]
        kept, most = 0.0, 0.0
        for turn in mine:
            kept += -turn.weights if turn.weights else 0 if turn.is_backward else 1
            most = max(most, kept)
        assert kept == pytest.approx(0.0)
        assert most <= RANKS + 1e-6


def test_a_rank_begins_none_while_it_keeps_as_many_as_the_run_time_lets_it():
    """With stages of unequal length what is put off waits long, in several micro-batches at once."""
    forward_s, backward_s, put_off_s = (0.5, 2.0, 0.5, 1.0), (1.0, 1.0, 4.0, 2.0), (0.0, 0.9, 2.0, 1.8)
    found = turns("zb-h1", forward_s, backward_s, RANKS, 8, put_off_s)
    most_of = []
    for stage in range(RANKS):
        held, most, owed = 0, 0, {}
        for turn in (turn for turn in found if turn.stage == stage):
            if turn.weights:
                owed[turn.micro_batch] -= turn.weights
            else:
                held += -1 if turn.is_backward else 1
                owed |= {turn.micro_batch: 1.0} if turn.is_backward and put_off_s[stage] else {}
            most = max(most, held + sum(left > 1e-6 for left in owed.values()))
        most_of.append(most)
    assert max(most_of) == kept_at_once("zb-h1", 0, RANKS, RANKS, 8)


def test_what_is_put_off_and_shorter_than_a_clock_tells_is_done():
    stages_s = ((0.0, 5e-6, 0.0), (0.0, 0.0, 1e-17), (9e-6, 1e-7, 2.0))
    for put_off_s in stages_s:
        found = turns("zb-h1", (16.37, 11.31, 8.88), (14.28, 8.76, 18.65), 3, 16, put_off_s)
        for stage, seconds_s in enumerate(put_off_s):
            done = sum(turn.weights for turn in found if turn.stage == stage)
            assert done == pytest.approx(16 if seconds_s else 0)


def test_computation_on_another_machine_puts_off_the_same_share():
    found = on_machine(profile(), Machine(1e14, 1e11))
    assert found.modules[0].backward_s == pytest.approx(2e-4)
    assert found.modules[0].weights_s == pytest.approx(1e-4)


def test_a_step_is_predicted_shorter_by_what_fills_the_bubble():
    usual, split = (seconds(schedule, profile()) for schedule in ("1f1b", "zb-h1"))
    assert 0.8 < split / usual < 0.92, "27 of 33 turns, and what is put off takes a little longer"


@pytest.mark.parametrize(
    "memory",
    [Memory(recompute=("0", "1", "2", "3")), Memory(offload=("0", "1", "2", "3"))],
    ids=["recompute", "offload"],
)
def test_nothing_is_put_off_where_the_run_time_does_not(memory):
    usual, split = (seconds(schedule, profile(), memory=memory) for schedule in ("1f1b", "zb-h1"))
    assert split == pytest.approx(usual)


def test_a_profile_of_before_puts_nothing_off():
    usual, split = (seconds(schedule, profile(weights_s=0.0)) for schedule in ("1f1b", "zb-h1"))
    assert split == pytest.approx(usual)


def test_the_planner_takes_it_where_it_may():
    mesh = {"pipe": RANKS}
    usual = best_plan(profile(), CLUSTER, batch=64, space=Space(mesh=mesh))
    free = best_plan(profile(), CLUSTER, batch=64, space=Space(mesh=mesh, pipeline_schedules=("1f1b", "zb-h1")))
    assert usual.pipeline_schedule == "1f1b"
    assert free.pipeline_schedule == "zb-h1"
    assert free.prediction.step_s < usual.prediction.step_s


def test_gradients_of_weights_are_measured():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256), nn.Sequential(nn.Linear(256, 256), nn.Tanh()))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = tulle.profile(model, optimizer, torch.randn(512, 256), loss=lambda y: y.pow(2).mean())
    seconds = {piece.name: (piece.weights_s, piece.backward_s) for piece in found.modules}
    weights_s, backward_s = seconds["2"] if "2" in seconds else seconds["2.0"]
    assert 0.1 * backward_s < weights_s < backward_s
    assert seconds["1"][0] == 0, "a norm's are computed at once"
