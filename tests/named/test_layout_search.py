"""The layout search finds the optimum: the same as HiGHS, in little time, and the layouts that the paper used."""

import math
import time
from itertools import combinations, product

import numpy as np
import pytest
import torch
from named_models import MODELS, LanguageModel
from test_explain import sample_of

import tulle
from ranks import on_ranks, run_on_ranks
from tulle import named as tn
from tulle.cost import Network
from tulle.errors import PlanError
from tulle.named import layers as layers_of
from tulle.named.price import Pricing, dims_of, record
from tulle.named.rates import _BETWEEN_FLOPS, TYPICAL, Rates, _repeats, measured
from tulle.named.search import Search, arrangements, best_layout, search_shapes

RATES = Rates(2e13, 5e11, Network(latency_s=2e-6, bandwidth_bytes_per_s=2e10))


def decoder(batch=256, length=256, d_model=1024, heads=256, d_kv=256, d_ff=262144, vocab=32768, layers=4):
    """A language model of Mesh-TensorFlow's paper; its largest has 4.9 billion parameters."""
    b, n, m, d, h, k, f, v = tn.dims(
        batch=batch,
        length=length,
        memory_length=length,
        d_model=d_model,
        heads=heads,
        d_kv=d_kv,
        d_ff=d_ff,
        vocab=vocab,
    )
    model = tn.Module()
    model.table, model.out = tn.param(v, d), tn.param(d, v)
    for layer in range(layers):
        for name in "qkv":
            setattr(model, f"{name}{layer}", tn.param(d, h, k))
        setattr(model, f"o{layer}", tn.param(h, k, d))
        setattr(model, f"up{layer}", tn.param(d, f))
        setattr(model, f"down{layer}", tn.param(f, d))

    def forward(ids):
        x = tn.gather(model.table, ids, v)
        for layer in range(layers):
            y = tn.layer_norm(x, d)
            memory = y.rename(length=m)
            q, key, value = (
                t.dot(getattr(model, f"{s}{layer}"), d) for t, s in ((y, "q"), (memory, "k"), (memory, "v"))
            )
            mixed = tn.attention(q, key, value, (n, m, k), is_causal=True)
            x = x + mixed.dot(getattr(model, f"o{layer}"), (h, k))
            x = x + tn.relu(tn.layer_norm(x, d).dot(getattr(model, f"up{layer}"), d)).dot(
                getattr(model, f"down{layer}"), f
            )
        return tn.cross_entropy(tn.layer_norm(x, d).dot(model.out, d), ids, v)

    model.forward = forward
    return model, tn.from_torch(torch.zeros(batch, length, dtype=torch.int64, device="meta"), (b, n))


def translator(batch=256, length=128, d_model=1024, heads=64, d_kv=128, d_ff=65536, vocab=32768, layers=2):
    """An encoder-decoder of the paper's translation task, as wide as it gets there."""
    b, d, v = tn.dims(batch=batch, d_model=d_model, vocab=vocab)
    source, target = (tn.dims(**{n: length, f"{n}_memory": length}) for n in ("source", "target"))
    widths = layers_of.Widths(d, *tn.dims(heads=heads, d_kv=d_kv, d_ff=d_ff), v)
    ids = [
        tn.from_torch(torch.zeros(batch, length, dtype=torch.int64, device="meta"), (b, n))
        for n in (source[0], target[0], target[0])
    ]
    return layers_of.EncoderDecoder(widths, (layers, layers), source, target), tuple(ids)


def optimum(problem, pricing, memory_bytes):  # noqa: C901 - a linear program, row by row
    """The least seconds by HiGHS: one choice a dimension, one pattern of choices an operation."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    dims = problem.dims
    together = [axes for count in range(len(pricing.sizes) + 1) for axes in combinations(pricing.sizes, count)]
    parts = {axes: math.prod(pricing.sizes[a] for a in axes) for axes in together}
    choices = {d: [axes for axes, n in parts.items() if d.size % n == 0] for d in dims}
    columns = {(d, a): number for number, (d, a) in enumerate((d, a) for d in dims for a in choices[d])}
    cost, memory = [0.0] * len(columns), [0.0] * len(columns)
    rows, low, high = [], [], []

    def constrain(entries, least, most):
        rows.append(entries)
        low.append(least)
        high.append(most)

    for d in dims:
        constrain({columns[d, a]: 1 for a in choices[d]}, 1, 1)
    for one, other in map(tuple, problem.conflicts):
        for a in pricing.sizes:
            constrain({columns[d, axes]: 1 for d in (one, other) for axes in choices[d] if a in axes}, 0, 1)
    for item, count in [*problem.steps.items(), *problem.parameters.items()]:
        own = dims_of(item)
        patterns = {}
        for pattern in product(*[choices[d] for d in own]):
            taken = [(d, a) for d, axes in zip(own, pattern, strict=True) for a in axes]
            if any(a == b and frozenset((d, e)) in problem.conflicts for d, a in taken for e, b in taken if d != e):
                continue
            price = pricing.of(item, dict(zip(own, pattern, strict=True)))
            patterns[pattern] = len(cost)
            cost.append(price.seconds * count)
            memory.append(price.memory_bytes * count)
        if not own:
            constrain({next(iter(patterns.values())): 1}, 1, 1)
        for place, d in enumerate(own):
            for a in choices[d]:
                entries = {column: 1 for pattern, column in patterns.items() if pattern[place] == a}
                constrain(entries | {columns[d, a]: -1}, 0, 0)
    matrix = np.zeros((len(rows) + 1, len(cost)))
    for number, entries in enumerate(rows):
        for column, value in entries.items():
            matrix[number, column] = value
    scale = max(memory)
    matrix[-1] = np.array(memory) / scale
    cap = memory_bytes / scale if math.isfinite(memory_bytes) else np.inf
    unit = max(cost)
    result = milp(
        np.array(cost) / unit,
        constraints=LinearConstraint(matrix, [*low, -np.inf], [*high, cap]),
        integrality=np.ones(len(cost)),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 0},
    )
    return result.fun * unit if result.success else None


INSTANCES = {
    "language model, 16 x 32": (decoder, {"data": 16, "model": 32}, 16e9),
    "language model, 8 x 8 x 8": (decoder, {"a": 8, "b": 8, "c": 8}, 16e9),
    "language model, 512 x 1": (decoder, {"a": 512}, 16e9),
    "encoder-decoder, 16 x 32": (translator, {"data": 16, "model": 32}, 16e9),
    "encoder-decoder, 8 x 8 x 8": (translator, {"a": 8, "b": 8, "c": 8}, 16e9),
    "encoder-decoder, 512 x 1": (translator, {"a": 512}, 16e9),
    "small, 2 x 2": (lambda: (LanguageModel(), sample_of("language model")), {"a": 2, "b": 2}, math.inf),
    "encoder-decoder, 2 x 2": (
        lambda: (MODELS["encoder-decoder"](), sample_of("encoder-decoder")),
        {"a": 2, "b": 2},
        math.inf,
    ),
    "encoder-decoder, 2 x 4, little memory": (
        lambda: (MODELS["encoder-decoder"](), sample_of("encoder-decoder")),
        {"a": 2, "b": 4},
        60e3,
    ),
}


SLOW = {"language model, 8 x 8 x 8", "encoder-decoder, 16 x 32", "encoder-decoder, 8 x 8 x 8"}


@pytest.mark.parametrize(
    "instance", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in INSTANCES]
)
def test_branch_and_bound_finds_the_optimum_of_highs(instance):
    make, sizes, memory_bytes = INSTANCES[instance]
    problem = record(*make())
    found = search_shapes(problem, sizes, RATES, memory_bytes)
    expected = optimum(problem, Pricing(sizes, RATES), memory_bytes)
    assert (expected is None) == (not found)
    if expected is not None:
        assert found[0].seconds == pytest.approx(expected, rel=1e-6)


def test_the_best_few_are_the_best_few_of_all():
    problem = record(LanguageModel(), sample_of("language model"))
    pricing = Pricing({"a": 2, "b": 4}, Rates(2e9, 5e9, {"a": Network(1e-6, 1e9), "b": Network(1e-5, 1e9)}))
    kept = []
    Search(problem, pricing, math.inf, 10**6, kept).run()
    few = []
    Search(problem, pricing, math.inf, 5, few).run()
    assert len(kept) > 100
    assert [one.seconds for one in few] == [one.seconds for one in kept[:5]]


def test_all_mesh_shapes_of_512_ranks_are_searched_in_no_time():
    problem = record(*decoder())
    assert len(list(arrangements(512))) == 12
    times = []
    for _ in range(3):
        begin_s = time.perf_counter()
        found = search_shapes(problem, 512, RATES, 16e9)
        times.append(time.perf_counter() - begin_s)
    assert found
    assert min(times) < 0.2 * 3  # 0.2 s on a quiet machine


def test_a_layout_that_another_arrangement_has_too_is_found_once():
    problem = record(LanguageModel(), sample_of("language model"))
    found = [(dict(one.sizes), str(one.layout)) for one in search_shapes(problem, 4, RATES, best=10**6)]
    assert ({"a": 4}, "") in found
    assert ({"a": 4}, "batch:a") in found
    assert ({"a": 2, "b": 2}, "batch:a, d_ff:b") in found
    assert ({"a": 2, "b": 2}, "") not in found
    assert ({"a": 2, "b": 2}, "batch:a+b") not in found


def test_the_layout_of_the_paper_is_found():
    model, ids = decoder()
    best = best_layout(model, ids, {"data": 16, "model": 32}, memory_bytes=16e9, rates=RATES)
    rules = dict(best[0].layout.items())
    assert rules["batch"] == "data"
    assert rules["heads"] == rules["d_ff"] == rules["vocab"] == "model"
    assert best[0].memory_bytes <= 16e9
    assert len(best) == 3


def agreed_rates():
    mesh = tulle.init(data=2, model=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tulle.named.rates.probe", lambda axis: Network(1e-5, 1e9 * (1 + mesh.rank)))
        for name in ("_TRIALS", "_TRIALS_BETWEEN", "_IN_A_ROW", "_BUCKETS"):
            patch.setattr(f"tulle.named.rates.{name}", 1)
        return measured(mesh)


def test_all_ranks_go_by_the_same_measurements():
    first, *others = run_on_ranks(4, agreed_rates)
    assert all(rates == first for rates in others)
    assert {name: network.bandwidth_bytes_per_s for name, network in first.network.items()} == dict.fromkeys(
        ("data", "model", "data+model"), 1e9
    )
    assert all(1e-5 <= network.latency_s < 60 for network in first.network.values())
    assert all(0 <= network.all_reduce_latency_s < 60 for network in first.network.values())
    assert all(0 < network.all_reduce_bytes_per_s < math.inf for network in first.network.values())


def test_a_tiny_product_is_not_repeated_until_its_flops_are_those_of_a_large_one():
    """Of a toy one measurement of work between exchanges was 5,000 calls, and the search took minutes."""
    assert _repeats(_BETWEEN_FLOPS, 6 * 8 * 16 * 24) <= 400
    assert _repeats(_BETWEEN_FLOPS, 10**6) == 100
    assert _repeats(_BETWEEN_FLOPS, 10**9) == 1


def test_the_product_that_is_measured_is_the_largest_as_a_rank_has_it():
    model, ids = decoder(batch=4, length=4, d_model=512, heads=2, d_kv=8, d_ff=16384, vocab=64)
    assert record(model, ids).product(4) == (16, 512, 4096)
    number = tn.Module()
    number.forward = lambda x: tn.sum(x)
    assert record(number, ids).product(4) == TYPICAL


def test_axes_that_were_measured_together_are_priced_so():
    near, far, both = (Network(latency_s, 1e9) for latency_s in (1e-6, 1e-5, 1e-4))
    rates = Rates(network={"model": near, "data": far, "data+model": both})
    assert rates.of(("model",)) is near
    assert rates.of(("model", "data")) is both
    assert Rates(network={"model": near, "data": far}).of(("model", "data")) in (near, far)


@on_ranks(2)
def test_what_the_search_returns_is_a_layout_to_use():
    mesh, model = tulle.init(model=2), LanguageModel()
    best = best_layout(model, sample_of("language model"), mesh.shape, rates=RATES)
    with tn.use(mesh, best):
        model.init()
        assert model.loss(*model.sample()).item() > 0
    assert best.layout == best[0].layout
    assert str(best).splitlines()[1].endswith(f"(model=2) '{best.layout}'")
    assert tn.explain(model, sample_of("language model"), best.sizes, best).layout == best.layout


def test_what_fits_nowhere_is_refused():
    model, ids = decoder()
    with pytest.raises(PlanError, match=r"no layout of the model fits in 0.001 GB on 4: give it more ranks"):
        best_layout(model, ids, 4, memory_bytes=1e6)


def test_what_is_computed_again_takes_no_memory_but_that_of_its_inputs():
    batch, d, f = tn.dims(batch=4096, d=64, f=1024)
    model = tn.Module()
    model.up, model.down = tn.param(d, f), tn.param(f, d)

    def forward(x):
        for _ in range(6):
            x = x + tn.recompute(lambda y: tn.gelu(y.dot(model.up, d)).dot(model.down, f), x)
        return tn.mean(tn.square(x))

    model.forward = forward
    x = tn.from_torch(torch.empty(4096, 64, device="meta"), (batch, d))
    told = tn.explain(model, x, {"a": 2}, "batch:a")
    found = best_layout(model, x, {"a": 2}, memory_bytes=2 * told.memory_bytes, rates=RATES, best=1)[0]
    assert found.memory_bytes <= 2 * told.memory_bytes


def test_a_slice_of_what_is_split_is_not_free():
    batch, three, d = tn.dims(batch=64, three=3 * 512, d=512)
    model = tn.Module()
    model.weight = tn.param(d, three)
    model.forward = lambda x: tn.mean(tn.slice(x.dot(model.weight, d), three, tn.Dim("one", 512)))
    problem = record(model, tn.from_torch(torch.empty(64, 512, device="meta"), (batch, d)))
    (move,) = [step for step in problem.steps if step.kind == "move"]
    pricing = Pricing({"a": 4}, RATES)
    whole = dict.fromkeys(problem.dims, ())
    assert pricing.step(move, whole).seconds == 0 < pricing.step(move, whole | {three: ("a",)}).seconds
