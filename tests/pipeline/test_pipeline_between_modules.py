"""Operations between the modules of a pipeline: in place, detached, by functions of one's own, of any shape."""

import logging
from enum import Enum

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from beside_one_process import DTYPE, both, data, loss_of
from pipeline_networks import WIDTH, Chain, TiedEnds, make
from torch import nn

import tulle
from ranks import on_ranks
from tulle import pipeline
from tulle.errors import TulleError
from tulle.pipeline import shapes
from tulle.pipeline.shapes import Shapes
from tulle.pipeline.structure import flatten


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        y = self.first(x)
        z = self.second(y)
        y += 1
        y[:, 0] = z[:, 1]
        canvas = torch.zeros(len(x), WIDTH, dtype=x.dtype)
        canvas[:, 1:] += y[:, 1:]
        w = self.second(y)
        y.add_(z)
        return w + self.third(y) + canvas


@on_ranks(2)
def test_writes_between_modules_are_seen_in_inference_mode():
    mesh = tulle.init(pipe=-1)
    model, reference = make(InPlace), make(InPlace)
    pipeline.place(model, mesh["pipe"], {"first": 0, "second": 1, "third": 0})
    x = data()
    with torch.inference_mode():
        out, expected = model(x), reference(x)
        out += 1
        again = model.second(out)
        out[:, 0] = 3
        assert torch.tensor(out.tolist(), dtype=DTYPE).sub(expected + 1).abs()[:, 1:].max() < 1e-12
        e = reference.second(expected + 1)
        assert torch.tensor(again.tolist(), dtype=DTYPE).sub(e).abs().max() < 1e-12
        got = pipeline.step(micro_batches=2)(lambda model, x: model(x))(model, x).concat()
        assert got.sub(expected).abs().max() < 1e-12


class Detaches(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        y = self.first(x)
        a = self.third(y.sum(0))
        y = self.first(x)
        self.second(y).detach_()
        y.detach_()
        b = self.second(y) + y * 2
        z = self.first(x).detach().requires_grad_()
        return a + b * 2 + self.third(z * 2)


@on_ranks(2)
def test_what_is_detached_in_place_is_so_on_all_ranks():
    worst, _, _ = both(Detaches, {"first": 0, "second": 1, "third": 1}, steps=2)
    assert worst < 1e-12


class Marks(nn.Linear):
    def forward(self, x):
        return super().forward(x.requires_grad_())


class Marked(nn.Module):
    """The input of `second` needs a gradient from when that has run."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), Marks(WIDTH, WIDTH)

    def forward(self, x):
        y = self.first(x).detach()
        assert not y.requires_grad
        z = self.second(y)
        assert y.requires_grad
        return z + self.first(y * 2)


@on_ranks(2)
def test_what_a_module_makes_need_a_gradient_does_so_on_all_ranks():
    worst, _, _ = both(Marked, {"first": 0, "second": 1}, steps=2)
    assert worst < 1e-12


class Graph(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("edges", torch.eye(WIDTH, dtype=DTYPE).roll(1, 0).to_sparse())

    def forward(self, x):
        x = torch.sparse.mm(self.edges, self.first(x).T).T.tanh()
        return torch.sparse.mm(self.edges, self.second(x).T).T


@on_ranks(2)
def test_a_sparse_buffer_may_be_read_at_several_stages():
    worst, _, _ = both(Graph, {"first": 0, "second": 1}, steps=2)
    assert worst < 1e-12
    mesh, graph = tulle.init(pipe=-1), Graph()
    graph.edges *= 1 + mesh.rank
    pipeline.place(graph, mesh["pipe"], {"first": 0, "second": 1})
    assert graph.edges.to_dense().sum() == WIDTH  # the first rank's


class Pyramid(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv1d(1, 2, 3, padding=1), nn.Conv1d(2, 1, 3, padding=1)

    def forward(self, x):
        x = self.first(x.unsqueeze(1))
        parts = [F.interpolate(x, scale_factor=s) for s in (0.5, 2.0)]
        return sum(self.second(p).mean(-1) for p in parts)


@on_ranks(2)
def test_shapes_that_follow_from_fractions():
    worst, _, _ = both(Pyramid, {"first": 0, "second": 1}, steps=1)
    assert worst < 1e-12


@on_ranks(1)
def test_shapes_of_pools_follow_from_fractions_too():
    shapes = Shapes()
    for ratio, length in ((0.5, 10), (0.75, 15)):
        leaves, spec = flatten(((torch.zeros(1, 1, 20, 20), 2), {"output_ratio": (ratio, ratio)}))
        outcome = shapes.outcome(F.fractional_max_pool2d, leaves, spec)
        assert outcome.results[0].shape == (1, 1, length, length)


@on_ranks(1)
def test_no_more_than_the_last_shapes_are_remembered(monkeypatch):
    monkeypatch.setattr(shapes, "_REMEMBERED", 2)
    known = Shapes()
    for length in (1, 2, 3, 2):
        leaves, spec = flatten(((torch.zeros(length),), {}))
        assert known.outcome(torch.exp, leaves, spec).results[0].shape == (length,)
    assert [key[2][0][0] for key in known._known] == [(2,), (3,)]


@on_ranks(1)
def test_writes_in_what_needs_a_gradient_are_known_by_shapes():
    computed = torch.ones(2, 3, requires_grad=True) * 1
    cases = (F.relu, computed, True), (torch.Tensor.__setitem__, computed, 0, 1.0), (torch.Tensor.add_, computed, 1.0)
    for function, *args in cases:
        leaves, spec = flatten((tuple(args), {}))
        assert Shapes().outcome(function, leaves, spec).written == (0,)
    leaves, spec = flatten(((computed, False), {}))
    assert Shapes().outcome(torch.Tensor.requires_grad_, leaves, spec) is None, "torch refuses that of what is no leaf"


@on_ranks(1)
def test_torch_is_not_heard_on_shapes_that_do_not_fit():
    records = []
    heard = logging.Handler()
    heard.emit = records.append
    told = logging.getLogger("torch._subclasses.fake_tensor")
    told.addHandler(heard)
    try:
        leaves, spec = flatten(((torch.zeros(4, 8), torch.zeros(8, 8)), {}))
        assert Shapes().outcome(torch.Tensor.add_, leaves, spec) is None
    finally:
        told.removeHandler(heard)
    assert not records


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        f = torch.fft.fft(self.first(x)).conj()
        g = F.linear(f, self.second.weight.to(f.dtype)).conj()
        return torch.cat([g.real, g.imag])


@on_ranks(2)
def test_conjugates_travel():
    worst, _, _ = both(Complex, {"first": 0, "second": 1})
    assert worst < 1e-12


class Rectified(nn.Linear):
    """Writes in what it is given."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)

    def forward(self, x):
        x.clamp_(min=0)
        return super().forward(x).tanh()


class WritesInItsInput(nn.Module):
    """Code after a module that writes in a tensor which all ranks have reads what was written."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Rectified(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = x.sin()
        part = x[:, :3]
        y = self.first(x)
        return y * self.second(x) + part.sum()


@on_ranks(2)
def test_a_module_that_writes_in_a_tensor_of_all_ranks():
    worst, _, _ = both(WritesInItsInput, {"first": 0, "second": 1}, steps=2)
    assert worst < 1e-12


class Half(Enum):
    FIRST, BOTH = 1, 2


class Halved(nn.Linear):
    def forward(self, x, half):
        return super().forward(x)[:, : WIDTH // 2] if half is Half.FIRST else super().forward(x)


def by_length(y, count):
    return y[:, : np.int64(count)]


def by_numbers(y, count):
    return y[:, np.arange(count)]


def by_range(y, count):
    return y[:, range(count)]


def by_mask(y, count):
    return y[:, np.arange(WIDTH) < count]


def by_shape(y, count):
    return y.reshape(-1, np.int64(count))


def by_format(y, count):
    y = y.view(-1, 2, 3, 1).expand(-1, 2, 3, 2)
    y = y.contiguous(memory_format=torch.channels_last if count == 2 else torch.contiguous_format)
    return y.flatten(1) if y.is_contiguous() else 2 * y.flatten(1)


class ByValue(nn.Module):
    """What an operation and a module give follows from what is no tensor, and is not the same twice."""

    def __init__(self, chosen):
        super().__init__()
        self.first, self.second, self.chosen = Halved(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), chosen

    def forward(self, x):
        total = self.second(x).sum()
        for count, half in ((3, Half.FIRST), (2, Half.BOTH)):
            y = self.chosen(self.first(x, Half.BOTH).tanh(), count) * count
            total = total + y.sum() * y.shape[0] + y.pow(2).sum(0).numel() + self.first(x, half).sum().exp()
        return self.second(x) * total


@on_ranks(2)
@pytest.mark.parametrize("chosen", [by_length, by_numbers, by_range, by_mask, by_shape, by_format])
def test_outcomes_follow_from_values_that_are_no_tensors(chosen):
    worst, _, _ = both(lambda: ByValue(chosen), {"first": 0, "second": 1}, steps=1, micro_batches=2)
    assert worst < 1e-12


class Plus(nn.Module):
    def forward(self, x):
        return x + 1


class Lends(nn.Module):
    """A view lives at another stage than what it is of."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.plus = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), Plus()

    def forward(self, x):
        y = self.first(x).tanh() * 1
        view = y.view_as(self.second(y * 1))
        return self.written(y, view)


class WritesInTheView(Lends):
    def written(self, y, view):
        view.mul_(3)
        first = self.plus(y)
        view.mul_(2)
        return first + self.plus(y) + view


@on_ranks(2)
def test_what_is_written_in_a_view_of_a_copy_is_read_by_all_each_time():
    worst, _, _ = both(WritesInTheView, {"first": 0, "second": 1, "plus": 0}, steps=1)
    assert worst < 1e-12


class WritesInWhatItIsOf(Lends):
    def written(self, y, view):
        y.mul_(2)
        return self.second(view[1:])


@on_ranks(2)
def test_a_view_of_a_copy_is_refused_when_what_it_is_of_was_written_in_since():
    model = pipeline.place(make(WritesInWhatItIsOf), tulle.init(pipe=-1, timeout=8)["pipe"], {"first": 0, "second": 1})
    with pytest.raises(TulleError, match="a view of what lives at another stage, in which 'mul_' has written since"):
        model(data())


class Kept(nn.Linear):
    def forward(self, x):
        return super().forward(x).relu().to_sparse()


class Full(nn.Linear):
    def forward(self, x):
        return super().forward(x.to_dense())


class SparseBetween(nn.Module):
    """Sparse gradients go to a table at another stage, and what is passed on is sparse."""

    def __init__(self):
        super().__init__()
        self.table, self.first, self.second = nn.Embedding(2, WIDTH), Kept(WIDTH, WIDTH), Full(WIDTH, WIDTH)

    def forward(self, x):
        y = self.second(self.first(x))
        return y + F.embedding((y.sum(1) > 0).long(), self.table.weight, sparse=True) + self.table.weight.sum()


@on_ranks(2)
def test_sparse_values_and_gradients_travel():
    assert both(SparseBetween, {"table": 0, "first": 0, "second": 1}, steps=2)[0] < 1e-12


class WithTable(nn.Module):
    """Its own modules, and those of another model whose parameters alone are read."""

    def __init__(self, model, tied):
        super().__init__()
        self.model = model
        self.__dict__["tied"] = tied

    def forward(self, x):
        return F.linear(self.model(x), self.tied.embed.weight)


@on_ranks(2)
def test_parameters_that_several_stages_hold_stay_equal_where_their_model_is_not_called():
    mesh, gradients = tulle.init(pipe=-1, timeout=8), []
    for is_placed in (False, True):
        model, tied = make(Chain), make(TiedEnds)
        if is_placed:
            pipeline.place(model, mesh["pipe"], {"layers": 0})
            pipeline.place(tied, mesh["pipe"], {"embed": 0, "middle": 0, "other": 1, "head": 1})
        step = pipeline.step(micro_batches=2)(lambda model, x, tied=tied: loss_of(WithTable(model, tied), x))
        step(model, data())
        gradients.append(tied.embed.weight.grad)
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=0)
