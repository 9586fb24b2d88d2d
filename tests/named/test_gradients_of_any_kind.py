"""Gradients that are asked for, gradients of gradients, parameters that others stand in for, or that many use."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call

import tulle
from ranks import on_ranks
from tulle import named as tn
from tulle.errors import GradientError, PlanError
from tulle.named.module import named_parameters

batch, other, d, e = tn.dims(batch=4, other=4, d=8, e=8)
LAYOUTS = ["batch:data", "d:data", "e:data", "batch:data, d:model", "e:data+model"]


def numbers(*dims, seed=0):
    return torch.randn([dim.size for dim in dims], generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Small(tn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.scale = tn.param(d, e, dtype=torch.float64), tn.param(e, dtype=torch.float64)

    def forward(self, x):
        y = tn.tanh(x.dot(self.weight, d)) * self.scale
        return tn.mean(tn.square(y)) + tn.mean(tn.max(y, batch)) + tn.sum(tn.square(self.weight)) * 0.1


def given_back(model, leaf):
    """`torch.autograd.grad` of parameters, which leaves alone what is there."""
    loss = model(tn.from_torch(leaf, (batch, d)))
    loss.backward()
    before = {name: one.grad.local.clone() for name, one in named_parameters(model)}
    asked = torch.autograd.grad(model(tn.from_torch(leaf, (batch, d))).local, list(model.parameters()))
    assert all(torch.equal(one.grad.local, before[name]) for name, one in named_parameters(model))
    return [tn.to_torch(one.with_part(part)) for (_, one), part in zip(named_parameters(model), asked, strict=True)]


def penalty(model, leaf):
    """The gradient of the norm of the inputs' gradient."""
    (gradient,) = torch.autograd.grad(tn.to_torch(model(tn.from_torch(leaf, (batch, d)))), leaf, create_graph=True)
    (gradient.norm(dim=1) - 1).square().mean().backward()
    return [tn.to_torch(one.grad) for _, one in named_parameters(model)]


def product_with_the_hessian(model, leaf):
    """Twice the Hessian times the gradient."""
    loss = model(tn.from_torch(leaf, (batch, d)))
    first = torch.autograd.grad(loss.local, list(model.parameters()), create_graph=True)
    squares = [tn.sum(tn.square(one.with_part(g))) for (_, one), g in zip(named_parameters(model), first, strict=True)]
    (squares[0] + squares[1]).backward()
    return [tn.to_torch(one.grad) for _, one in named_parameters(model)]


def after_a_step(model, leaf):
    """The gradients where a step of gradient descent leads, the model itself left where it is."""
    x, parameters = tn.from_torch(leaf, (batch, d)), dict(model.named_parameters())
    first = torch.autograd.grad(functional_call(model, parameters, (x,)).local, list(parameters.values()))
    moved = {
        n: (one - 0.5 * g).detach().requires_grad_() for (n, one), g in zip(parameters.items(), first, strict=True)
    }
    functional_call(model, moved, (x,)).backward()
    return [tn.to_torch(one.with_part(moved[name].grad)) for name, one in named_parameters(model)]


def taken(way):
    leaf = numbers(batch, d).requires_grad_()
    return way(Small().init(seed=0), leaf)


@on_ranks(4)
@pytest.mark.parametrize("way", [given_back, penalty, product_with_the_hessian, after_a_step])
def test_gradients_of_every_way_agree_under_layouts(way):
    mesh = tulle.init(data=2, model=2)
    expected = taken(way)
    for layout in LAYOUTS:
        with tn.use(mesh, layout):
            for one, right in zip(taken(way), expected, strict=True):
                torch.testing.assert_close(one, right, rtol=1e-11, atol=1e-12, msg=layout)


def untouched(kernel):
    """The gradient of a parameter after backward of one that does not depend on it, as of a convolution's input."""
    model, (three, out) = Small().init(seed=0), tn.dims(three=3, out=2)
    tn.sum(tn.square(model.weight)).backward()
    made = tn.convolution(model.weight, tn.from_torch(kernel, (three, d, out)), [(e, three)], (d, out))
    (first,) = torch.autograd.grad(tn.sum(made).local, [model.weight.parameter], create_graph=True)
    first.square().sum().backward()
    return tn.to_torch(model.weight.grad)


@on_ranks(2)
def test_backward_of_what_does_not_depend_on_a_parameter_leaves_its_gradient():
    kernel = numbers(*tn.dims(three=3, d=8, out=2)).requires_grad_()
    expected = untouched(kernel)
    with tn.use(tulle.init(data=2), "out:data"):
        assert torch.equal(untouched(kernel), expected)


def test_other_tensors_may_stand_in_a_parameters_place():
    model, x = Small().init(seed=0), tn.from_torch(numbers(batch, d), (batch, d))
    zeros = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    assert functional_call(model, zeros, (x,)).item() == 0 < model(x).item()
    held = model.weight
    model.load_state_dict(zeros, assign=True)
    assert model(x).item() == 0
    assert model.weight is held
    assert model.weight.parameter is model._parameters["weight"]


def test_named_parameters_are_attributes_like_others():
    model = tn.Module()
    model.bias = None
    model.bias = tn.param(d)
    model.bias = None
    assert model.bias is None
    model.scale = tn.param(d)
    del model.scale
    assert not hasattr(model, "scale")
    assert not [*model.parameters()]
    model.weight = tn.param(d)
    with pytest.raises(TypeError, match="cannot assign"):
        model.weight = nn.Linear(2, 2)
    assert [*model.parameters()] == [model.weight.parameter]


def test_a_parameter_of_two_models_is_one_when_both_were_begun():
    one, two = tn.Module(), tn.Module()
    one.table = two.table = tn.param(d, e)
    one.init()
    two.init()
    assert [*one.parameters()] == [one.table.parameter] == [*two.parameters()]


@on_ranks(2)
def test_a_copy_knows_that_it_has_parts():
    with tn.use(tulle.init(data=2), "d:data"):
        model = copy.deepcopy(Small().init())
        model(tn.from_torch(numbers(batch, d), (batch, d))).backward()
        with pytest.raises(GradientError, match=r"only tulle\.named\.clip_grad_norm knows"):
            tulle.clip_grad_norm_(model, 1.0)


def shared_by_all():
    """A plain table that two wraps look up in, over different dimensions, and that a product uses too."""
    torch.manual_seed(0)
    table = nn.Embedding(d.size, e.size).double()
    words, places = tn.wrap(table, (), e), tn.wrap(table, (), e)
    ids = torch.tensor([1, 2, 3, 1])
    x, y = words(tn.from_torch(ids, batch)), places(tn.from_torch(ids.flip(0), other))
    for _ in range(2):
        logits = x.dot(tn.from_torch(table.weight, (d, e)), e)
        loss = tn.mean(tn.cross_entropy(logits, tn.from_torch(ids, batch), d)) + tn.mean(tn.square(y))
        loss.local.backward(retain_graph=True)
    return [table.weight.grad]


@on_ranks(4)
def test_a_plain_parameter_of_many_users_gets_its_whole_gradient():
    mesh = tulle.init(data=2, model=2)
    expected = shared_by_all()
    for layout in ("batch:data", "batch:data, other:model", "other:data+model", "d:data, batch:model", "e:data"):
        with tn.use(mesh, layout):
            try:
                got = shared_by_all()
            except PlanError:
                assert layout == "e:data"
                continue
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14, msg=layout)


@on_ranks(2)
def test_a_plain_module_may_change_inside():
    with tn.use(tulle.init(data=2), "batch:data"):
        net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).double()
        wrapped, x = tn.wrap(net, d, e), tn.from_torch(numbers(batch, d), (batch, d))
        wrapped(x)
        net[1] = nn.Linear(8, 8).double()
        torch.testing.assert_close(wrapped(x).local, net(x.local))


@on_ranks(4)
def test_a_plain_module_drops_alike_where_the_part_is_the_same_and_when_it_is_computed_again():
    mesh = tulle.init(data=2, model=2)
    torch.manual_seed(mesh.rank)
    with tn.use(mesh, "batch:data"):
        wrapped, leaf = tn.wrap(nn.Dropout(0.5), d, d), torch.ones(4, 8).requires_grad_()
        y = tn.recompute(lambda x: tn.square(wrapped(x)), tn.from_torch(leaf, (batch, d)))
        tn.sum(y).backward()
        assert torch.equal(leaf.grad == 0, tn.to_torch(y) == 0)
        first, second = tulle.comm.gather_values(y.local.tolist(), mesh["model"], label="test")
        assert first == second
        before = torch.get_rng_state()
        wrapped(tn.from_torch(leaf, (batch, d)))
        assert torch.equal(torch.get_rng_state(), before)


@on_ranks(2)
def test_a_batch_norm_over_what_is_split_is_refused():
    with tn.use(tulle.init(data=2), "batch:data"):
        net = nn.Sequential(nn.BatchNorm1d(8))
        wrapped, x = tn.wrap(net, d, d), tn.from_torch(torch.ones(4, 8), (batch, d))
        with pytest.raises(PlanError, match="module 0 takes statistics over batch=4, which the layout splits"):
            wrapped(x)
        net.eval()
        assert wrapped(x).local.shape == (2, 8)


def test_what_torch_itself_draws_is_drawn_again_when_it_is_computed_again():
    leaf = torch.ones(4, 8).requires_grad_()
    y = tn.recompute(lambda x: tn.square(x.map(nn.functional.dropout)), tn.from_torch(leaf, (batch, d)))
    tn.sum(y).backward()
    assert torch.equal(leaf.grad == 0, tn.to_torch(y) == 0)
