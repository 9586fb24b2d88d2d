"""Layers of classes that nobody knows are split together where the code around them shows that they can be."""

from collections import Counter

import pytest
import torch
from split_training import check_exact, drawn, numbers, split, square
from torch import nn
from torch.nn import functional

import tulle
from ranks import on_ranks
from tulle import tensor_parallel
from tulle.comm import traffic

WIDTH, INNER, HEADS = 8, 10, 4


def linear(inputs=WIDTH, outputs=WIDTH, *, bias=True):
    return nn.Linear(inputs, outputs, bias=bias)


class FeedForward(nn.Module):
    """As the layers of BART and others, which have it beside what is around it."""

    def __init__(self, dropped=0.0):
        super().__init__()
        self.norm, self.activation, self.dropout = nn.LayerNorm(WIDTH), nn.GELU(), nn.Dropout(dropped)
        self.fc1, self.fc2 = linear(outputs=INNER), linear(INNER)

    def forward(self, x):
        residual = x
        x = self.norm(x)
        x = self.activation(self.fc1(x))
        x = self.dropout(x)
        x = self.fc2(x)
        x = functional.dropout(x, p=0.0, training=self.training)
        return residual + x


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (
            linear(outputs=INNER, bias=False),
            linear(outputs=INNER),
            linear(INNER),
        )

    def forward(self, x):
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x) * 2)


class Fused(nn.Module):
    """Gate and up are one layer."""

    def __init__(self):
        super().__init__()
        self.both, self.down, self.dim = linear(outputs=2 * INNER), linear(INNER), -1

    def forward(self, x):
        gate, up = self.both(x).chunk(2, dim=self.dim)
        return self.down(torch.tanh(gate) * up)


class Apart(nn.Module):
    """As BERT's: the layers lie in two modules, and what is around them calls these one after the other."""

    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.dense = linear(outputs=INNER)

        def forward(self, hidden):
            return functional.relu(self.dense(hidden))

    class Second(nn.Module):
        def __init__(self):
            super().__init__()
            self.dense, self.norm = linear(INNER), nn.LayerNorm(WIDTH)

        def forward(self, hidden, residual):
            return self.norm(self.dense(hidden) + residual)

    def __init__(self):
        super().__init__()
        self.first, self.second = self.First(), self.Second()

    def forward(self, x):
        return self.second(self.first(x), x)


FEED_FORWARD = {
    "sequence": lambda: nn.Sequential(linear(outputs=INNER), nn.ReLU(), nn.Dropout(0.3), linear(INNER)),
    "in a layer": lambda: FeedForward(dropped=0.3),
    "gated": Gated,
    "fused": Fused,
    "apart": Apart,
}


class Attention(nn.Module):
    """As `transformers` has them now; what it takes may be trained, and queries and keys have norms."""

    def __init__(self, pairs=HEADS, dropped=0.0):
        super().__init__()
        self.head_dim, self.num_key_value_groups, self.dropout = 6, HEADS // pairs, dropped
        self.q_proj, self.o_proj = linear(outputs=HEADS * 6), linear(HEADS * 6)
        self.k_proj, self.v_proj = linear(outputs=pairs * 6), linear(outputs=pairs * 6)
        self.q_norm, self.k_norm = nn.LayerNorm(6), nn.RMSNorm(6)

    def forward(self, hidden, angles, mask=None, **unused):
        shape = hidden.shape[:-1]
        by_heads = (*shape, -1, self.head_dim)
        queries = self.q_norm(self.q_proj(hidden).view(by_heads)).transpose(1, 2)
        keys = self.k_norm(self.k_proj(hidden).view(by_heads)).transpose(1, 2)
        values = self.v_proj(hidden).view(by_heads).transpose(1, 2)
        cos, sin = angles
        queries, keys = apply_rotary_pos_emb(queries, keys, cos, sin)
        keys, values = repeat_kv(keys, self.num_key_value_groups), repeat_kv(values, self.num_key_value_groups)
        given = functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, dropout_p=self.dropout if self.training else 0.0
        )
        given = given.transpose(1, 2).reshape(*shape, -1).contiguous()
        return self.o_proj(given)


def apply_rotary_pos_emb(queries, keys, cos, sin):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return queries * cos + queries.flip(-1) * sin, keys * cos + keys.flip(-1) * sin


def repeat_kv(pairs, times):
    return pairs.repeat_interleave(times, dim=1)


class ByHand(nn.Module):
    """As earlier ones: products of matrices, and attributes that say how many heads there are."""

    def __init__(self, pairs=HEADS):
        super().__init__()
        self.num_heads, self.all_head_size, self.pairs = HEADS, WIDTH, pairs
        self.query, self.key, self.value, self.out = linear(), linear(), linear(), linear()
        self.register_buffer("seen", torch.ones(9, 9).tril().bool()[None, None], persistent=False)

    def by_heads(self, x, heads):
        x = x.view(x.size()[:-1] + (heads, 2))  # noqa: RUF005 - as models have it
        return x.permute(0, 2, 1, 3)

    def forward(self, x, bias):
        length = x.size(1)
        queries, keys = self.by_heads(self.query(x), self.num_heads), self.by_heads(self.key(x), self.num_heads)
        scores = torch.matmul(queries, keys.transpose(-1, -2)) / 2**0.5 + bias
        scores = scores.masked_fill(~self.seen[:, :, :length, :length], -1e9)
        attended = functional.softmax(scores, dim=-1) @ self.by_heads(self.value(x), self.num_heads)
        attended = attended.permute(0, 2, 1, 3).contiguous()
        return self.out(attended.view((*attended.size()[:-2], self.all_head_size)))


class Attends(nn.Module):
    """An attention, and what it takes, which is trained."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention
        self.bias = nn.Parameter(numbers(1, HEADS, 5, 5, seed=0))
        self.cos, self.sin = nn.Parameter(numbers(1, 5, 6, seed=0)), nn.Parameter(numbers(1, 5, 6, seed=1))

    def forward(self, x):
        if isinstance(self.attention, ByHand):
            return self.attention(x, self.bias)
        return self.attention(x, (self.cos, self.sin), mask=self.bias)


def loss(model, step):
    return square(model(numbers(2, 5, WIDTH, seed=step)))


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("kind", FEED_FORWARD)
def test_feed_forward_networks_are_split_by_inner_features_dropout_included(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(WIDTH), FEED_FORWARD[kind]()).double()
    check_exact(model, loss)
    columns, rows = split(model)
    assert len(columns) == (2 if kind == "gated" else 1)
    assert len(rows) == 1


@on_ranks(2, 4)
@pytest.mark.parametrize("attention", [Attention, ByHand])
def test_attention_is_split_by_heads_with_what_it_takes(attention):
    torch.manual_seed(0)
    model = Attends(attention()).double()
    check_exact(model, loss)
    columns, rows = split(model)
    assert len(columns) == 3
    assert len(rows) == 1
    assert attention is Attention or model.attention.num_heads == HEADS  # to whoever asks but its forward


@on_ranks(2, 4)
def test_fewer_heads_of_keys_and_values_than_ranks_stay_whole():
    torch.manual_seed(0)
    model = Attends(Attention(pairs=2)).double()
    check_exact(model, loss)
    assert len(split(model)[1]) == 1
    assert model.attention.num_key_value_groups == HEADS // 2


@on_ranks(3)
def test_heads_that_do_not_divide_leave_each_layer_to_itself():
    torch.manual_seed(0)
    model = Attends(Attention()).double()
    check_exact(model, loss)
    assert split(model) == ([], [])
    assert "attention.q_proj.weight" in tensor_parallel.placements(model)


@on_ranks(2)
def test_two_sums_a_step_and_layer_travel():
    torch.manual_seed(0)
    axis = tulle.init(model=-1)["model"]
    model = nn.Sequential(linear(), FeedForward(), Attends(Attention())).float()
    tensor_parallel.apply(model, axis, smallest_bytes=500)
    x = numbers(2, 5, WIDTH, seed=0).float()
    model(x).sum().backward()
    traffic.is_tracing = True
    traffic.take_spans()
    model(x).sum().backward()
    spans = [span.name for span in traffic.take_spans() if not span.name.startswith("wait")]
    traffic.is_tracing = False
    norms = {"2.attention.q_norm": 2, "2.attention.k_norm": 1}
    trained = 3  # of what attention takes: a mask, and two angles
    assert Counter(spans) == {"1.fc1": 1, "1.fc2": 1, "2.attention": 1 + trained, "2.attention.o_proj": 1} | norms


@on_ranks(2)
def test_what_kernels_drop_is_each_ranks_own_and_all_that_is_drawn_afterwards_alike():
    axis = tulle.init(model=-1)["model"]
    torch.manual_seed(0)
    model = nn.Sequential(Attends(Attention(dropped=0.5)), nn.Dropout(0.5)).float()
    tensor_parallel.apply(model, axis, smallest_bytes=0)
    assert len(split(model)[1]) == 1
    of_first, of_second = drawn(model, numbers(2, 5, WIDTH, seed=0).float(), axis)
    assert of_first[0] != of_first[1]
    assert of_first == of_second


@on_ranks(2)
def test_patterns_may_leave_a_layer_out():
    torch.manual_seed(0)
    model = nn.Sequential(linear(), FeedForward()).double()
    check_exact(model, loss, select={"1": "auto", "1.fc2": "whole"})
    assert {*tensor_parallel.placements(model)} == {"1.fc1.weight", "1.fc1.bias"}
    assert split(model) == ([], [])


@on_ranks(2)
def test_layers_that_are_named_one_by_one_are_split_together():
    torch.manual_seed(0)
    model = nn.Sequential(linear(), FeedForward()).double()
    check_exact(model, loss, select=["1.fc1", "1.fc2"])
    assert split(model) == (["1.fc1"], ["1.fc2"])


@on_ranks(2)
def test_layers_are_counted_together_and_may_be_smaller():
    axis = tulle.init(model=-1)["model"]
    two = FeedForward()
    size = sum(own.nbytes for layer in (two.fc1, two.fc2) for own in layer.parameters())
    assert tensor_parallel.known(two, smallest_bytes=4 * size) == ["fc1", "fc2"]
    assert tensor_parallel.known(two, smallest_bytes=4 * size + 1) == []
    assert split(tensor_parallel.apply(two, axis, smallest_bytes=4 * size)) == (["fc1"], ["fc2"])


def is_managed(module):
    return isinstance(module, nn.Sequential) or getattr(module, "_is_managed", False)


def runs(module, x):
    return getattr(module, "down", module.net.fc2)(x)


class Asks(nn.Module):
    """As encoders of speech in `transformers`, which ask who manages them."""

    def __init__(self, asks):
        super().__init__()
        self.net, self._asks = FeedForward(), asks

    def forward(self, x):
        return self.net(x) * (0.5 if self._asks == "class" and is_managed(self) else 1.0)


class Runs(Asks):
    def forward(self, x):
        return self.net(x) + runs(self, numbers(2, 5, INNER, seed=9))


@on_ranks(2)
@pytest.mark.parametrize(("kind", "is_split"), [(Asks, True), (Runs, False)])
def test_a_function_that_only_asks_what_a_module_is_keeps_nothing_apart(kind, is_split):
    torch.manual_seed(0)
    model = nn.ModuleDict({"one": kind("class")})["one"].double()
    check_exact(model, loss)
    assert split(model) == ((["net.fc1"], ["net.fc2"]) if is_split else ([], []))
