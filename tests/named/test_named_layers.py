"""Layers, models, beam search and mixtures of experts agree under layouts, and with what they stand for."""

import pytest
import torch
from named_models import worst_difference
from torch import nn

import tulle
from ranks import on_ranks
from tulle import named as tn
from tulle.errors import PlanError
from tulle.named import layers
from tulle.named.module import named_parameters

batch, source, source_memory, target, target_memory = tn.dims(
    batch=4, source=6, source_memory=6, target=6, target_memory=6
)
d, h, k, f, v, beam, experts = tn.dims(d=8, heads=4, d_kv=4, d_ff=16, vocab=12, beam=4, experts=4)
BOS, EOS = 1, 2


def widths(**more):
    return layers.Widths(d, h, k, f, v, **more)


def translator(layer_count=(1, 2), **more):
    return layers.EncoderDecoder(widths(**more), layer_count, (source, source_memory), (target, target_memory))


def ids(dim, seed, low=0):
    draw = torch.Generator().manual_seed(seed)
    return tn.from_torch(torch.randint(low, v.size, (batch.size, dim.size), generator=draw), (batch, dim))


def translate_and_train(**more):
    tn.manual_seed(4)
    model = translator(**more).init(seed=3)
    loss = tn.mean(model(ids(source, 1), ids(target, 2), ids(target, 3), label_smoothing=0.1))
    loss.backward()
    gradients = {name: tn.to_torch(one.grad) for name, one in named_parameters(model)}
    return gradients | {"loss": loss.local.detach()}


LAYOUTS = [
    "batch:data, heads:model, d_ff:model, vocab:model",
    "source:data, target:data, d:model",
    "target_memory:data, source_memory:data, vocab:data, d_kv:model, d_ff:model",
]


@pytest.fixture
def _doubles():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def in_doubles(action):
    torch.set_default_dtype(torch.float64)
    try:
        return action()
    finally:
        torch.set_default_dtype(torch.float32)


@on_ranks(4)
@pytest.mark.parametrize("more", [{}, {"is_multi_query": True, "dropout": 0.2}], ids=str)
def test_the_encoder_decoder_agrees_under_layouts(more):
    mesh = tulle.init(data=2, model=2)
    expected = in_doubles(lambda: translate_and_train(**more))
    for layout in LAYOUTS:
        with tn.use(mesh, layout):
            assert worst_difference(in_doubles(lambda: translate_and_train(**more)), expected) < 1e-11, layout


def search(width):
    model = translator().init(seed=3)
    return tn.to_torch(layers.beam_search(model, ids(source, 1, low=3), width, begin=BOS, end=EOS))


@on_ranks(4)
def test_beam_search_finds_the_same_under_layouts():
    mesh = tulle.init(data=2, model=2)
    expected = in_doubles(lambda: search(beam))
    assert expected.shape == (batch.size, target.size)
    for layout in [*LAYOUTS, "beam:data, heads:model, d_ff:model", "batch:data, beam:model"]:
        with tn.use(mesh, layout):
            assert torch.equal(in_doubles(lambda: search(beam)), expected), layout


@torch.no_grad()
@pytest.mark.usefixtures("_doubles")
def test_one_beam_writes_what_the_whole_model_finds_most_probable_word_by_word():
    model = translator().init(seed=3)
    read = ids(source, 1, low=3)
    words = torch.full((batch.size, target.size + 1), EOS)
    words[:, 0] = BOS
    done = torch.zeros(batch.size, dtype=torch.bool)
    for position in range(target.size):
        logits = tn.to_torch(model.logits(read, tn.from_torch(words[:, :-1], (batch, target))))
        order = [dim.name for dim in model.logits(read, tn.from_torch(words[:, :-1], (batch, target))).dims]
        assert order == ["batch", "target", "vocab"]
        best = logits[:, position].argmax(-1)
        words[:, position + 1] = torch.where(done, EOS, best)
        done |= best == EOS
    assert torch.equal(search(tn.Dim("beam", 1)), words[:, 1:])


@pytest.mark.usefixtures("_doubles")
def test_more_beams_find_sequences_at_least_as_probable():
    model = translator().init(seed=3)
    read = ids(source, 1, low=3)

    def log_probability(width):
        found = tn.to_torch(layers.beam_search(model, read, width, begin=BOS, end=EOS, alpha=0.0))
        shifted = torch.cat([torch.full((batch.size, 1), BOS), found[:, :-1]], 1)
        logits = model.logits(read, tn.from_torch(shifted, (batch, target)))
        chances = torch.log_softmax(tn.to_torch(logits), -1).gather(-1, found.unsqueeze(-1)).squeeze(-1)
        real = (found == EOS).cumsum(1) <= 1
        return (chances * real).sum(1)

    with torch.no_grad():
        assert (log_probability(tn.Dim("beam", 8)) >= log_probability(tn.Dim("beam", 1)) - 1e-9).all()


def mixture(gating):
    model = layers.Experts(d, f, experts, gating=gating).init(seed=1)
    x = torch.randn(batch.size, target.size, d.size, generator=torch.Generator().manual_seed(0)).requires_grad_()
    y, balance = model(tn.from_torch(x, (batch, target, d)), batch, target)
    loss = tn.mean(tn.square(y)) + balance * 0.01
    loss.backward()
    gradients = {name: tn.to_torch(one.grad) for name, one in named_parameters(model)}
    return gradients | {"y": tn.to_torch(y).detach(), "loss": loss.local.detach(), "x": x.grad}


@on_ranks(4)
@pytest.mark.parametrize("gating", ["switch", "top-2"])
def test_a_mixture_of_experts_agrees_under_layouts(gating):
    mesh = tulle.init(data=2, model=2)
    expected = in_doubles(lambda: mixture(gating))
    assert expected["y"].norm() > 0
    for layout in [
        "batch:data, experts:data, d_ff:model",
        "batch:data, experts:model",
        "target:data, experts:data",
        "d:model",
    ]:
        with tn.use(mesh, layout):
            before = tulle.comm.traffic.total.messages
            assert worst_difference(in_doubles(lambda: mixture(gating)), expected) < 1e-11, layout
            assert tulle.comm.traffic.total.messages > before


@pytest.mark.usefixtures("_doubles")
def test_with_room_for_all_a_switch_is_the_best_expert_times_its_gate():
    model = layers.Experts(d, f, experts, gating="switch", capacity_factor=4.0).init(seed=1)
    x = torch.randn(batch.size, target.size, d.size)
    y, _ = model(tn.from_torch(x, (batch, target, d)), batch, target)
    gates = torch.softmax(x @ model.gate.local, -1)
    share, best = gates.max(-1)
    inner = torch.relu(torch.einsum("bld,bldf->blf", x, model.up.local[best]))
    expected = torch.einsum("blf,blfd->bld", inner, model.down.local[best]) * share.unsqueeze(-1)
    torch.testing.assert_close(y.local, expected)


class Mixed(nn.Module):
    """A plain module that holds a named one, which holds a plain one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = tn.Module()
        self.first.weight = tn.param(d, f)
        self.second = layers.wrap(nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3)), f, tn.Dim("out", 3))
        self.third = layers.Linear(tn.Dim("out", 3), v)

    def forward(self, x):
        return self.third(self.second(tn.relu(x.dot(self.first.weight, d))))


def run_mixed():
    model = Mixed()
    for part in (model.first, model.third):
        part.init(seed=2)
    x = torch.randn(batch.size, d.size, generator=torch.Generator().manual_seed(0))
    loss = tn.mean(tn.square(model(tn.from_torch(x, (batch, d)))))
    loss.backward()
    named = {id(one.parameter): one for _, one in named_parameters(model)}
    return {
        name: tn.to_torch(named[id(one)].grad) if id(one) in named else one.grad
        for name, one in model.named_parameters()
    }


@on_ranks(4)
def test_plain_and_named_modules_nest_in_each_other():
    mesh = tulle.init(data=2, model=2)
    expected = in_doubles(run_mixed)
    assert len(expected) == 7
    for layout in ("batch:data, vocab:model", "batch:model, d:data", "vocab:data"):
        with tn.use(mesh, layout):
            assert worst_difference(in_doubles(run_mixed), expected) < 1e-12, layout
    with tn.use(mesh, "d_ff:model"), pytest.raises(PlanError, match=r"Sequential works along d_ff=16, which"):
        in_doubles(run_mixed)


def test_seats_are_counted_exactly_in_every_precision():
    n, inner, several = tn.dims(n=1024, inner=8, several=2)
    one = tn.Dim("one", 1)
    model = layers.Experts(inner, f, several, gating="switch", capacity_factor=2.0).init(seed=0).to(torch.bfloat16)
    x = torch.randn(1, 1024, 8, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
    y, _ = model(tn.from_torch(x, (one, n, inner)), one, n)
    gates = torch.softmax(x @ model.gate.local, -1)
    share, best = gates.max(-1)
    made = torch.relu(torch.einsum("bld,bldf->blf", x, model.up.local[best]))
    expected = torch.einsum("blf,blfd->bld", made, model.down.local[best]) * share.unsqueeze(-1)
    torch.testing.assert_close(y.local, expected, rtol=0.1, atol=0.1)


@pytest.mark.parametrize(("count", "is_causal"), [(2, True), (256, True), (4, False), (512, False)])
def test_relative_positions_take_any_number_of_buckets(count, is_causal):
    bias = layers.RelativeBias(tn.Dim("buckets", count), h, is_causal=is_causal).init()
    n, m = tn.dims(n=600, m=600)
    distances = bias(tn.range(n), m).local[:, 599, 0].isfinite()
    assert distances.all()
