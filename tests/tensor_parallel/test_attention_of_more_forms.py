"""Attention with samples and heads as one dimension, with shapes that are compared, with gates, is split by heads."""

import einops
import pytest
import torch
from split_layers import model_axis
from split_training import check_exact, numbers, split, square
from torch import nn
from torch.nn import functional

from ranks import on_ranks
from tulle import tensor_parallel
from tulle.errors import ModelError

WIDTH, HEADS = 16, 4


class Four(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads, self.head_dim = HEADS, WIDTH // HEADS
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))


class Reshaped(Four):
    """As BART of `transformers` was, until its version 4.45."""

    def _shape(self, tensor, length, samples):
        return tensor.view(samples, length, self.num_heads, self.head_dim).transpose(1, 2).contiguous()

    def forward(self, x, mask=None):
        samples, length, width = x.size()
        query = self.q_proj(x) * self.head_dim**-0.5
        key = self._shape(self.k_proj(x), -1, samples)
        value = self._shape(self.v_proj(x), -1, samples)
        shape = (samples * self.num_heads, -1, self.head_dim)
        query = self._shape(query, length, samples).view(*shape)
        key, value = key.reshape(*shape), value.reshape(*shape)
        weights = torch.bmm(query, key.transpose(1, 2))
        if weights.size() != (samples * self.num_heads, length, length):
            raise ValueError(f"weights of {weights.size()}")
        if mask is not None:
            weights = weights.view(samples, self.num_heads, length, length) + mask
            weights = weights.view(samples * self.num_heads, length, length)
        weights = functional.softmax(weights, dim=-1)
        attended = torch.bmm(functional.dropout(weights, p=0.0, training=self.training), value)
        if attended.size() != (samples * self.num_heads, length, self.head_dim):
            raise ValueError(f"attended of {attended.size()}")
        attended = attended.view(samples, self.num_heads, length, self.head_dim).transpose(1, 2)
        return self.out_proj(attended.reshape(samples, length, width))


class SamplesSecond(Four):
    """As fairseq's, and `nn.MultiheadAttention` of old: a sequence comes before its samples."""

    def forward(self, x, mask=None):
        length, samples, width = x.size()
        query, key, value = (
            one(x).contiguous().view(length, samples * self.num_heads, self.head_dim).transpose(0, 1)
            for one in (self.q_proj, self.k_proj, self.v_proj)
        )
        weights = torch.bmm(query, key.transpose(1, 2))
        weights = weights if mask is None else weights + mask
        attended = torch.bmm(torch.softmax(weights, dim=-1), value)
        return self.out_proj(attended.transpose(0, 1).contiguous().view(length, samples, width))


class LeftOver(Four):
    """As in *Dive into Deep Learning*, by lengths of what is there."""

    def apart(self, x):
        x = x.reshape(x.shape[0], x.shape[1], self.num_heads, -1).permute(0, 2, 1, 3)
        return x.reshape(-1, x.shape[2], x.shape[3])

    def together(self, x):
        x = x.reshape(-1, self.num_heads, x.shape[1], x.shape[2]).permute(0, 2, 1, 3)
        return x.reshape(x.shape[0], x.shape[1], -1)

    def forward(self, x, mask=None):
        query, key, value = self.apart(self.q_proj(x)), self.apart(self.k_proj(x)), self.apart(self.v_proj(x))
        weights = nn.Softmax(dim=-1)(query.bmm(key.permute(0, 2, 1)))
        return self.out_proj(self.together(weights.bmm(value)))


class ByPattern(Four):
    """As latent diffusion's."""

    def forward(self, x, mask=None):
        h = self.num_heads
        query, key, value = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        query, key, value = map(lambda t: einops.rearrange(t, "b n (h d) -> (b h) n d", h=h), (query, key, value))
        weights = torch.einsum("b i d, b j d -> b i j", query, key).softmax(dim=2)
        attended = torch.einsum("b i j, b j d -> b i d", weights, value)
        return self.out_proj(einops.rearrange(attended, "(b h) n d -> b n (h d)", h=h))


class ByHeads(Four):
    def three(self, x):
        shape = (*x.shape[:2], self.num_heads, self.head_dim)
        return [one(x).view(shape).transpose(1, 2) for one in (self.q_proj, self.k_proj, self.v_proj)]


class Compares(ByHeads):
    """As CLVP's, and others' that see whether a shape is what it should be."""

    def forward(self, x, mask=None):
        samples, length, _ = x.shape
        query, key, value = self.three(x)
        weights = query @ key.transpose(-1, -2)
        if weights.shape != (samples, self.num_heads, length, length):
            raise ValueError(f"weights of {weights.shape}")
        attended = (nn.Softmax(-1)(weights) @ value).transpose(1, 2)
        if attended.size() == torch.Size((samples, length, self.num_heads, self.head_dim)):
            attended = attended * 2
        return self.out_proj(attended.flatten(2))


class Gated(Four):
    """As Qwen 3.5's: queries and what gates the heads come from one layer, head by head."""

    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, 2 * WIDTH)
        self.q_norm = nn.LayerNorm(self.head_dim)

    def forward(self, x, mask=None):
        before = x.shape[:-1]
        shape = (*before, -1, self.head_dim)
        query, gate = torch.chunk(self.q_proj(x).view(*before, -1, self.head_dim * 2), 2, dim=-1)
        query = self.q_norm(query.reshape(shape)).transpose(1, 2)
        key, value = self.k_proj(x).view(shape).transpose(1, 2), self.v_proj(x).view(shape).transpose(1, 2)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        attended = attended.transpose(1, 2).reshape(*before, -1).contiguous()
        return self.out_proj(attended * torch.sigmoid(gate.reshape(*before, -1)))


class Block(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention, self.mask = attention, None

    def forward(self, x):
        return x + self.attention(x.tanh(), self.mask)


def loss(model, step):
    return square(model(numbers(3, 5, WIDTH, seed=step)))


@on_ranks(2, 4)
@pytest.mark.parametrize("kind", [Reshaped, SamplesSecond, LeftOver, ByPattern, Compares, Gated])
def test_it_is_split_by_heads(kind):
    torch.manual_seed(0)
    model = Block(kind()).double()
    check_exact(model, loss)
    columns, rows = split(model)
    assert columns == [f"attention.{name}_proj" for name in "qkv"]
    assert rows == ["attention.out_proj"]


@on_ranks(2)
@pytest.mark.parametrize("kind", [Reshaped, SamplesSecond])
def test_a_mask_meets_its_scores(kind):
    torch.manual_seed(0)
    model = Block(kind()).double()
    lengths = (5, 5) if kind is Reshaped else (3, 3)
    model.mask = torch.full(lengths, float("-inf")).triu(1).double()
    check_exact(model, loss)
    assert split(model)[1] == ["attention.out_proj"]


class AcrossLengths(ByHeads):
    """What is one dimension are a sequence and heads, and what is left are samples."""

    def forward(self, x, mask=None):
        samples, length, _ = x.shape
        query, key, value = self.three(x)
        query = query.reshape(length * self.num_heads, samples, self.head_dim)
        key = key.reshape(length * self.num_heads, -1, self.head_dim)
        attended = torch.bmm(query, key.transpose(1, 2)).softmax(-1) @ value.reshape(
            length * self.num_heads, samples, -1
        )
        return self.out_proj(attended.view(samples, self.num_heads, length, -1).transpose(1, 2).flatten(2))


class Counted(Four):
    """What it gives is divided by how many samples and heads there are."""

    def forward(self, x, mask=None):
        samples, length, _ = x.shape
        shape = (samples * self.num_heads, length, self.head_dim)
        query, key, value = (
            one(x).view(samples, length, self.num_heads, self.head_dim).transpose(1, 2).reshape(*shape)
            for one in (self.q_proj, self.k_proj, self.v_proj)
        )
        attended = torch.bmm(torch.bmm(query, key.mT).softmax(-1), value) / len(query)
        return self.out_proj(attended.view(samples, self.num_heads, length, -1).transpose(1, 2).flatten(2))


class ByOne(Counted):
    """Something of the first sample and head is added to all."""

    def forward(self, x, mask=None):
        h = self.num_heads
        query, key, value = (
            einops.rearrange(one(x), "b n (h d) -> (b h) n d", h=h) for one in (self.q_proj, self.k_proj, self.v_proj)
        )
        attended = torch.einsum("bij,bjd->bid", torch.einsum("bid,bjd->bij", query, key).softmax(-1), value)
        return self.out_proj(einops.rearrange(attended + attended[0], "(b h) n d -> b n (h d)", h=h))


class HeadsFirst(Four):
    """As the one by patterns, but with heads before samples when they are two again."""

    def forward(self, x, mask=None):
        h = self.num_heads
        query, key, value = (
            einops.rearrange(one(x), "b n (h d) -> (b h) n d", h=h) for one in (self.q_proj, self.k_proj, self.v_proj)
        )
        attended = torch.bmm(torch.bmm(query, key.transpose(1, 2)).softmax(-1), value)
        return self.out_proj(einops.rearrange(attended, "(h b) n d -> b n (h d)", h=h))


@on_ranks(2)
@pytest.mark.parametrize("kind", [Counted, ByOne, HeadsFirst])
def test_what_looks_at_more_than_a_head_leaves_it_to_its_layers(kind):
    torch.manual_seed(0)
    model = Block(kind()).double()
    check_exact(model, loss)
    assert split(model) == ([], [])


@on_ranks(2)
def test_another_dimension_than_samples_and_heads_is_refused():
    model = tensor_parallel.apply(Block(AcrossLengths()).double(), model_axis(), smallest_bytes=0)
    assert split(model)[1] == ["attention.out_proj"]
    with pytest.raises(ModelError, match=r"attention has \[3, 2, 5, 4\] of each rank be \[20, 3, 4\]"):
        model(numbers(3, 5, WIDTH, seed=0))


@on_ranks(2)
@pytest.mark.parametrize("kind", [Reshaped, LeftOver])
def test_another_number_of_dimensions_or_heads_is_refused(kind):
    model = tensor_parallel.apply(Block(kind()).double(), model_axis(), smallest_bytes=0)
    model.attention.num_heads = 2
    with pytest.raises(ModelError, match="2"):
        model(numbers(3, 5, WIDTH, seed=0))
