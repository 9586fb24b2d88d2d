"""Parameters are gathered ahead and gradients arrive behind; whatever runs next, it is as on one process."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tulle
from ranks import on_ranks
from tulle.memory import ahead, leaving, named_shards, share_out
from tulle.memory.ahead import Ahead
from tulle.memory.execution_order import ExecutionOrder

USUAL = [0, 1, 2, 3]
COUNT = 6 * 8 * 2 + 6 + 8
"""Of the numbers of a layer."""


class Chosen(nn.Module):
    """Layers that run in the order that the batch asks for; two are tied, and there is something around them."""

    def __init__(self):
        super().__init__()
        self.before, self.after = nn.Linear(6, 6), nn.Linear(6, 6)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)) for _ in range(4)])
        self.layers[3][0].weight = self.layers[1][0].weight
        self.recomputes = False

    def forward(self, x, order=USUAL):
        x = self.before(x)
        for number in order:
            layer = self.layers[number]
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x))
        return self.after(x).pow(2).mean()


def build():
    torch.manual_seed(0)
    model = Chosen().double()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-2)


def shared():
    axis = tulle.init(data=-1)["data"]
    model, optimizer = build()
    units = ["", *(f"layers.{n}" for n in range(4))]
    share_out(model, axis, units, stay=[""], optimizers=[optimizer])
    return model, optimizer, axis


def batch_of(step, axis=None):
    x = torch.randn(12, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    return x if axis is None else x.chunk(axis.size)[axis.rank]


def train(model, optimizer, orders, axis=None):
    for step, of_micro_batches in enumerate(orders):
        for number, order in enumerate(of_micro_batches):
            model(batch_of(10 * step + number, axis), order).backward()
        optimizer.step()
        optimizer.zero_grad()


def worst_difference(model, reference):
    found, wanted = model.state_dict(), reference.state_dict()
    return max((found[name] - wanted[name]).abs().max().item() for name in wanted)


SOME = [[USUAL]] * 4
CHANGING = [[[0, 2]], [USUAL, [3, 3, 3]], [[2, 1, 0]], [[], [1]], [USUAL], [[0, 1, 1, 3], USUAL, [0, 0]], [USUAL]]


@on_ranks(2, 3)
@pytest.mark.parametrize("recomputes", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "orders",
    [
        pytest.param(SOME, marks=pytest.mark.slow),
        pytest.param([[USUAL] * 3] * 4, marks=pytest.mark.slow),
        SOME + CHANGING + SOME + CHANGING,
    ],
    ids=["alike", "micro-batches", "changing"],
)
@pytest.mark.parametrize("together", [pytest.param(0, marks=pytest.mark.slow), 2 * COUNT, leaving.TOGETHER])
def test_whatever_runs_next_it_is_one_process(monkeypatch, orders, recomputes, together):
    for module in (ahead, leaving):
        monkeypatch.setattr(module, "TOGETHER", together)
    reference, optimizer = build()
    train(reference, optimizer, orders)
    model, optimizer, axis = shared()
    model.recomputes = recomputes
    train(model, optimizer, orders, axis)
    assert worst_difference(model, reference) < 1e-12


def followed(monkeypatch):
    """What messages are begun, with what was under way then, and what was there when it was asked for."""
    begun, taken, most = [], [], []
    begin, gather = Ahead._begin, Ahead.gather

    def noted_begin(self, use):
        most.append(len(self._coming))
        coming = begin(self, use)
        begun.append([(one.use.unit.name, one.use.what) for one in coming])
        return coming

    def noted_gather(self, unit, parts, what, *, call):
        uses = [(one.use.unit, one.use.what) for one in self._coming]
        taken.append(uses[:1] == [(unit, what)])
        return gather(self, unit, parts, what, call=call)

    monkeypatch.setattr(Ahead, "_begin", noted_begin)
    monkeypatch.setattr(Ahead, "gather", noted_gather)
    return begun, taken, most


LAYERS = [f"layers.{n}" for n in range(4)]
FORWARDS = [(name, "forward") for name in ("Chosen", *LAYERS)]
BACKWARDS = [(name, "backward") for name in reversed(LAYERS)]


@on_ranks(2)
@pytest.mark.parametrize("is_made_after", [False, True])
def test_from_the_third_step_on_all_but_the_first_are_ahead(monkeypatch, is_made_after):
    monkeypatch.setattr(ahead, "TOGETHER", 0)
    begun, taken, most = followed(monkeypatch)
    model, optimizer, axis = shared()
    if is_made_after:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, SOME, axis)
    assert begun == [[use] for use in FORWARDS + BACKWARDS] * 4, "each once a step, in the order in which they are used"
    assert taken[-18:] == [False, *[True] * 8] * 2
    assert most == [0] * len(most), "one unit is gathered ahead, not more"


@on_ranks(2)
def test_small_units_that_come_one_after_the_other_are_gathered_together(monkeypatch):
    monkeypatch.setattr(ahead, "TOGETHER", 2 * COUNT)
    begun, taken, most = followed(monkeypatch)
    model, optimizer, axis = shared()
    train(model, optimizer, SOME, axis)
    together = [FORWARDS[:2], FORWARDS[2:4], FORWARDS[4:], BACKWARDS[:2], BACKWARDS[2:]]
    assert begun[-10:] == together * 2
    assert taken[-18:] == [False, *[True] * 8] * 2
    assert max(most) == 1, "the rest of one message, and the next"


@on_ranks(2)
@pytest.mark.parametrize(("together", "messages"), [(0, 5), (2 * COUNT, 3), (leaving.TOGETHER, 1)])
def test_gradients_of_small_units_leave_together(monkeypatch, together, messages):
    sent, submit = [], ExecutionOrder.submit

    def noted(self, exchange, which, do):
        sent.append(exchange)
        return submit(self, exchange, which, do)

    monkeypatch.setattr(leaving, "TOGETHER", together)
    monkeypatch.setattr(ExecutionOrder, "submit", noted)
    model, optimizer, axis = shared()
    reference, theirs = build()
    train(model, optimizer, SOME, axis)
    train(reference, theirs, SOME)
    assert worst_difference(model, reference) < 1e-12
    last = [one for one in sent if one.startswith("gradients")][-messages:]
    names = ", ".join(one.removeprefix("gradients of ").strip("'") for one in last)
    assert names == "layers.3, layers.2, layers.1, layers.0, Chosen"


@on_ranks(2)
def test_gradients_that_waited_when_a_backward_failed_are_of_no_other():
    reference, theirs = build()
    model, optimizer, axis = shared()
    train(model, optimizer, SOME, axis)
    train(reference, theirs, SOME)
    handle = model.layers[0].register_full_backward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(batch_of(0, axis)).backward()
    handle.remove()
    assert all(part.grad is None for part in model.parameters())
    train(model, optimizer, SOME, axis)
    train(reference, theirs, SOME)
    assert worst_difference(model, reference) < 1e-12


class Follower(nn.Module):
    """A teacher that follows its student in forward, between the two."""

    def __init__(self, *, by_data=False):
        super().__init__()
        self.by_data = by_data
        self.student, self.teacher = nn.Linear(6, 6), nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x, _):
        y = self.student(x)
        with torch.no_grad():
            mine, its = self.teacher.weight, self.student.weight
            if self.by_data:
                mine.data = mine.data * 0.9 + its.data * 0.1
            else:
                mine.mul_(0.9).add_(its, alpha=0.1)
        return (y - self.teacher(x)).pow(2).mean()


@on_ranks(2)
@pytest.mark.parametrize("units", [["", "student", "teacher"], [""]], ids=["parts", "wholes"])
@pytest.mark.parametrize("by_data", [False, True])
def test_what_forward_writes_into_parameters_is_seen(by_data, units):
    axis = tulle.init(data=-1)["data"]
    torch.manual_seed(0)
    reference = Follower(by_data=by_data).double()
    model = copy.deepcopy(reference)
    share_out(model, axis, units, stay=[""])
    for one, of_rank in ((model, axis), (reference, None)):
        train(one, torch.optim.SGD(one.parameters(), lr=0.1), [[None]] * 5, of_rank)
    assert worst_difference(model, reference) < 1e-12


def swap(model, values):
    """As moving averages are put in the place of parameters: past the counter by which torch sees a change."""
    for parameter, value in zip(model.parameters(), values, strict=True):
        parameter.data.copy_(value)


def evaluated(model, axis):
    """Losses of a model whose parameters change between calls, in ways that nobody is told of."""
    values = [parameter.detach().clone() for parameter in model.parameters()]
    losses = []
    for scale in (1.0, 0.5, 2.0, 1.0, 0.25, 3.0):
        swap(model, [value * scale for value in values])
        with torch.no_grad():
            losses += [model(batch_of(0, axis)).item() for _ in range(2)]
    return losses


@on_ranks(2)
def test_nothing_is_gathered_ahead_from_one_call_to_the_next():
    model, _, _ = shared()
    reference, _ = build()
    assert evaluated(model, None) == pytest.approx(evaluated(reference, None), rel=1e-12)


@on_ranks(2)
def test_the_twin_that_gathers_ahead_from_one_call_to_the_next_is_found(monkeypatch):
    monkeypatch.setattr(ahead, "in_backward", lambda: True)
    with pytest.raises(AssertionError):
        test_nothing_is_gathered_ahead_from_one_call_to_the_next.__wrapped__()


@on_ranks(2)
def test_gradients_are_what_autograd_gives_and_hooks_see_them():
    reference, _ = build()
    model, _, axis = shared()
    wanted = torch.autograd.grad(reference(batch_of(0)), [reference.after.weight, reference.layers[1][2].bias])
    x = batch_of(0, axis)
    for _ in range(3):
        found = torch.autograd.grad(model(x), [model.after.weight, model.layers[1][2].bias])
    cuts = named_shards(model)
    shards = [cuts["after.weight"], cuts["layers.1.2.bias"]]
    for gradient, whole, shard in zip(found, wanted, shards, strict=True):
        torch.testing.assert_close(gradient, shard.part(whole), rtol=1e-12, atol=1e-14)
    seen = []
    model.before.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    model(x).backward()
    reference(batch_of(0)).backward()
    torch.testing.assert_close(seen, [cuts["before.weight"].part(reference.before.weight.grad)], rtol=1e-12, atol=1e-14)


@on_ranks(2)
def test_a_copy_has_parts_of_its_own():
    model, optimizer, axis = shared()
    average = copy.deepcopy(model)
    before = average.state_dict()
    train(model, optimizer, SOME, axis)
    assert worst_difference(average, model) > 1e-3
    reference, optimizer = build()
    reference.load_state_dict(before)
    x = batch_of(0)
    assert average(x).item() == pytest.approx(reference(x).item(), rel=1e-12)
    average(x).backward()
    assert average.before.weight.grad is not None
    assert model.before.weight.grad is None


class Looped(nn.Module):
    """Layers that run in turn several times, and nothing around them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])

    def forward(self, x):
        for layer in [*self.layers] * 4:
            x = torch.tanh(layer(x))
        return x.pow(2).mean()


@on_ranks(2)
def test_what_is_gathered_ahead_at_the_end_of_a_call_is_dropped():
    axis = tulle.init(data=-1)["data"]
    torch.manual_seed(0)
    reference = Looped().double()
    model = copy.deepcopy(reference)
    share_out(model, axis, ["", "layers.0", "layers.1"], stay=[""])
    assert evaluated(model, None) == pytest.approx(evaluated(reference, None), rel=1e-12)


@on_ranks(2)
def test_what_is_recomputed_is_not_gathered_a_third_time(monkeypatch):
    begun = []
    begin = Ahead._begin
    monkeypatch.setattr(ahead, "TOGETHER", 0)
    monkeypatch.setattr(Ahead, "_begin", lambda self, use: begun.append(use.unit.name) or begin(self, use))
    model, optimizer, axis = shared()
    model.recomputes = True
    train(model, optimizer, SOME, axis)
    assert begun[-9:] == ["Chosen", *LAYERS, *reversed(LAYERS)]
