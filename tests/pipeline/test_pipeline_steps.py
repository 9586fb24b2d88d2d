"""What a step of a pipeline takes, finds and is called with: tokenizers' results, trainers, other models, hooks."""

import collections.abc
import copy
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from beside_one_process import DTYPE, both, data, loss_of, placed_chain
from pipeline_networks import WIDTH, Chain, TiedEnds, make, worst_gradient
from torch import Tensor, nn

import tulle
from ranks import on_ranks
from tulle import pipeline
from tulle.errors import CommunicationError, DataError, GradientError, ModelError
from tulle.pipeline import holdings, placement_of
from tulle.pipeline.turns import Surroundings


class Encoding(collections.UserDict):
    def __getattr__(self, name):
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


def on_encoding(model, batch, pair):
    assert len(batch.x) == 2, len(batch.x)
    assert len(pair[0]["x"]) == 2
    loss = model(batch.x).pow(2).mean()
    loss.backward()
    return loss


@on_ranks(2)
def test_what_a_tokenizer_gives_is_cut():
    model = placed_chain(tulle.init(pipe=-1))
    step = pipeline.step(micro_batches=4)(on_encoding)
    batch = Encoding({"x": data(), "n": 3})
    step(model, batch, (Encoding({"x": data()}), data()))
    step = pipeline.step(micro_batches=4, split={"batch.n": None})(on_encoding)
    step(model, batch, (Encoding({"x": data()}), data()))


class Batch(collections.abc.MutableMapping):
    """A mapping that keeps its items in a dictionary of its own."""

    def __init__(self, **items):
        self.items_of = items

    def __getitem__(self, name):
        return self.items_of[name]

    def __setitem__(self, name, value):
        self.items_of[name] = value

    def __delitem__(self, name):
        del self.items_of[name]

    def __iter__(self):
        return iter(self.items_of)

    def __len__(self):
        return len(self.items_of)


def test_a_mapping_of_ones_own_is_cut_and_left_as_it_is():
    batch = Batch(x=torch.arange(4.0), n=3)
    taken = pipeline.step(micro_batches=2)(lambda one: one["x"].clone())(batch)
    assert taken.concat().tolist() == [0, 1, 2, 3]
    assert len(batch["x"]) == 4


def of_arrays(model, x, ids):
    loss = (model(torch.from_numpy(x)).sum(-1) * torch.from_numpy(ids)).mean()
    loss.backward()
    return loss


def test_arrays_of_numpy_are_cut_as_tensors_are():
    x, ids = data(5).numpy(), torch.arange(5.0, dtype=DTYPE).numpy()
    sizes = []
    pipeline.step(micro_batches=2)(lambda x, batch: sizes.append((x.shape, len(batch["ids"]))))(x, {"ids": ids})
    pipeline.step(micro_batches=2, split={"x": 1, "ids": None})(lambda x, ids: sizes.append((x.shape, len(ids))))(
        x, ids
    )
    assert sizes == [((3, WIDTH), 3), ((2, WIDTH), 2), ((5, 3), 5), ((5, 3), 5)]
    model, whole = make(Chain), make(Chain)
    step = pipeline.step(micro_batches=2)(of_arrays)
    torch.testing.assert_close(step(model, x, ids).mean(), of_arrays(whole, x, ids).detach())
    assert worst_gradient(model, whole) < 1e-14
    with pytest.raises(
        DataError, match=r"numbers of samples: x of shape \[5, 6\]: 5, ids of shape \[4\]: 4; say split="
    ):
        step(model, x, ids[:4])


@pytest.mark.parametrize("as_array", [False, True])
def test_what_is_cut_along_another_dimension_has_no_gaps_if_the_batch_has_none(as_array):
    def flat(x):
        seen.append(torch.as_tensor(x).view(-1).tolist())

    seen: list[list[int]] = []
    batch = torch.arange(8).view(2, 4)
    pipeline.step(micro_batches=2, split={"x": 1})(flat)(batch.numpy() if as_array else batch)
    assert seen == [[0, 1, 4, 5], [2, 3, 6, 7]]
    strides = []
    pipeline.step(micro_batches=2, split={"x": 1})(lambda x: strides.append(x.stride()))(batch.t().contiguous().t())
    assert strides == [(1, 2), (1, 2)]  # what is laid out otherwise stays so, and is not copied


def of_pictures(model, pictures, boxes):
    assert [len(of_one["where"]) for of_one in boxes] == [int(x[0]) for x in pictures]
    loss = torch.stack(
        [model(x).sum() * of_one["where"].sum() for x, of_one in zip(pictures, boxes, strict=True)]
    ).mean()
    loss.backward()
    return loss


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_list_with_one_item_a_sample_is_cut_between_its_items(kind):
    pictures = kind(torch.full((WIDTH,), float(n), dtype=DTYPE) for n in range(1, 6))
    boxes = kind({"where": torch.ones(n, dtype=DTYPE)} for n in range(1, 6))
    model, whole = make(Chain), make(Chain)
    step = pipeline.step(micro_batches=2, split={"pictures": "items", "boxes": "items"})(of_pictures)
    torch.testing.assert_close(step(model, pictures, boxes).mean(), of_pictures(whole, pictures, boxes).detach())
    assert worst_gradient(model, whole) < 1e-14


def test_what_is_no_list_of_samples_is_not_cut_between_items():
    step = pipeline.step(micro_batches=2, split={"pictures": "items"})(of_pictures)
    with pytest.raises(DataError, match="'pictures' is to be cut between its items, but is of type Tensor: expected a"):
        step(make(Chain), data(4), [{}] * 4)
    with pytest.raises(DataError, match=r"items of pictures: 3.*'items' for a list with one item a sample"):
        step(make(Chain), [data(1)] * 3, data(4))


class Trainer:
    def __init__(self, model):
        self.model = model

    @pipeline.step(micro_batches=4)
    def step(self, x):
        return loss_of(self.model, x)


@on_ranks(2)
def test_a_step_finds_the_model_of_a_trainer_or_a_closure():
    model = placed_chain(tulle.init(pipe=-1))
    runtime = placement_of(model).runtime
    Trainer(model).step(data())
    assert runtime.programs == 6, runtime.programs

    @pipeline.step(micro_batches=4)
    def step(x):
        return loss_of(model, x)

    step(data())
    assert runtime.programs == 11, runtime.programs


def plain_too(model, critic, x):
    loss = critic(x).pow(2).mean()
    loss.backward()
    return loss_of(model, x) + loss.detach()


@on_ranks(2)
def test_a_loss_of_a_model_that_is_not_placed_counts_by_its_share():
    model = placed_chain(tulle.init(pipe=-1))
    critic, ref = make(Chain), make(Chain)
    pipeline.step(micro_batches=4)(plain_too)(model, critic, data())
    ref(data()).pow(2).mean().backward()
    assert worst_gradient(critic, ref) < 1e-12


def with_plain_parameters(model, criterion, x):
    loss = criterion(model(x)).pow(2).mean()
    loss.backward()
    return loss


@on_ranks(2)
@pytest.mark.parametrize("skipped", [0, 1])
def test_replicas_of_which_the_last_micro_batch_has_no_backward_are_refused(skipped):
    mesh, model, whole = tulle.init(data=-1), make(Chain), make(Chain)
    tulle.distribute(model, torch.optim.SGD(model.parameters()), mesh)
    came = []

    @pipeline.step(micro_batches=2)
    def skipping(model, x):
        came.append(len(x))
        return loss_of(model, x) if len(came) - 1 != skipped else model(x).mean()

    if skipped:
        with pytest.raises(GradientError, match="the last of 2 micro-batches of a step ran no backward, and earlier"):
            skipping(model, data())
    else:
        skipping(model, data())
        (whole(data()[4:]).pow(2).mean() / 2).backward()
        assert worst_gradient(model, whole) < 1e-14


@on_ranks(2)
def test_a_trained_parameter_of_no_placed_model_is_refused():
    mesh = tulle.init(pipe=-1, timeout=8)
    model = placed_chain(mesh)
    # A rank that waits for one that has raised is told why.
    with pytest.raises((ModelError, CommunicationError), match="trained and in no model that was placed"):
        pipeline.step(micro_batches=4)(with_plain_parameters)(model, nn.Linear(WIDTH, 1).double(), data())


@on_ranks(2)
def test_a_loss_that_is_kept_can_be_read_after_the_step():
    mesh = tulle.init(pipe=-1, timeout=8)
    model = placed_chain(mesh)
    kept = []

    @pipeline.step(micro_batches=2)
    def step(model, x):
        loss = model(x).pow(2).mean()
        loss.backward()
        kept.append(loss)

    step(model, data())
    assert (kept[0] + kept[1]).item() > 0
    step(model, data())
    assert sum(one.item() for one in kept) > 0


@on_ranks(2)
def test_a_copy_that_is_placed_otherwise_is_refused():
    mesh = tulle.init(pipe=-1, timeout=8)
    model = placed_chain(mesh)
    with pytest.raises(ModelError, match="no values, while another rank has them"):
        pipeline.place(copy.deepcopy(model), mesh["pipe"], {"layers.0": 1, "layers.1": 0})


def test_on_a_gpu_micro_batches_run_on_the_stream_of_the_step(monkeypatch):
    entered = []

    @contextmanager
    def stream(one):
        entered.append(one)
        yield
        entered.append(f"left {one}")

    for name, found in {"is_initialized": True, "current_device": 0, "current_stream": "the step's"}.items():
        monkeypatch.setattr(torch.cuda, name, lambda found=found: found)
    monkeypatch.setattr(torch.cuda, "set_device", entered.append)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    surroundings = Surroundings()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "another thread's")
    with surroundings:
        assert entered == [0, "the step's"]
    assert entered[2:] == ["left the step's"]


def zeroes(model, x):
    model.zero_grad()
    return loss_of(model, x)


@on_ranks(2)
def test_zero_grad_within_a_step_reaches_tied_parameters():
    worst, _, _ = both(TiedEnds, {"embed": 0, "middle": 0, "other": 1, "head": 1}, zeroes, micro_batches=1)
    assert worst < 1e-12


def backs(model, x):
    y = model(x)
    g = torch.arange(float(y.numel()), dtype=DTYPE).view_as(y)
    torch.autograd.backward(y, g, retain_graph=True)
    torch.autograd.backward([y.sum()], [torch.tensor(3.0, dtype=DTYPE)], True)
    torch.autograd.backward(tensors=[y.sum()], grad_tensors=[torch.tensor(5.0, dtype=DTYPE)], retain_graph=True)
    torch.autograd.backward((y.sum(),), torch.tensor(5.0, dtype=DTYPE), retain_graph=True)
    y.backward(g)
    return y.sum()


@on_ranks(2)
def test_every_way_to_call_backward():
    worst, _, _ = both(Chain, {"layers.0": 0, "layers.1": 1}, backs, micro_batches=1, steps=2)
    assert worst < 1e-12


def freezes(model, x):
    loss = loss_of(model, x)
    for layer in model.layers[:3]:
        layer.requires_grad_(False)
    y = model.layers[0](x).sum()
    assert not y.requires_grad
    return loss + y.detach()


@on_ranks(2)
def test_parameters_that_a_step_freezes_are_frozen_on_all_ranks():
    worst, _, _ = both(Chain, {"layers.0": 0, "layers.1": 1}, freezes, micro_batches=1, steps=3)
    assert worst < 1e-12


@on_ranks(2)
def test_hooks_of_saved_tensors_hold_in_a_step():
    mesh = tulle.init(pipe=-1, timeout=8)
    model = placed_chain(mesh)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(1) or t, lambda t: t):
        pipeline.step(micro_batches=2)(loss_of)(model, data())
    assert packed


@on_ranks(2)
def test_what_compile_has_made_of_a_module_is_called():
    mesh = tulle.init(pipe=-1, timeout=8)
    model = make(Chain)
    called = []
    compiled = model.layers[0]._call_impl
    model.layers[0]._compiled_call_impl = lambda *a, **k: called.append(1) or compiled(*a, **k)
    pipeline.place(model, mesh["pipe"], {"layers.0": 0, "layers.1": 1})
    pipeline.step(micro_batches=2)(loss_of)(model, data())
    assert bool(called) == (mesh.rank == 0)


@on_ranks(2)
@pytest.mark.filterwarnings("ignore")  # of torch's compiler
def test_what_is_compiled_around_placed_modules_gives_the_numbers_of_one_process():
    mesh = tulle.init(pipe=-1, timeout=8)
    reference = make(Chain)
    wanted = loss_of(reference, data())
    model = placed_chain(mesh)
    model.layers[1].compile(backend="eager")  # what it leaves there is called by the module's stage
    found = torch.compile(F.mse_loss, backend="eager")(torch.compile(model, backend="eager")(data()), 0 * data())
    found.backward()
    assert abs(found.item() - wanted.item()) < 1e-12
    assert worst_gradient(model, reference) < 1e-12


@on_ranks(2, 3)
def test_batches_of_ever_other_lengths_do_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr(holdings, "_MOST_CALLS", 4)
    model, ref = placed_chain(tulle.init(pipe=-1)), make(Chain)
    found = placement_of(model).runtime.holdings
    step, known = pipeline.step(micro_batches=2)(loss_of), []
    for length in (*range(4, 14), *range(4, 8)):
        model.zero_grad()
        ref.zero_grad()
        x = torch.linspace(-1, 1, length * WIDTH, dtype=DTYPE).view(length, WIDTH)
        step(model, x)
        loss_of(ref, x)
        assert worst_gradient(model, ref) < 1e-12
        known.append((len(found.calls), len(found.mailbox._messages)))
    assert max(calls for calls, _ in known) <= 8, known
    assert known.count((0, 0)) > 2, "all are forgotten after each step that follows a full one"


class Plain(nn.Module):
    """Gives numbers of torch's default dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), Defaults(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Defaults(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).to(torch.get_default_dtype())


@on_ranks(2)
def test_the_default_dtype_may_change_between_steps():
    model = pipeline.place(make(Plain), tulle.init(pipe=-1)["pipe"], {"first": 0, "second": 1})
    before, found = torch.get_default_dtype(), []
    try:
        for dtype in (torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            found.append(pipeline.step(micro_batches=2)(loss_of)(model, data()).mean().dtype)
    finally:
        torch.set_default_dtype(before)
    assert found == [torch.float32, torch.float64]
