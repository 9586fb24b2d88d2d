"""Programs of other kinds than Transformers, written with the public names only, agree under layouts too."""

import pytest
import torch

import tulle
from ranks import on_ranks
from tulle import named as tn
from tulle.comm import traffic
from tulle.named import layers


class Denoiser(tn.Module):
    """An image goes down and up again, by convolutions whose image is split; then the largest of its neighbours."""

    batch, height, width, c0, c1 = tn.dims(batch=4, height=8, width=8, c0=2, c1=4)
    half_height, half_width, kh, kw, pool = tn.dims(half_height=4, half_width=4, kh=3, kw=3, pool=2)

    def __init__(self):
        super().__init__()
        self.down = tn.param(self.kh, self.kw, self.c0, self.c1, inputs=(self.kh, self.kw, self.c0))
        self.up = tn.param(self.kh, self.kw, self.c1, self.c0, inputs=(self.kh, self.kw, self.c1))
        self.bias = tn.param(self.c1, std=0.1)

    def forward(self, x):
        over = (self.height, self.kh, self.half_height), (self.width, self.kw, self.half_width)
        back = (self.half_height, self.kh, self.height), (self.half_width, self.kw, self.width)
        y = tn.gelu(tn.convolution(x, self.down, over, (self.c0, self.c1), stride=2) + self.bias)
        z = tn.transposed_convolution(y, self.up, back, (self.c1, self.c0), stride=2)
        pooled = tn.max(tn.split(z, self.height, (self.half_height, self.pool)), self.pool)
        return tn.square(z - x).mean() + tn.abs(pooled).mean() + (tn.shift(z, self.width, 2) * z).mean()

    def sample(self, draw):
        return [tn.from_torch(torch.randn(4, 8, 8, 2, generator=draw), (self.batch, self.height, self.width, self.c0))]


class Recurrent(tn.Module):
    """A state that goes from word to word, in a dimension that the layout may split where the next is whole."""

    batch, time, d, h, h_next, vocab = tn.dims(batch=4, time=6, d=4, h=8, h_next=8, vocab=12)

    def __init__(self):
        super().__init__()
        self.table = tn.param(self.vocab, self.d, std=1.0)
        self.inward, self.onward = tn.param(self.d, self.h_next), tn.param(self.h, self.h_next)
        self.out = tn.param(self.h, self.vocab)

    def forward(self, ids):
        state, states = tn.zeros((self.batch, self.h)), []
        for x in tn.unstack(tn.gather(self.table, ids, self.vocab), self.time):
            state = tn.tanh(x.dot(self.inward, self.d) + state.dot(self.onward, self.h)).rename(h_next=self.h)
            states.append(state)
        seen = tn.stack(states, self.time)
        losses = tn.cross_entropy(seen.dot(self.out, self.h), tn.shift(ids, self.time, -1), self.vocab)
        return tn.where(tn.mask(self.time, 5), losses, 0.0).sum() / 20 + tn.cumsum(seen, self.time).mean() * 0.1

    def sample(self, draw):
        return [tn.from_torch(torch.randint(12, (4, 6), generator=draw), (self.batch, self.time))]


class Contrastive(tn.Module):
    """Two towers whose answers are compared, each of a batch with each: the batch has two names."""

    batch, other, pixels, words, e = tn.dims(batch=8, other=8, pixels=6, words=10, embed=4)

    def __init__(self):
        super().__init__()
        self.image, self.text = layers.Linear(self.pixels, self.e), layers.Linear(self.words, self.e, bias=False)
        self.scale = tn.param(std=1.0)

    def forward(self, images, texts):
        a, b = (tn.rms_norm(x, self.e) for x in (self.image(images), self.text(texts)))
        scores = a.dot(b.rename(batch=self.other), self.e) * tn.exp(self.scale)
        ours = tn.cross_entropy(scores, tn.range(self.batch), self.other)
        theirs = tn.log_softmax(scores, self.batch) * tn.one_hot(tn.range(self.other), self.batch)
        return (ours.mean() - tn.sum(theirs, self.batch).mean()) / 2

    def sample(self, draw):
        images, texts = (torch.randn(8, size, generator=draw) for size in (6, 10))
        return [tn.from_torch(images, (self.batch, self.pixels)), tn.from_torch(texts, (self.batch, self.words))]


class Ring(tn.Module):
    """Keys and values go round the blocks of a sequence; then attention to the neighbours' borders."""

    batch, length, blocks, within, inside, d, h, k = tn.dims(
        batch=2, length=16, blocks=4, within=4, inside=4, d_model=8, heads=2, d_kv=4
    )
    window = tn.Dim("window", 6)

    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv = (tn.param(self.d, self.h, self.k) for _ in range(3))
        self.wo = tn.param(self.h, self.k, self.d, inputs=(self.h, self.k))

    def forward(self, x):
        y = x + self.back(self.ring(tn.rms_norm(x, self.d)))
        m = tn.halo(y, self.length, (self.blocks, self.window), before=1)
        query = tn.split(y, self.length, (self.blocks, self.within)).dot(self.wq, self.d)
        weights = tn.softmax(query.dot(m.dot(self.wk, self.d), self.k), self.window)
        return tn.square(y + self.back(weights.dot(m.dot(self.wv, self.d), self.window))).mean()

    def back(self, mixed):
        return tn.merge(mixed.dot(self.wo, (self.h, self.k)), (self.blocks, self.within), self.length)

    def ring(self, x):
        x = tn.split(x, self.length, (self.blocks, self.within))
        query, m = x.dot(self.wq, self.d), x.rename(within=self.inside)
        begin = tn.range(self.blocks) * self.within.size
        moving = m.dot(self.wk, self.d), m.dot(self.wv, self.d), begin + tn.range(self.inside)
        here, top, norm, total = begin + tn.range(self.within), None, 0.0, 0.0
        for _ in range(self.blocks.size):
            key, value, there = moving
            scores = tn.where(there <= here, query.dot(key, self.k), -1e30)
            most = tn.max(scores, self.inside)
            now = tn.stop_gradient(most if top is None else tn.maximum(top, most))
            weights, old = tn.exp(scores - now), 0.0 if top is None else tn.exp(top - now)
            total, norm = weights.dot(value, self.inside) + total * old, tn.sum(weights, self.inside) + norm * old
            top, moving = now, tuple(tn.shift(one, self.blocks, 1, wrap=True) for one in moving)
        return total / norm

    def sample(self, draw):
        return [tn.from_torch(torch.randn(2, 16, 8, generator=draw), (self.batch, self.length, self.d))]


class Perceiver(tn.Module):
    """A few latents look at inputs of different lengths, padded so that they can be split."""

    batch, raw, tokens, latents, others, d, h, k, classes = tn.dims(
        batch=4, raw=10, tokens=12, latents=4, others=4, d_model=8, heads=2, d_kv=4, classes=6
    )

    def __init__(self):
        super().__init__()
        self.latent, self.place = tn.param(self.latents, self.d, std=1.0), tn.param(self.tokens, self.d, std=0.3)
        self.cross, self.own = (layers.Attention(self.d, self.h, self.k) for _ in range(2))
        self.out = tn.param(self.d, self.classes)

    def forward(self, x, lengths, labels):
        x = tn.layer_norm(tn.pad(x, self.raw, self.tokens) + self.place, self.d)
        there = (tn.range(self.tokens) < lengths) & tn.mask(self.tokens, self.raw.size)
        bias = tn.where(there, 0.0, tn.full((), float("-inf")))
        z = tn.broadcast_to(self.latent, (self.batch, self.latents, self.d))
        z = z + self.cross(tn.rms_norm(z, self.d), self.cross.keys_values(x), self.tokens, self.latents, bias)
        y = tn.rms_norm(z, self.d)
        z = z + self.own(y, self.own.keys_values(y.rename(latents=self.others)), self.others, self.latents)
        spread = tn.logsumexp(tn.where(there, tn.mean(x, self.d), float("-inf")), self.tokens)
        logits = tn.mean(z, self.latents).dot(self.out, self.d)
        return tn.cross_entropy(logits, labels, self.classes).mean() + 0.1 * spread.mean()

    def sample(self, draw):
        images, labels = torch.randn(4, 10, 8, generator=draw), torch.randint(6, (4,), generator=draw)
        lengths = tn.from_torch(torch.tensor([10, 4, 1, 7]), self.batch)
        return [tn.from_torch(images, (self.batch, self.raw, self.d)), lengths, tn.from_torch(labels, self.batch)]


PROGRAMS = {
    Denoiser: [
        "height:data, half_height:data, width:model, half_width:model",
        "width:data+model",
        "batch:data, c1:model",
    ],
    Recurrent: ["batch:data, h_next:model", "time:data, h:model", "vocab:data+model"],
    Contrastive: ["batch:data, other:model", "embed:data, batch:model", "batch:data+model"],
    Ring: ["length:data+model, blocks:data+model", "batch:data, heads:model", "blocks:model, d_kv:data"],
    Perceiver: ["tokens:data+model", "batch:data, heads:model, classes:model", "latents:data, others:model"],
}


def losses(program):
    torch.set_default_dtype(torch.float64)
    try:
        draw, model = torch.Generator().manual_seed(0), program().init(seed=1)
        optimizer, found = tn.Adafactor(model), []
        for _ in range(3):
            loss = tn.recompute(model, *model.sample(draw))
            loss.backward()
            tn.clip_grad_norm(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return torch.tensor(found)
    finally:
        torch.set_default_dtype(torch.float32)


@on_ranks(4)
@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_learn_the_same_under_layouts(program):
    mesh = tulle.init(data=2, model=2)
    expected = losses(program)
    for layout in PROGRAMS[program]:
        with tn.use(mesh, layout):
            torch.testing.assert_close(losses(program), expected, rtol=1e-12, atol=0)


@on_ranks(4)
@pytest.mark.parametrize("program", PROGRAMS)
def test_what_programs_send_is_what_is_explained(program):
    mesh = tulle.init(data=2, model=2)
    for layout in PROGRAMS[program]:
        whole = tuple(program().sample(torch.Generator().manual_seed(0)))
        told = tn.explain(program(), whole, mesh, layout).by_label()
        with tn.use(mesh, layout):
            model, sample = program().init(), program().sample(torch.Generator().manual_seed(0))
            traffic.take_labels()
            model(*sample).backward()
        sent = {label: (one.bytes_sent, one.messages) for label, one in traffic.take_labels().items()}
        for label in {*sent, *told}:
            has_borders = any(
                what in label for what in ("shift", "convolution", "halo")
            )  # of which inner ranks send more than the first
            if mesh.rank == 0 or not has_borders:
                assert sent.get(label, (0, 0)) == told.get(label, (0, 0)), (layout, label)
