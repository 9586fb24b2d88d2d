"""Norms over all features between layers that are split together: their means are those of all ranks."""

import pytest
import torch
from split_training import check_exact, numbers, split, square
from torch import nn
from torch.nn import functional

import tulle
from ranks import on_ranks
from tulle import tensor_parallel
from tulle.comm import traffic

WIDTH, INNER, HEADS = 8, 10, 4


class RMSNorm(nn.Module):
    """As models of `transformers` write it."""

    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, hidden):
        dtype = hidden.dtype
        hidden = hidden.to(torch.float64)
        variance = hidden.pow(2).mean(-1, keepdim=True)
        hidden = hidden * torch.rsqrt(variance + self.eps)
        return self.weight * hidden.to(dtype)


class HandNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x):
        x = x - x.mean(dim=-1, keepdim=True)
        return (1 + self.gain) * x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() + self.shift


class LargestNorm(RMSNorm):
    """Looks at the largest."""

    def forward(self, hidden):
        return self.weight * hidden / hidden.abs().amax(-1, keepdim=True)


class SpreadNorm(RMSNorm):
    """Looks at a variance that is no mean."""

    def forward(self, hidden):
        return self.weight * (hidden - hidden.mean(-1, keepdim=True)) / hidden.std(-1, keepdim=True)


class CountedNorm(RMSNorm):
    """Divides by how many there are."""

    def forward(self, hidden):
        return self.weight * hidden * hidden.shape[-1] ** 0.5 / hidden.square().mean(-1, keepdim=True).sqrt()


class AddsNorm(RMSNorm):
    """Writes to what is a mean, which autograd does not let one do to that of all ranks."""

    def forward(self, hidden):
        mean = hidden.mean(-1, keepdim=True)
        mean += hidden.square().mean(-1, keepdim=True)
        return self.weight * hidden / (mean + 3)


NORMS = {
    "LayerNorm": nn.LayerNorm,
    "LayerNorm without bias": lambda width: nn.LayerNorm(width, bias=False),
    "LayerNorm without weights": lambda width: nn.LayerNorm(width, elementwise_affine=False),
    "RMSNorm": nn.RMSNorm,
    "as in transformers": RMSNorm,
    "by hand": HandNorm,
}
OTHERS = {"largest": LargestNorm, "spread": SpreadNorm, "counted": CountedNorm, "adds": AddsNorm}


class Within(nn.Module):
    """A norm before the last layer."""

    def __init__(self, norm):
        super().__init__()
        self.fc1, self.norm, self.fc2 = nn.Linear(WIDTH, INNER), norm(INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x):
        return self.fc2(self.norm(functional.gelu(self.fc1(x))))


class Attention(nn.Module):
    """As OLMo 2's."""

    def __init__(self, norm, pairs=HEADS):
        super().__init__()
        self.head_dim, self.num_key_value_groups = 2, HEADS // pairs
        self.q_proj, self.o_proj = nn.Linear(WIDTH, HEADS * 2), nn.Linear(HEADS * 2, WIDTH)
        self.k_proj, self.v_proj = nn.Linear(WIDTH, pairs * 2), nn.Linear(WIDTH, pairs * 2)
        self.q_norm, self.k_norm = norm(HEADS * 2), norm(pairs * 2)

    def forward(self, hidden):
        shape = (*hidden.shape[:-1], -1, self.head_dim)
        q = self.q_norm(self.q_proj(hidden)).view(shape).transpose(1, 2)
        k = self.k_norm(self.k_proj(hidden)).view(shape).transpose(1, 2)
        v = self.v_proj(hidden).view(shape).transpose(1, 2)
        k, v = repeat_kv(k, self.num_key_value_groups), repeat_kv(v, self.num_key_value_groups)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(attended.transpose(1, 2).reshape(*shape[:-2], -1))


class Twice(Within):
    """The norm is another layer's, too."""

    def __init__(self, norm):
        super().__init__(norm)
        self.fc3 = nn.Linear(WIDTH, INNER)

    def forward(self, x):
        return self.fc2(self.norm(self.fc1(x)) * self.norm(self.fc3(x)))


def repeat_kv(pairs, times):
    return pairs.repeat_interleave(times, dim=1)


def loss(model, step):
    return square(model(numbers(2, 5, WIDTH, seed=step)))


def block(inner):
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(WIDTH), inner).double()
    for own in model[1].parameters():
        own.data += 0.3 * numbers(*own.shape, seed=own.dim())
    return model


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("norm", NORMS)
def test_norms_between_layers_are_over_the_features_of_all_ranks(norm):
    model = block(Within(NORMS[norm]))
    check_exact(model, loss)
    assert split(model) == (["1.fc1"], ["1.fc2"])


@on_ranks(2, 4)
@pytest.mark.parametrize("norm", ["LayerNorm", "as in transformers"])
def test_norms_of_all_queries_and_keys_are_too(norm):
    model = block(Attention(NORMS[norm]))
    check_exact(model, loss)
    assert len(split(model)[0]) == 3
    assert "1.q_norm.weight" in tensor_parallel.placements(model)


@on_ranks(4)
def test_a_norm_of_keys_of_which_ranks_have_no_part_leaves_each_layer_to_itself():
    model = block(Attention(RMSNorm, pairs=2))
    check_exact(model, loss)
    assert split(model) == ([], [])


@on_ranks(2)
@pytest.mark.parametrize("norm", OTHERS)
def test_norms_that_look_at_something_else_leave_each_layer_to_itself(norm):
    model = block(Within(OTHERS[norm]))
    check_exact(model, loss)
    assert split(model) == ([], [])


@on_ranks(2)
def test_a_norm_of_two_layers_leaves_each_to_itself():
    model = block(Twice(RMSNorm))
    check_exact(model, loss)
    assert split(model) == ([], [])


@on_ranks(2)
def test_a_number_a_token_travels_each_way():
    model = block(Within(RMSNorm)).float()
    tensor_parallel.apply(model, tulle.init(model=-1)["model"], smallest_bytes=0)
    x = numbers(2, 5, WIDTH, seed=0).float()
    before = traffic.sent_for("1.norm").bytes_sent
    model(x).sum().backward()
    assert traffic.sent_for("1.norm").bytes_sent - before == 2 * (2 * 5) * 8  # once each way
