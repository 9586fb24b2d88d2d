"""Attention that functions, or modules without parameters, compute of what layers give is split by heads too."""

import copy
import math

import pytest
import torch
from split_training import check_exact, numbers, split, square
from torch import nn
from torch.nn import functional

import tulle
from ranks import on_ranks
from tulle import tensor_parallel

WIDTH, HEADS = 16, 4


def clones(module, count):
    return nn.ModuleList([copy.deepcopy(module) for _ in range(count)])


def attention(query, key, value, mask=None, dropout=None):
    width = query.size(-1)
    scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(width)
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    weights = scores.softmax(dim=-1)
    if dropout is not None:
        weights = dropout(weights)
    return torch.matmul(weights, value), weights


class Annotated(nn.Module):
    """As *The Annotated Transformer*: layers in a list, a function attends, and weights are kept to be looked at."""

    def __init__(self):
        super().__init__()
        self.d_k, self.h, self.attn, self.dropout = WIDTH // HEADS, HEADS, None, nn.Dropout(0.0)
        self.linears = clones(nn.Linear(WIDTH, WIDTH), 4)

    def forward(self, query, key, value, mask=None):
        if mask is not None:
            mask = mask.unsqueeze(1)
        nbatches = query.size(0)
        query, key, value = [
            lin(x).view(nbatches, -1, self.h, self.d_k).transpose(1, 2)
            for lin, x in zip(self.linears, (query, key, value), strict=False)
        ]
        x, self.attn = attention(query, key, value, mask=mask, dropout=self.dropout)
        x = x.transpose(1, 2).contiguous().view(nbatches, -1, self.h * self.d_k)
        del query, key, value
        return self.linears[-1](x)


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.0)

    def forward(self, query, key, value, mask=None):
        scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(query.size(-1))
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, -1e9)
        weights = self.dropout(functional.softmax(scores, dim=-1))
        return torch.matmul(weights, value), weights


class OfAModule(nn.Module):
    """As BERT-pytorch: a module without parameters attends."""

    def __init__(self, attends=None):
        super().__init__()
        self.h, self.d_k = HEADS, WIDTH // HEADS
        self.linear_layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.output_linear, self.attention = nn.Linear(WIDTH, WIDTH), attends or Attends()

    def forward(self, query, key, value, mask=None):
        batch_size = query.size(0)
        query, key, value = [
            one(x).view(batch_size, -1, self.h, self.d_k).transpose(1, 2)
            for one, x in zip(self.linear_layers, (query, key, value), strict=True)
        ]
        x, _ = self.attention(query, key, value, mask=mask)
        x = x.transpose(1, 2).contiguous().view(batch_size, -1, self.h * self.d_k)
        return self.output_linear(x)


class Of(nn.Module):
    def __init__(self, *attentions):
        super().__init__()
        self.norm, self.attentions = nn.LayerNorm(WIDTH), nn.ModuleList(attentions)
        self.register_buffer("seen", torch.ones(5, 5).tril()[None])

    def forward(self, x):
        for one in self.attentions:
            x = self.norm(x)
            x = x + one(x, x, x, mask=self.seen)
        return x


def loss(model, step):
    return square(model(numbers(2, 5, WIDTH, seed=step)))


@on_ranks(2, 4)
@pytest.mark.parametrize("kind", [Annotated, OfAModule])
def test_what_attends_is_looked_into(kind):
    torch.manual_seed(0)
    model = Of(kind(), kind()).double()
    check_exact(model, loss)
    columns, rows = split(model)
    assert (len(columns), len(rows)) == (6, 2)


@on_ranks(2)
def test_weights_that_are_kept_are_those_of_all_heads():
    torch.manual_seed(0)
    model = Of(Annotated()).double()
    x = numbers(2, 5, WIDTH, seed=0)
    model(x)
    expected = model.attentions[0].attn.detach()
    model.attentions[0].attn = None
    tensor_parallel.apply(model, tulle.init(model=-1)["model"], smallest_bytes=0)
    model(x)
    assert len(split(model)[1]) == 1
    torch.testing.assert_close(model.attentions[0].attn.detach(), expected)


@on_ranks(2)
def test_a_module_that_attends_for_two_leaves_each_layer_to_itself():
    torch.manual_seed(0)
    attends = Attends()
    model = Of(OfAModule(attends), OfAModule(attends)).double()
    check_exact(model, loss)
    assert split(model) == ([], [])
    assert len(tensor_parallel.placements(model)) == 16
