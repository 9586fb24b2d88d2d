"""Every operation, under every layout of its dimensions that is legal, gives one process's values and gradients."""

import random
from itertools import combinations, permutations

import pytest
import torch

import tulle
from ranks import on_ranks
from tulle import named as tn
from tulle.errors import ModelError, PlanError

a, b, c, e, f = tn.dims(a=4, b=6, c=8, e=4, f=2)
c2, ce, c_half, c_more, ac, w3, three = tn.dims(c2=8, ce=8, c_half=4, c_more=12, ac=32, w3=3, three=3)
top = tn.dims(top=3)[0]
g, w5, g2, c_out, c_twice = tn.dims(g=6, w5=5, g2=2, c_out=4, c_twice=16)


def number(*dims, seed=0, ties=False):
    shape = [dim.size for dim in dims]
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (whole.mul(2).round() if ties else whole), dims


def integers(high, *dims):
    shape = [dim.size for dim in dims]
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(5)), dims


X, Y = number(a, b, c), number(c, e, seed=1)


def micro(x, w):
    """The loss of a piece depends on what its entries share: what is dropped, and a sum to divide by."""

    def loss_of(piece):
        y = tn.recompute(lambda z: tn.dropout(tn.tanh(z.dot(w, b)), 0.5), piece)
        return tn.sum(y) / tn.sum(y * y)

    return tn.serialize(loss_of, a, 2, x)


def some_nan(x):
    """NaN at one entry along c, and infinity at another."""
    place = tn.range(c)
    return tn.where(tn.equal(place, 5), float("nan"), tn.where(tn.equal(place, 2), float("inf"), x)).detach()


def told(x):
    """Numbers that can be compared."""
    return tn.where(tn.equal(x, x), x, 7.0)


def rounded(x):
    """Numbers of half the precision that can be compared."""
    return tn.elementwise(torch.round, x, decimals=3)


def no_longer_trained(x, y):
    z = x.dot(y, b)
    with torch.no_grad():
        return z.rename(a=e).detach()


CASES = {
    "dot": (lambda x, y: x.dot(y, c), X, Y),
    "dot of three": (lambda x, y, z: tn.einsum(x, y, z, out=(b, e)), X, Y, number(a, e)),
    "dot with shared dimensions": (lambda x, y: x.dot(y, b), X, number(c, b, f)),
    "einsum that only sums": (lambda x: tn.einsum(x, out=b), X),
    "einsum to a number": (lambda x, y: tn.einsum(x, y, out=()), X, number(c, a)),
    "a product of sums": (lambda x, y: x.dot(y, c) * x.dot(y, c) + x.dot(y, c) * 2 - x.dot(y, c), X, Y),
    "add in another order": (lambda x, y: x + y * 2, X, number(c, a)),
    "a bias": (lambda x, y: tn.tanh(x + y), X, number(b)),
    "an outer sum": (lambda x, y: tn.exp(x - y), number(a, b), number(c, b)),
    "divide": (lambda x, y: x / (y * y + 1), X, number(c)),
    "power and reverse": (lambda x: 1 / (x**2 + 1) + (2 - x) - (-x), X),
    "sum": (lambda x: tn.sum(x, (a, c)), X),
    "sum of a sum": (lambda x: tn.sum(tn.sum(x, a) * 3, c), X),
    "mean": (lambda x: tn.mean(x), X),
    "max": (lambda x: tn.max(x, c), X),
    "max with ties": (lambda x: tn.max(x, (c, b)), number(a, b, c, ties=True)),
    "min": (lambda x: tn.min(x, b), X),
    "extrema of what has NaN": (lambda x: told(tn.max(some_nan(x), c)) + told(tn.min(-some_nan(x), (b, c))), X),
    "extrema of half precision": (
        lambda x: tn.max(x.detach().to(torch.bfloat16), (a, c)) - tn.min(x.detach().to(torch.float16), c),
        X,
    ),
    "reductions of short integers": (
        lambda i: tn.max(i.to(torch.int16), c) + tn.gather(i.to(torch.int16), tn.zeros(e, dtype=torch.int64), c),
        integers(8, a, c),
    ),
    "softmaxes of short integers": (  # which give float32
        lambda i: (
            rounded(tn.softmax(i.to(torch.uint8), c) + tn.logsumexp(i.to(torch.uint8), c))
            + rounded(tn.log_softmax((i * 30).to(torch.int8), c))
        ),
        integers(8, a, c),
    ),
    "argmax of what has NaN": (lambda x: tn.argmax(some_nan(x), c), X),
    "softmaxes of what is infinite": (
        lambda x: told(tn.softmax(some_nan(x), c)) + told(tn.log_softmax(tn.where(x > 1, float("inf"), x.detach()), c)),
        X,
    ),
    "logsumexp": (lambda x: tn.logsumexp(x, c), X),
    "softmax": (lambda x: tn.softmax(x, b), X),
    "log_softmax": (lambda x: tn.log_softmax(x, c), X),
    "softmaxes over two": (
        lambda x: tn.softmax(x, (c, a)) * tn.log_softmax(x, (a, b)) + tn.logsumexp(x, (b, c)),
        X,
    ),
    "softmax of what is masked": (
        lambda x: tn.softmax(x + tn.causal_bias(c, c2, dtype=torch.float64), c2),
        number(a, c, c2),
    ),
    "cumsum": (lambda x: tn.cumsum(x, c), X),
    "cumsum of the first": (lambda x: tn.cumsum(x, a), X),
    "rms_norm": (lambda x, y: tn.rms_norm(x, c, y), X, number(c)),
    "layer_norm": (lambda x, y, z: tn.layer_norm(x, c, y, z), X, number(c), number(c, seed=2)),
    "layer_norm inside": (lambda x: tn.layer_norm(x, b), X),
    "norms over two": (lambda x, y: tn.layer_norm(x, (b, c), y) + tn.rms_norm(x, (c, b)), X, number(c)),
    "rename": (lambda x: x.rename(c=c2), X),
    "rename two": (lambda x: tn.tanh(x.rename(c=c2, a=e)), X),
    "rename to swap": (lambda x: x.rename(c=c2, c2=c), number(a, c, c2)),
    "rename without gradients what has some": (no_longer_trained, X, number(b)),
    "rename a pending sum": (lambda x, y: (x.dot(y, b) * 2).rename(c=c2), X, number(b)),
    "rename, then meet what is split": (lambda x, y: x.rename(c=c2).dot(y, c2), X, number(c2, ce)),
    "one rename used twice": (
        lambda x, y: tn.sum(x.rename(c=c2) * x.rename(c=c2)) + tn.sum(x.rename(c=c2).dot(y, c2)),
        X,
        number(c2, ce),
    ),
    "split": (lambda x: tn.split(x, c, (e, f)), X),
    "merge": (lambda x: tn.merge(x, (a, c), ac), X),
    "merge, turned": (lambda x: tn.merge(x, (c, a), ac), X),
    "split of a merge": (lambda x: tn.split(tn.merge(x, (a, c), ac), ac, (c2, e)), X),
    "where": (lambda x, y: tn.where(x > y, x, y * 2), X, number(c)),
    "where not a number": (lambda x: tn.where(x > 0, tn.log(tn.where(x > 0, x, 1.0)), 0.0), X),
    "maximum": (lambda x, y: tn.maximum(x, y), X, number(b)),
    "comparisons": (
        lambda x, y: tn.where((x < y) & (x >= -1.0) | ~(x <= 0.5), x, 0.0),
        X,
        number(b),
    ),
    "one_hot": (lambda i, x: tn.one_hot(i, c, dtype=torch.float64) * x, integers(8, a, b), X),
    "gather": (lambda x, i: tn.gather(x, i, c), number(c, f), integers(8, a, b)),
    "gather of one": (lambda x, i: tn.gather(x, i, c), number(c), integers(8)),
    "gather along the last": (lambda x, i: tn.gather(x, i, c), number(f, e, c), integers(8, a, b)),
    "gather with shared dimensions": (lambda x, i: tn.gather(x, i, c), X, integers(8, b, e, a)),
    "concat": (lambda x, y: tn.concat([x, y], [c, c_half], c_more), X, number(c_half, b, a)),
    "slice": (lambda x: tn.slice(x, c, c_half, start=3), X),
    "pad": (lambda x: tn.pad(x, c, c_more, before=1, value=2.0), X),
    "pad with a mask": (lambda x: tn.where(tn.mask(c_more, 8), tn.pad(x, c, c_more), 0.0), X),
    "stack": (lambda x, y: tn.stack([x, y], f), X, number(c, b, a)),
    "unstack": (lambda x: tn.unstack(x, a)[2], X),
    "shift up": (lambda x: tn.shift(x, c, 1), X),
    "shift down": (lambda x: tn.shift(x, c, -5), X),
    "shift around": (lambda x: tn.shift(x, a, 3, wrap=True), X),
    "halo": (lambda x: tn.halo(x, c, (c_half, w5), before=2), X),
    "halo beyond the next rank": (lambda x: tn.halo(x, c, (c_out, g), before=1), number(a, c, f)),
    "top_k": (lambda x: tn.top_k(x, c, top)[0], X),
    "top_k with ties": (lambda x: tn.top_k(x, c, top)[1], number(a, b, c, ties=True)),
    "argmax with ties": (lambda x: tn.argmax(x, c), number(a, b, c, ties=True)),
    "sample": (lambda x: tn.sample(x, c, temperature=0.7), X),
    "sample at 0": (lambda x: tn.sample(x, c, temperature=0), X),
    "dropout": (lambda x: tn.dropout(x, 0.3), X),
    "dropout of a sum": (lambda x: tn.dropout(tn.sum(x, a), 0.3), X),
    "cross_entropy": (lambda x, i: tn.cross_entropy(x, i, c), X, integers(8, a, b)),
    "cross_entropy, smoothed": (
        lambda x, i: tn.cross_entropy(x, i, c, label_smoothing=0.1, z_loss=0.01),
        X,
        integers(8, a, b),
    ),
    "broadcast_to": (lambda x: tn.tanh(tn.broadcast_to(x, (c, a, b))), number(b, a)),
    "broadcast_to of a number": (lambda x: tn.broadcast_to(x, f), number()),
    "attention": (
        lambda q, k, v: tn.attention(q, k, v, (c, c2, f), is_causal=True),
        number(a, c, b, f),
        number(a, c2, b, f),
        number(a, c2, b, f, seed=1),
    ),
    "attention, multi-query, biased": (
        lambda q, k, v, m: tn.attention(q, k, v, (c, c2, f), bias=m),
        number(a, b, c, f),
        number(c2, a, f),
        number(a, c2, f, seed=1),
        number(b, c, c2),
    ),
    "attention, biased by the memory alone": (
        lambda q, k, v, m: tn.attention(q, k, v, (c, c2, f), bias=m),
        number(a, c, b, f),
        number(a, c2, b, f),
        number(a, c2, b, f, seed=1),
        number(c2),
    ),
    "attention with dimensions that only a bias or a key has": (
        lambda q, k, v, m: tn.attention(q, k, v, (c, c2, f), bias=m),
        number(a, c, f),
        number(b, c2, f),
        number(a, c2, f, seed=1),
        number(e, c, c2),
    ),
    "attention with nothing to look at": (
        lambda q, k, v, i: tn.attention(q, k, v, (c, c2, f), bias=tn.where(i < 4, 0.0, float("-inf"))),
        number(a, c, b, f),
        number(a, c2, b, f),
        number(a, c2, b, f, seed=1),
        integers(8, a, c),
    ),
    "recompute": (
        lambda x, y: tn.recompute(lambda z: tn.dropout(tn.tanh(z.dot(y, c)), 0.5), x * 2),
        X,
        Y,
    ),
    "recompute of two": (
        lambda x, y: tn.einsum(*tn.recompute(lambda z: (z.dot(y, c), tn.dropout(z, 0.5)), x * 2), out=(a, c)),
        X,
        Y,
    ),
    "serialize": (micro, X, number(b)),
    "convolution": (
        lambda x, w: tn.convolution(x, w, [(c, w3)], (b, f)),
        X,
        number(w3, b, f),
    ),
    "convolution in two": (
        lambda x, w: tn.convolution(x, w, [(c, w3), (a, w5)], (b, f)),
        X,
        number(w3, w5, b, f),
    ),
    "convolution to two channels": (
        lambda x, w: tn.convolution(x, w, [(c, w3), (e, three)], (f, g2)),
        number(a, c, e, f),
        number(w3, three, f, g2),
    ),
    "convolution in three": (
        lambda x, w: tn.convolution(x, w, [(c, w3), (a, three), (e, f)], (g, g2)),
        number(a, b, c, e, g),
        number(w3, three, f, g, g2),
    ),
    "convolution with a stride": (
        lambda x, w: tn.convolution(x, w, [(c, w3, c_out)], (b, f), stride=2),
        X,
        number(w3, b, f),
    ),
    "convolution, dilated": (
        lambda x, w: tn.convolution(x, w, [(c, w3)], (b, f), dilation=2),
        X,
        number(w3, b, f),
    ),
    "transposed convolution": (
        lambda x, w: tn.transposed_convolution(x, w, [(c, w5), (a, w3)], (b, f)),
        X,
        number(w3, w5, b, f),
    ),
    "transposed convolution with a stride": (
        lambda x, w: tn.transposed_convolution(x, w, [(c, w3, c_twice)], (b, f), stride=2, dilation=2),
        X,
        number(w3, b, f),
    ),
}


def outcome(operation, inputs):
    """What an operation gives, and the gradients of its inputs, whole."""
    tn.manual_seed(7)
    leaves = [whole.clone().requires_grad_(whole.is_floating_point()) for whole, _ in inputs]
    named = [tn.from_torch(leaf, dims) for leaf, (_, dims) in zip(leaves, inputs, strict=True)]
    result = operation(*named)
    whole = tn.to_torch(result)
    if whole.requires_grad:
        weight = torch.randn(whole.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
        (whole * weight).sum().backward()
    return result.dims, [whole.detach(), *[leaf.grad for leaf in leaves if leaf.grad is not None]]


def layouts_of(operation, inputs, mesh):
    """All layouts in which no two dimensions that meet share an axis, over up to all axes together."""
    from tulle.named.planned import PlannedWire
    from tulle.named.scope import Scope, entered

    with entered(Scope(PlannedWire({}), tn.Layout())) as scope:
        operation(
            *[tn.from_torch(whole.to("meta").requires_grad_(whole.is_floating_point()), dims) for whole, dims in inputs]
        )
    pairs = {(one.name, other.name) for dims in scope.seen for one, other in permutations(dims, 2)}
    together = ["+".join(axes) for count in range(1, len(mesh.shape) + 1) for axes in combinations(mesh.shape, count)]
    layouts = [{}]
    for name in sorted({dim.name for dims in scope.seen for dim in dims}):
        met = [other for one, other in pairs if one == name]
        layouts += [
            rules | {name: axes}
            for rules in layouts
            for axes in together
            if not any(axis in rules.get(other, "").split("+") for other in met for axis in axes.split("+"))
        ]
    return layouts


def agree_under_layouts(case, mesh, at_most):
    operation, *inputs = CASES[case]
    dims, expected = outcome(operation, inputs)
    layouts = layouts_of(operation, inputs, mesh)
    legal = 0
    for rules in random.Random(0).sample(layouts, min(at_most, len(layouts))):
        try:
            with tn.use(mesh, rules):
                got_dims, got = outcome(operation, inputs)
        except (PlanError, ModelError):  # a size does not divide evenly, or a kernel is split
            continue
        legal += 1
        assert got_dims == dims
        for one, other in zip(got, expected, strict=True):
            assert torch.allclose(one, other, rtol=1e-12, atol=1e-12), rules
    assert legal > 1


@on_ranks(2)
@pytest.mark.parametrize("case", CASES)
def test_every_layout_of_an_operation_agrees(case):
    agree_under_layouts(case, tulle.init(model=2), at_most=1000)


@pytest.mark.slow
@on_ranks(4)
@pytest.mark.parametrize("case", CASES)
def test_layouts_of_an_operation_over_two_axes_agree(case):
    agree_under_layouts(case, tulle.init(data=2, model=2), at_most=64)


@pytest.mark.parametrize(
    ("left", "right", "over", "out"),
    [
        ((a, b, c), (c, e), c, "abc,ce->abe"),
        ((a, b, c), (c, e, f), c, "abc,cef->abef"),
        ((a, b, c), (b, c, e, f), (b, c), "abc,bcef->aef"),
        ((a, b, c), (c, b, e), (b, c), "abc,cbe->ae"),  # turned: no matrix from the right
        ((a, b, c), (b, c, e), c, "abc,bce->abe"),  # walked through together: neither
        ((b, c), (b, c), (b, c), "bc,bc->"),
    ],
)
def test_products_are_those_of_torch(left, right, over, out):
    (x, _), (y, _) = number(*left), number(*right, seed=1)
    product = tn.from_torch(x, left).dot(tn.from_torch(y, right), over)
    torch.testing.assert_close(product.local, torch.einsum(out, x, y), rtol=1e-12, atol=1e-12)
