"""What `explain` says without processes is what a run counts: exchanges, flops and memory."""

from itertools import pairwise

import pytest
import torch
from named_models import MODELS, LanguageModel, batch, d, ff, h, k, legal_layouts, length

import tulle
from ranks import on_ranks
from tulle import named as tn
from tulle.comm import traffic
from tulle.cost import Network
from tulle.live import LiveBytes
from tulle.named.explain import explain
from tulle.named.ledger import Ledger, memory_of
from tulle.named.rates import Rates


def sample_of(model):
    """The sample as named tensors, whole."""
    shapes = {"language model": [(batch, length)] * 2}
    from named_models import source

    dims = shapes.get(model) or [(batch, source), (batch, length), (batch, length)]
    return tuple(tn.from_torch(t, one) for t, one in zip(MODELS[model].sample(), dims, strict=True))


@on_ranks(4)
@pytest.mark.parametrize("model", [pytest.param("language model", marks=pytest.mark.slow), "encoder-decoder"])
def test_counters_of_the_run_agree_exactly(model):
    mesh = tulle.init(data=2, model=2)
    layouts = legal_layouts(MODELS[model], mesh.shape, together=2)
    layouts = layouts[:: len(layouts) // 5]
    for rules in layouts:
        instance, sample = MODELS[model](), sample_of(model)
        told = explain(instance, sample, mesh, tn.Layout(rules))
        with tn.use(mesh, rules):
            instance.init()
            parameters = list(instance.parameters())
            traffic.take_labels()
            ledger = Ledger()
            with ledger, LiveBytes("cpu") as live:
                with ledger.keeping({memory_of(one) for one in parameters}):
                    loss = instance.loss(*MODELS[model].sample())
                    whole = loss.local
                whole.backward()
        sent = {name: (one.bytes_sent, one.messages) for name, one in traffic.take_labels().items()}
        assert {name: counts for name, counts in sent.items() if counts != (0, 0)} == told.by_label(), rules
        assert sum(line.flops for line in ledger.lines.values()) == told.flops, rules
        assert sum(line.kept_bytes for line in ledger.lines.values()) == told.kept_bytes, rules
        assert told.parameter_bytes == sum(one.nbytes for one in parameters)
        peak_bytes = told.peak_bytes - told.parameter_bytes - told.state_bytes
        assert live.peak_bytes == pytest.approx(peak_bytes, rel=0.1), rules  # buffers travel meanwhile
    assert len(layouts) > 4


def adapted():
    """A frozen map with a trained one beside it, behind a plain module."""
    model = tn.Module()
    model.frozen, model.trained = tn.param(d, ff, dtype=torch.float64), tn.param(d, ff, dtype=torch.float64)
    model.frozen.parameter.requires_grad_(False)
    model.plain = tn.wrap(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)).double(), d, d)
    model.plain.eval()  # a batch norm in training takes whole batches
    model.forward = lambda x: tn.mean(model.plain(x).dot(model.frozen, d) + x.dot(model.trained, d))
    return model


@on_ranks(2)
def test_frozen_parameters_and_plain_modules_are_told_as_they_run():
    mesh, numbers = tulle.init(data=2), torch.ones(4, 8, dtype=torch.float64)
    model, sample = adapted(), tn.from_torch(numbers, (batch, d))
    told = explain(model, sample, mesh, "batch:data")
    with tn.use(mesh, "batch:data"):
        model.init()
        traffic.take_labels()
        model(tn.from_torch(numbers, (batch, d))).backward()
    sent = {name: (one.bytes_sent, one.messages) for name, one in traffic.take_labels().items()}
    assert sent == told.by_label()
    assert told.parameter_bytes - told.gradient_bytes == model.frozen.local.nbytes
    assert told.gradient_bytes == sum(one.nbytes for one in model.parameters() if one.grad is not None)
    assert tn.best_layout(model, sample, {"data": 2}, best=1)[0].gradient_bytes <= told.gradient_bytes


def test_an_explanation_reads_line_by_line():
    told = explain(LanguageModel(), sample_of("language model"), {"data": 4, "model": 2}, "batch:data, d_ff:model")
    text = str(told)
    assert "mesh (data=4, model=2), layout 'batch:data, d_ff:model'" in text
    (row,) = [line for line in text.splitlines() if "w1" in line and "relu" in line]
    assert row.startswith("named_models.py:")
    line = next(line for line in told.lines if "tn.relu" in line.code)
    local = batch.size // 4 * length.size * d.size * ff.size // 2
    assert line.flops == 3 * 2 * 2 * local  # two products, each once forward and twice backward
    assert line.collectives == {"all-reduce": 2}  # the sum of the second product, and of the first one's gradient
    assert told.lines[-1].code == "parameter gradients"
    assert "all-reduce" in told.lines[-1].collectives
    assert told.seconds(Rates(1e9, 1e9, Network(1e-3, 1e9))) > told.flops / 1e9


def test_a_model_larger_than_memory_can_be_explained_and_its_largest_d_ff_grows_with_the_model_axis():
    b, m = tn.dims(batch=256, d_model=1024)

    def memory(d_ff, ranks):
        inner = tn.Dim("d_ff", d_ff)
        model = tn.Module()
        model.up, model.down = tn.param(m, inner), tn.param(inner, m)
        model.forward = lambda x: tn.mean(tn.relu(x.dot(model.up, m)).dot(model.down, inner))
        x = tn.from_torch(torch.empty(b.size, m.size, device="meta"), (b, m))
        return explain(model, x, {"data": 16, "model": ranks}, "batch:data, d_ff:model").memory_bytes

    assert memory(2**22, 1) > 30e9  # nothing was allocated
    largest = [max(n for n in range(4, 26) if memory(2**n, ranks) <= 2**32) for ranks in (1, 2, 4, 8, 16)]
    assert [later - first for first, later in pairwise(largest)] == [1, 1, 1, 1]


def test_a_model_is_left_as_it_was():
    model = LanguageModel().init(seed=0)
    before = [(name, parameter.clone()) for name, parameter in model.named_parameters()]
    explain(model, sample_of("language model"), {"model": 2}, "d_ff:model")
    loss = model.loss(*model.sample())
    loss.backward()
    for (name, parameter), (other, value) in zip(model.named_parameters(), before, strict=True):
        assert name == other
        assert torch.equal(parameter, value)
        assert parameter.grad is not None
    assert (h.size, k.size) == (4, 4)


def test_neither_draws_nor_constants_nor_contexts_are_in_the_way():
    model = tn.Module()
    model.weight = tn.param(d, ff, dtype=torch.float64)
    places = torch.arange(8.0, dtype=torch.float64)
    model.forward = lambda x: tn.mean(tn.dropout(x * tn.from_torch(places, d), 0.5).dot(model.weight, d))
    sample = tn.from_torch(torch.ones(4, 8, dtype=torch.float64), (batch, d))
    tn.manual_seed(1)
    expected = tn.dropout(sample, 0.5).local
    tn.manual_seed(1)
    with torch.no_grad():
        assert explain(model, sample, {"data": 2}, "d_model:data").flops > 0
        tn.best_layout(model, sample, 2)
    assert torch.equal(tn.dropout(sample, 0.5).local, expected)
