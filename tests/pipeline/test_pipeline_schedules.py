"""The order in which ranks work: how many micro-batches are held, that waiting programs give way, what is sent."""

import random
from time import sleep

import pytest
import torch
from pipeline_networks import WIDTH, Chain, Drops, make, spread, train
from torch import Tensor, nn

import tulle
from rank_process import patches
from ranks import on_ranks
from tulle import pipeline
from tulle.comm import gather_values, traffic
from tulle.pipeline import placement_of
from tulle.pipeline.schedule import held_at_once, in_idleness
from tulle.pipeline.through_memory import ThroughMemory
from tulle.pipeline.values import Values


class Held:
    """Micro-batches whose forward has run here and whose backward has not: no module's attribute, which would go to all
    ranks."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def forward_ran(self) -> None:
        self.now += 1
        self.most = max(self.most, self.now)

    def backward_came(self, _: Tensor) -> None:
        self.now -= 1


class Counts(nn.Module):
    """Counts the micro-batches that are held."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.held = nn.Linear(WIDTH, WIDTH), Held()

    def forward(self, x: Tensor) -> Tensor:
        self.held.forward_ran()
        y = self.inner(x)
        y.register_hook(self.held.backward_came)
        return y


class Counted(Chain):
    def __init__(self) -> None:
        super().__init__(0)
        self.layers = nn.ModuleList(Counts() for _ in range(4))


@on_ranks(2, 4)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "eager-1f1b", "zb-h1"])
def test_a_rank_holds_as_many_micro_batches_as_the_schedule_says(schedule):
    mesh = tulle.init(pipe=-1)
    model = make(Counted)
    pipeline.place(model, mesh["pipe"], {f"layers.{n}": n * mesh.size // 4 for n in range(4)})
    step = pipeline.step(micro_batches=8, schedule=schedule)(train)
    for _ in range(2):
        step(model, torch.randn(8, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    expected = held_at_once(schedule, mesh.rank, mesh.size, mesh.size, 8)
    usual = mesh.size - mesh.rank
    assert expected == {"gpipe": 8, "1f1b": usual, "eager-1f1b": usual + 1, "zb-h1": usual}[schedule]
    for layer in model.layers:
        if not layer.inner.weight.is_meta:
            assert expected - in_idleness(schedule) <= layer.held.most <= expected
            assert layer.held.now == 0


@on_ranks(2)
def test_a_value_goes_once_to_each_rank_that_reads_it_and_its_gradient_once_back():
    mesh = tulle.init(pipe=-1)
    model = make(Chain)
    pipeline.place(model, mesh["pipe"], spread(model, 2))
    step = pipeline.step(micro_batches=2)(reads_thrice)
    x = torch.randn(2, WIDTH, dtype=torch.float64)
    step(model, x)  # tells outcomes, too
    before = traffic.sent_for("pipeline").messages
    step(model, x)
    # For each micro-batch y and its sum, which is made where y lives, go down, and two gradients come up; then both
    # losses together, and the end of the step.
    assert traffic.sent_for("pipeline").messages - before == (2 * 2 + 1 if mesh.rank == 0 else 2 * 2 + 2)


def reads_thrice(model: Chain, x: Tensor) -> Tensor:
    y = model.layers[0](x)
    loss = (model.layers[3](y) + model.layers[4](y) * y.sum(1, keepdim=True) + y).mean()
    loss.backward()
    return loss


@on_ranks(3)
def test_a_program_that_waits_gives_way_to_the_next_micro_batch():
    """Every micro-batch asks for a number of the last stage before its first stage goes on."""
    mesh = tulle.init(pipe=-1)
    model = make(Chain)
    pipeline.place(model, mesh["pipe"], spread(model, 3))
    order: list[str] = []
    if mesh.rank == 0:
        for layer in (0, 1):
            model.layers[layer].register_forward_hook(lambda *_, layer=layer: order.append(str(layer)))
    elif mesh.rank == 2:
        model.layers[5].register_forward_hook(lambda *_: sleep(0.1))  # or its answer may be there before it is missed
    step = pipeline.step(micro_batches=3)(asks_the_last_stage)
    x = torch.randn(3, WIDTH, dtype=torch.float64)
    step(model, x)
    order.clear()
    step(model, x)
    if mesh.rank == 0:
        assert "".join(order) != "010101", "it stood still at each answer"
        assert sorted(order) == list("000111")


def asks_the_last_stage(model: Chain, x: Tensor) -> Tensor:
    y = model.layers[0](x)
    y = model.layers[1](y) if model.layers[5](y).sum() > -1e9 else y
    loss = y.pow(2).mean()
    loss.backward()
    return loss


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@on_ranks(2)
def test_micro_batches_keep_their_order_on_a_rank_that_is_late(schedule):
    """When it looks for the second gradient, the first one has come meanwhile; sums must not depend on time."""
    mesh = tulle.init(pipe=-1)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4))
    pipeline.place(model, mesh["pipe"], {"0": 0, "1": 1})
    order: list[int] = []
    if mesh.rank == 0:
        model[0].weight.register_hook(lambda grad: order.append(int(grad.abs().sum(0).argmax())))
    else:
        model[1].bias.register_hook(lambda _: sleep(0.05))
    waited = Values._gradient_of

    def late(values: Values, number: int, rank: int) -> Tensor | None:
        if "micro-batch 0" not in values.name:
            sleep(0.2)
        return waited(values, number, rank)

    patches.setattr(Values, "_gradient_of", late)
    step = pipeline.step(micro_batches=4, schedule=schedule)(train)
    for _ in range(3):
        order.clear()
        step(model, torch.eye(4))  # a gradient says by its column which micro-batch it is of
        assert order == ([0, 1, 2, 3] if mesh.rank == 0 else [])


@on_ranks(2)
def test_the_bubble_is_measured_and_drawn():
    mesh = tulle.init(pipe=-1)
    model = make(Chain)
    pipeline.place(model, mesh["pipe"], spread(model, 2))
    traffic.is_tracing = True
    try:
        traffic.take_spans()
        pipeline.step(micro_batches=4)(train)(model, torch.randn(4, WIDTH, dtype=torch.float64))
        names = [span.name for span in traffic.take_spans() if span.track in ("stage", "step")]
    finally:
        traffic.is_tracing = False
    assert {f"forward {n}" for n in range(4)} | {f"backward {n}" for n in range(4)} <= set(names)
    assert any(name.startswith("bubble") for name in names)
    assert 0 <= placement_of(model).runtime.bubble < 1


@on_ranks(2)
def test_a_step_leaves_the_random_numbers_of_the_code_around_it_alone():
    mesh = tulle.init(pipe=-1)
    model = make(Drops)
    pipeline.place(model, mesh["pipe"], spread(model, 2))
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    states = torch.get_rng_state(), random.getstate()
    pipeline.step(micro_batches=4)(train)(model, x)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]


def unread(channel):
    """How many messages take memory of this rank's and may not have been read."""
    return channel._sender.waiting if isinstance(channel, ThroughMemory) else len(channel._outbox.sends)


@on_ranks(2)
def test_messages_become_one_send_each_and_the_memory_of_sent_ones_is_given_back_within_the_step():
    mesh = tulle.init(pipe=-1)
    model = make(Chain)
    pipeline.place(model, mesh["pipe"], spread(model, 2))
    mailbox = placement_of(model).runtime.holdings.mailbox
    x = torch.randn(24 * 200, WIDTH, dtype=torch.float64)
    step = pipeline.step(micro_batches=24)(train)
    sent, most = [], []
    given = mailbox.send

    def send(*args, **kwargs):
        given(*args, **kwargs)
        most.append(max(map(unread, mailbox._channels.values())))

    mailbox.send = send
    for _ in range(3):
        before = traffic.sent_for("pipeline").messages
        step(model, x)
        sent.append(traffic.sent_for("pipeline").messages - before)
    messages = 24 + 1 if mesh.rank == 0 else 24 + 2  # values or gradients, all losses together, and the end
    assert sent[-1] == messages < sent[0]
    assert max(most) <= 3


class Clock(torch.autograd.Function):
    """Takes as long as it takes forward, and twice as long backward, by a clock of this rank that travels with values.

    It begins when its input has come and the rank is free, and writes in its result when it ends: what a step takes is
    then as its order has it, whatever else the machine does. It sleeps as well, so that the order is that of a run.
    """

    now = 0.0

    @staticmethod
    def forward(ctx, x, weight):
        return Clock.passed(1, x)

    @staticmethod
    def backward(ctx, gradient):
        Tally.now -= 1
        return Clock.passed(2, gradient), torch.zeros(())

    @staticmethod
    def passed(time, arrived):
        time_s = 0.004 * time
        sleep(time_s)
        Clock.now = max(Clock.now, arrived.max().item()) + time
        return torch.full_like(arrived, Clock.now)


class Tally(nn.Module):
    """Counts, over all modules of this rank, forwards whose backward has not run."""

    now, most = 0, 0

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        Tally.now += 1
        Tally.most = max(Tally.most, Tally.now)
        return Clock.apply(x, self.weight)


class Tallied(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(Tally() for _ in range(8)))


@on_ranks(4)
def test_two_stages_a_rank_hold_what_the_schedule_says_and_shorten_the_bubble():
    mesh = tulle.init(pipe=-1)
    least = {}
    for groups in (1, 2):
        model = make(Tallied)
        pipeline.place(model, mesh["pipe"], {f"{n}": n * 4 * groups // 8 for n in range(8)})
        step = pipeline.step(micro_batches=8)(train)
        lengths = []
        Tally.most = 0
        for _ in range(3):
            Clock.now = 0.0
            step(model, torch.zeros(8, WIDTH, dtype=torch.float64))
            lengths.append(max(gather_values(Clock.now, mesh["pipe"], label="clocks")))
        expected = held_at_once("1f1b", mesh.rank, 4, 4 * groups, 8)
        assert Tally.now == 0
        assert Tally.most <= expected * (2 if groups == 1 else 1)  # of one stage a rank, both modules count
        assert Tally.most > 8 - 2 * mesh.rank - groups, "it holds less than it may, and waits"
        least[groups] = min(lengths)
        del model
    work = 8 * 2 * (1 + 2)
    assert least[1] >= work * 11 / 8, "3 of 11 are idle"
    assert work < least[2] < least[1], "3 of 19"
