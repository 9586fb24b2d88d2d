"""Models in named dimensions for the layout tests: small enough to run under every legal layout."""

import math
from itertools import combinations

import torch

from tulle import named as tn
from tulle.errors import PlanError
from tulle.named.module import named_parameters
from tulle.named.planned import PlannedWire
from tulle.named.scope import Scope, entered

batch, length, memory = tn.dims(batch=4, length=8, memory_length=8)
d, h, k, ff, vocab = tn.dims(d_model=8, heads=4, d_kv=4, d_ff=16, vocab=12)
source, source_memory = tn.dims(source_length=8, source_memory=8)


class LanguageModel(tn.Module):
    """One layer: embedding, causal attention, feed-forward, and a softmax over the vocabulary."""

    dims = (batch, length, memory, d, h, k, ff, vocab)

    def __init__(self):
        super().__init__()
        f64 = torch.float64
        self.table, self.out = tn.param(vocab, d, std=0.5, dtype=f64), tn.param(d, vocab, dtype=f64)
        self.wq, self.wk, self.wv = (tn.param(d, h, k, dtype=f64) for _ in range(3))
        self.wo = tn.param(h, k, d, inputs=(h, k), dtype=f64)
        self.w1, self.w2 = tn.param(d, ff, dtype=f64), tn.param(ff, d, dtype=f64)
        self.g1, self.g2 = tn.ones(d, dtype=f64), tn.ones(d, dtype=f64)

    def forward(self, ids, targets):
        x = tn.gather(self.table, ids, vocab)
        y = tn.rms_norm(x, d, self.g1)
        m = y.rename(length=memory)
        q, key, v = y.dot(self.wq, d), m.dot(self.wk, d), m.dot(self.wv, d)
        bias = tn.causal_bias(length, memory, dtype=torch.float64)
        a = tn.softmax(q.dot(key, k) * k.size**-0.5 + bias, memory)
        x = x + a.dot(v, memory).dot(self.wo, (h, k))
        y = tn.layer_norm(x, d, self.g2)
        x = x + tn.relu(y.dot(self.w1, d)).dot(self.w2, ff)
        return tn.mean(tn.cross_entropy(x.dot(self.out, d), targets, vocab, label_smoothing=0.1))

    @staticmethod
    def sample():
        draw = torch.Generator().manual_seed(1)
        whole = torch.randint(vocab.size, (batch.size, length.size + 1), generator=draw)
        return whole[:, :-1].contiguous(), whole[:, 1:].contiguous()

    def loss(self, ids, targets):
        return self(tn.from_torch(ids, (batch, length)), tn.from_torch(targets, (batch, length)))


class EncoderDecoder(tn.Module):
    """One encoder layer and one decoder layer with cross attention; source and target share one tied table."""

    dims = (batch, length, memory, source, source_memory, d, h, k, ff, vocab)

    def __init__(self):
        super().__init__()
        f64 = torch.float64
        self.table = tn.param(vocab, d, std=0.5, dtype=f64)
        for side in ("source", "own", "cross"):
            for name in "qkv":
                setattr(self, f"{side}_{name}", tn.param(d, h, k, dtype=f64))
            setattr(self, f"{side}_o", tn.param(h, k, d, inputs=(h, k), dtype=f64))
        self.w1, self.w2 = tn.param(d, ff, dtype=f64), tn.param(ff, d, dtype=f64)
        self.bias = tn.param(ff, std=0.3, dtype=f64)

    def attend(self, side, x, m, over, bias=None):
        q, key, v = (t.dot(getattr(self, f"{side}_{n}"), d) for t, n in ((x, "q"), (m, "k"), (m, "v")))
        scores = q.dot(key, k) * k.size**-0.5
        a = tn.softmax(scores if bias is None else scores + bias, over)
        return x + a.dot(v, over).dot(getattr(self, f"{side}_o"), (h, k))

    def forward(self, sources, ids, targets):
        s = tn.gather(self.table, sources, vocab)
        y = tn.rms_norm(s, d)
        s = self.attend("source", y, y.rename(source_length=source_memory), source_memory)
        s = s + tn.gelu(s.dot(self.w1, d) + self.bias).dot(self.w2, ff)
        x = tn.rms_norm(tn.gather(self.table, ids, vocab), d)
        bias = tn.causal_bias(length, memory, dtype=torch.float64)
        x = self.attend("own", x, x.rename(length=memory), memory, bias)
        x = self.attend("cross", x, tn.rms_norm(s, d).rename(source_length=source_memory), source_memory)
        logits = tn.rms_norm(x, d).dot(self.table, d)
        return tn.mean(tn.cross_entropy(logits, targets, vocab))

    @staticmethod
    def sample():
        draw = torch.Generator().manual_seed(2)
        sources = torch.randint(vocab.size, (batch.size, source.size), generator=draw)
        whole = torch.randint(vocab.size, (batch.size, length.size + 1), generator=draw)
        return sources, whole[:, :-1].contiguous(), whole[:, 1:].contiguous()

    def loss(self, sources, ids, targets):
        sources = tn.from_torch(sources, (batch, source))
        return self(sources, tn.from_torch(ids, (batch, length)), tn.from_torch(targets, (batch, length)))


MODELS = {"language model": LanguageModel, "encoder-decoder": EncoderDecoder}


def is_legal(model_class, sizes, rules):
    """Whether a model runs under a layout, found out on paper."""
    with entered(Scope(PlannedWire(sizes), tn.Layout(rules))):
        try:
            model = model_class().init()
            model.loss(*(t.to("meta") for t in model.sample()))
        except PlanError:
            return False
    return True


def conflicts(model_class):
    """Pairs of dimensions that meet in a tensor or an operation: no axis can split both."""
    with entered(Scope(PlannedWire({}), tn.Layout())) as scope:
        model = model_class().init()
        model.loss(*(t.to("meta") for t in model.sample()))
    return {frozenset(pair) for dims in scope.seen for pair in combinations(dims, 2)}


def legal_layouts(model_class, sizes, together=1):
    """All legal layouts of a model over a mesh, of which each dimension is split over at most so many axes together."""
    pairs = conflicts(model_class)
    found = [{}]
    for dim in model_class.dims:
        met = [other.name for other in model_class.dims if frozenset((dim, other)) in pairs]
        several = [axes for count in range(1, together + 1) for axes in combinations(sizes, count)]
        fitting = [axes for axes in several if dim.size % math.prod(sizes[axis] for axis in axes) == 0]
        found += [
            rules | {dim.name: "+".join(axes)}
            for rules in found
            for axes in fitting
            if not any(axis in rules.get(name, "").split("+") for name in met for axis in axes)
        ]
    return found


def run(model_class, steps=3):
    """Loss, all gradients and the parameters after some steps of Adam, whole and on every rank."""
    model = model_class().init(seed=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    results = {}
    for step in range(steps):
        loss = model.loss(*model.sample())
        loss.backward()
        results[f"loss {step}"] = loss.local.detach()
        if step == 0:
            results |= {f"gradient of {n}": tn.to_torch(p.grad) for n, p in named_parameters(model)}
        optimizer.step()
        optimizer.zero_grad()
    results |= {n: tn.to_torch(p.detach()) for n, p in named_parameters(model)}
    return results


def worst_difference(actual, expected):
    """The largest relative difference of any result, in the norm."""
    return max(((actual[n] - expected[n]).norm() / expected[n].norm()).item() for n in expected)
