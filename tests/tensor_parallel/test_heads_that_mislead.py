"""Attention is split by heads only where no code looks at several of them, and gives out what all heads attend to."""

import pytest
import torch
from split_training import check_exact, numbers, split, square
from torch import nn
from torch.nn import functional

from ranks import on_ranks

WIDTH, HEADS, LENGTH = 8, 4, 5


def loss(model, step):
    return square(model(numbers(2, LENGTH, WIDTH, seed=step)))


class Attention(nn.Module):
    def __init__(self, pairs=HEADS):
        super().__init__()
        self.num_heads, self.width, self.num_key_value_groups = HEADS, 2, HEADS // pairs
        self.query, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key, self.value = nn.Linear(WIDTH, pairs * 2), nn.Linear(WIDTH, pairs * 2)
        self.register_buffer("slopes", torch.linspace(0.1, 1, HEADS, dtype=torch.float64)[:, None, None])

    def by_heads(self, x):
        samples, length, _ = x.shape
        layers = self.query(x), self.key(x), self.value(x)
        queries = layers[0].view(samples, length, self.num_heads, self.width).transpose(1, 2)
        keys, values = (layers[1].view(samples, length, -1, 2), layers[2].view(samples, length, -1, 2))
        return queries, keys.transpose(1, 2), values.transpose(1, 2)

    def merged(self, attended):
        return self.out(attended.transpose(1, 2).flatten(2))

    def forward(self, x, bias=None):
        queries, keys, values = self.by_heads(x)
        scores = queries @ keys.transpose(-1, -2)
        weights = (scores if bias is None else scores + bias).softmax(-1)
        return self.merged(weights @ values), weights


class Scaled(Attention):
    def forward(self, x):
        queries, keys, values = self.by_heads(x)
        scores = queries @ keys.transpose(-1, -2)
        return self.merged((scores / scores.size(1)).softmax(-1) @ values)


class Sloped(Attention):
    def forward(self, x):
        queries, keys, values = self.by_heads(x)
        return self.merged((queries @ keys.transpose(-1, -2) * self.slopes).softmax(-1) @ values)


class Cleared(Attention):
    def forward(self, x):
        queries, keys, values = self.by_heads(x)
        scores = queries @ keys.transpose(-1, -2) * 1
        scores[:, 0] = 0
        return self.merged(scores.softmax(-1) @ values)


class Normed(Attention):
    def __init__(self):
        super().__init__()
        self.norm = nn.GroupNorm(1, HEADS, affine=False)

    def forward(self, x):
        queries, keys, values = self.by_heads(x)
        return self.merged((self.norm(queries) @ keys.transpose(-1, -2)).softmax(-1) @ values)


class HeadsNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return x / x.pow(2).mean((1, 3), keepdim=True).sqrt() * self.scale


class NormedByHand(Normed):
    def __init__(self):
        super().__init__()
        self.norm = HeadsNorm()


def repeat_kv(pairs, times):
    return pairs.repeat(1, times, 1, 1)  # another order than that of `transformers`


class Tiled(Attention):
    def __init__(self):
        super().__init__(pairs=2)

    def forward(self, x):
        queries, keys, values = self.by_heads(x)
        keys, values = (repeat_kv(keys, self.num_key_value_groups), repeat_kv(values, self.num_key_value_groups))
        return self.merged((queries @ keys.transpose(-1, -2)).softmax(-1) @ values)


class Listed(Attention):
    def slopes_of(self, x):
        return torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=x.dtype).view(-1, 1, 1)

    def forward(self, x):
        queries, keys, values = self.by_heads(x)
        return self.merged((queries @ keys.transpose(-1, -2) * self.slopes_of(x)).softmax(-1) @ values)


class Ranged(Listed):
    def slopes_of(self, x):
        return torch.arange(1, 5, dtype=x.dtype).reciprocal().view(-1, 1, 1)


class Powered(Listed):
    def slopes_of(self, x):
        return torch.linspace(0, 1, 2**2, dtype=x.dtype).view(-1, 1, 1)


class Taken(Listed):
    def slopes_of(self, x):
        return x[..., :4].transpose(1, 2).unsqueeze(-1)


class Stacked(Listed):
    def slopes_of(self, x):
        return torch.stack([x[..., 0], x[..., 1], x[..., 2], x[..., 3]], 1).unsqueeze(-1)


def rotate_half(x):
    first, second = x.chunk(2, 1)
    return torch.cat((-second, first), 1)


def apply_rotary(queries, angles):
    queries = torch.cat((queries[:, 1:], queries[:, :1]), dim=-3)
    return queries * angles


class Rotated(Attention):
    def forward(self, x):
        queries, keys, values = self.by_heads(x)
        angles = torch.arange(x.shape[1], dtype=x.dtype)[:, None].cos()
        queries = queries * angles + rotate_half(queries) * angles
        return self.merged((queries @ keys.transpose(-1, -2)).softmax(-1) @ values)


class RotatedByFunction(Attention):
    def forward(self, x):
        queries, keys, values = self.by_heads(x)
        queries = apply_rotary(queries, torch.arange(x.shape[1], dtype=x.dtype)[:, None].cos())
        return self.merged((queries @ keys.transpose(-1, -2)).softmax(-1) @ values)


MISLEADING = [Scaled, Cleared, Normed, NormedByHand, Tiled, Taken, Stacked]
MISLEADING += [Rotated, RotatedByFunction]


@on_ranks(2, 4)
@pytest.mark.parametrize("kind", MISLEADING)
def test_attention_stays_apart_where_several_heads_are_looked_at(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(WIDTH), kind()).double()
    check_exact(model, loss)
    assert split(model)[1] == []


@on_ranks(2, 4)
@pytest.mark.parametrize("kind", [Sloped, Listed, Ranged, Powered])
def test_what_is_of_each_head_is_split_by_heads_where_it_meets_them(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(WIDTH), kind()).double()
    check_exact(model, loss)
    assert split(model)[1] == ["1.out"]


class UsesWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Attention(), Attention()

    def forward(self, x):
        hidden, weights = self.first(x)
        given, _ = self.second(hidden, weights)  # by heads as this one's scores are
        return given + weights[:, 0].pow(2).mean() + weights.amax()


class ReadsHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()

    def forward(self, x):
        slopes = torch.linspace(0.1, 1, self.attention.num_heads, dtype=x.dtype)
        return self.attention(x, slopes[:, None, None].expand(-1, LENGTH, LENGTH))[0]


class ChangedBefore(nn.Module):
    """A hook that is set later multiplies what attention is given with what is trained."""

    def __init__(self):
        super().__init__()
        self.attention, self.scale = Attention(), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        if not self.attention._forward_pre_hooks:
            self.attention.register_forward_pre_hook(lambda _, given: (given[0] * self.scale,))
        return self.attention(x)[0]


@on_ranks(2, 4)
@pytest.mark.parametrize("kind", [UsesWeights, ReadsHeads, ChangedBefore])
def test_what_is_around_attention_sees_all_heads(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(WIDTH), kind()).double()
    check_exact(model, loss)
    assert len(split(model)[1]) == (2 if kind is UsesWeights else 1)


class OwnNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))

    def means(self, x):
        return x.pow(2).mean((1, 3), keepdim=True)

    def forward(self, x):
        return x / self.means(x).sqrt() * self.scale


class UnitNorm(OwnNorm):
    def forward(self, x):
        return functional.normalize(x) * self.scale  # over dimension 1, where heads are


class WholeNorm(OwnNorm):
    def forward(self, x):
        return functional.layer_norm(x, x.shape[1:]) * self.scale


class CountNorm(OwnNorm):
    def forward(self, x):
        return x / x.shape[1] * self.scale


class FirstNorm(OwnNorm):
    def forward(self, x):
        return (x - x[:, :1]) * self.scale


class DrawnNorm(OwnNorm):
    def forward(self, x):
        return functional.dropout(x, 0.3) * self.scale


class LastNorm(OwnNorm):
    def means(self, x):
        return x.pow(2).mean(-1, keepdim=True)


class BareNorm(nn.Module):
    def forward(self, x):
        return x / x.pow(2).mean(-1, keepdim=True).sqrt()


class BareHeadsNorm(nn.Module):
    def forward(self, x):
        return x / x.pow(2).mean((1, 3), keepdim=True).sqrt()


class BufferedNorm(BareNorm):
    def __init__(self):
        super().__init__()
        self.scales = nn.Buffer(torch.arange(1.0, HEADS + 1)[:, None, None])

    def forward(self, x):
        return super().forward(x) * self.scales


class NumberedNorm(BareNorm):
    scales = tuple(range(1, HEADS + 1))

    def forward(self, x):
        return x / x.pow(2).mean(-1, keepdim=True).sqrt() * torch.tensor(self.scales)[:, None, None]


class WithNorm(Attention):
    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        queries, keys, values = self.by_heads(x)
        return self.merged((self.norm(queries) @ keys.transpose(-1, -2)).softmax(-1) @ values)


NORMS = [
    *(OwnNorm, UnitNorm, WholeNorm, CountNorm, FirstNorm, DrawnNorm, LastNorm),
    *(BareNorm, BareHeadsNorm, BufferedNorm, NumberedNorm),
]


@on_ranks(2, 4)
@pytest.mark.parametrize("kind", NORMS)
def test_a_norm_looks_at_each_head_alone_by_all_that_it_calls(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(WIDTH), WithNorm(kind())).double()
    check_exact(model, loss)
    assert len(split(model)[1]) == (kind in (LastNorm, BareNorm))
