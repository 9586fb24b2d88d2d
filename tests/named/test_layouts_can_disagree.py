"""The twins of test_layouts_agree: with one rule broken, layouts give other numbers, and the comparison says so."""

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from named_models import MODELS, run, worst_difference

import tulle
from ranks import on_ranks
from tulle import named as tn
from tulle.named.gradients import Gradients
from tulle.named.scope import Scope
from tulle.named.wire import ProcessWire, joint

RULES = {"batch": "data", "heads": "model", "d_ff": "model", "vocab": "model"}


def without_an_f(patch):
    patch.setattr(ProcessWire, "enter", lambda self, tensor, axes, label: tensor)


def without_a_g(patch):
    patch.setattr(ProcessWire, "leave", lambda self, tensor, axes, label: tensor)


def without_the_mask(patch):
    patch.setattr(torch.Tensor, "masked_fill", lambda self, mask, value: self)


def without_the_sum_that_was_put_off(patch):
    patch.setattr(Gradients, "follow", lambda self, parameter, axes: [])


def with_the_autograd_of_funcol(patch):
    def leave(self, tensor, axes, label):
        return funcol.wait_tensor(funcol.all_reduce(tensor, "sum", joint(self.mesh, axes).group))

    patch.setattr(ProcessWire, "leave", leave)


def with_a_share_forgotten(patch):
    patch.setattr("tulle.named.gradients.Leaf._share", lambda self, axes, gradient: gradient)


@on_ranks(4)
@pytest.mark.parametrize(
    "break_it",
    [
        without_an_f,
        without_a_g,
        without_the_mask,
        without_the_sum_that_was_put_off,
        with_the_autograd_of_funcol,
    ],
)
@pytest.mark.parametrize("model", ["language model", pytest.param("encoder-decoder", marks=pytest.mark.slow)])
def test_a_broken_rule_shows(break_it, model):
    mesh = tulle.init(data=2, model=2)
    expected = run(MODELS[model], steps=1)
    with tn.use(mesh, RULES):
        assert worst_difference(run(MODELS[model], steps=1), expected) < 1e-12
    with pytest.MonkeyPatch.context() as patch:
        break_it(patch)
        with tn.use(mesh, {**RULES, "nothing": "data"}):  # a scope of its own
            assert worst_difference(run(MODELS[model], steps=1), expected) > 1e-3


def place_with_the_inner_axis_first(self, dim):
    place = 0
    for axis in reversed(self.axes_of(dim)):
        place = place * self.sizes[axis] + self.wire.ranks[axis]
    return place


@on_ranks(4)
def test_axes_of_one_dimension_in_another_order_show():
    mesh, model = tulle.init(data=2, model=2), MODELS["language model"]
    expected = run(model, steps=1)
    with tn.use(mesh, "vocab:data+model"):
        assert worst_difference(run(model, steps=1), expected) < 1e-12
    with pytest.MonkeyPatch.context() as patch, tn.use(mesh, "vocab:data+model, nothing:data"):
        patch.setattr(Scope, "place_along", place_with_the_inner_axis_first)
        assert worst_difference(run(model, steps=1), expected) > 1e-3


def split_first(weight, x, b, d, e):
    return tn.mean(x.dot(weight, d)) + tn.mean(tn.sum(weight * weight, e))


def split_last(weight, x, b, d, e):
    whole = tn.mean(tn.sum(weight * weight, e))
    return whole + tn.mean(x.dot(weight, d))


@on_ranks(2)
@pytest.mark.parametrize("used_twice", [split_first, split_last])
def test_a_parameter_whose_uses_are_split_differently_gets_its_whole_gradient(used_twice):
    mesh = tulle.init(data=2)
    b, d, e = tn.dims(b=4, d=3, e=2)
    x = torch.arange(12.0, dtype=torch.float64).view(4, 3)
    results = []
    for break_it in (None, None, with_a_share_forgotten):
        model = tn.Module()
        with pytest.MonkeyPatch.context() as patch, tn.use(mesh, "b:data" if results else ""):
            if break_it:
                break_it(patch)
            model.weight = tn.param(d, e, dtype=torch.float64)
            model.init(seed=3)
            used_twice(model.weight, tn.from_torch(x, (b, d)), b, d, e).backward()
            results.append(model.weight.grad.local)
    torch.testing.assert_close(results[1], results[0], rtol=1e-12, atol=1e-12)
    assert (results[2] - results[0]).norm() > 1e-3


def next_to_each_other(tensor, batch, pieces, piece):
    small = batch.resized(batch.size // pieces)
    length = tensor.scope.local_size(small)
    return tn.from_local(tensor.local.narrow(0, piece * length, length), (small, *tensor.dims[1:]))


def loss_in_pieces(mesh, layout):
    batch, d = tn.dims(batch=8, d=3)
    with tn.use(mesh, layout):
        x = tn.from_torch(torch.arange(24.0, dtype=torch.float64).view(8, 3), (batch, d))
        weight = tn.Module()
        weight.one = tn.ones(d, dtype=torch.float64)
        weight.init()
        tn.manual_seed(0)
        return tn.serialize(lambda piece: tn.mean(tn.dropout(piece * weight.one, 0.5)) ** 2, batch, 2, x).item()


@on_ranks(2)
def test_pieces_of_what_each_rank_has_in_a_row_would_show():
    mesh = tulle.init(data=2)
    whole = loss_in_pieces(mesh, "")
    assert loss_in_pieces(mesh, "batch:data") == pytest.approx(whole, rel=1e-12)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tulle.named.repeat._piece", next_to_each_other)
        assert loss_in_pieces(mesh, "batch:data") != pytest.approx(loss_in_pieces(mesh, ""), rel=1e-3)
