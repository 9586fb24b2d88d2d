"""Linear layers of the user's own that write out what `nn.Linear` does, and bring their weights to another dtype."""

import pytest
import torch
import torch.nn.functional as F
from split_layers import model_axis
from split_training import check_exact, numbers, split, square
from torch import nn

from ranks import on_ranks
from tulle import tensor_parallel

WIDTH, INNER, HEADS = 8, 12, 4


class OfWhisper(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(
            x,
            self.weight.to(x.dtype),
            None if self.bias is None else self.bias.to(x.dtype),
        )


class OfNanochat(nn.Linear):
    """Without a bias."""

    def __init__(self, *sizes):
        super().__init__(*sizes, bias=False)

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight.to(dtype=x.dtype))


class ByNames(nn.Linear):
    def forward(self, input):
        """As torch's."""
        return F.linear(bias=self.bias, input=input, weight=self.weight.type_as(input))


class LeavesBiasAway(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype))


class Scaled(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight / self.weight.norm(), self.bias)


class Doubles(nn.Linear):
    def forward(self, x):
        return F.linear(2 * x, self.weight.to(x.dtype), self.bias)


def repeat_kv(pairs, times):
    samples, heads, length, width = pairs.shape
    return pairs[:, :, None].expand(samples, heads, times, length, width).reshape(samples, -1, length, width)


class Attention(nn.Module):
    def __init__(self, kind, pairs):
        super().__init__()
        width, self.num_key_value_groups = WIDTH // HEADS, HEADS // pairs
        self.q, self.k, self.v = kind(WIDTH, WIDTH), kind(WIDTH, pairs * width), kind(WIDTH, pairs * width)
        self.out = kind(WIDTH, WIDTH)

    def forward(self, x):
        shape = (*x.shape[:2], -1, WIDTH // HEADS)
        q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.q, self.k, self.v))
        k, v = repeat_kv(k, self.num_key_value_groups), repeat_kv(v, self.num_key_value_groups)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, kind, pairs=HEADS):
        super().__init__()
        self.attention, self.up, self.down = Attention(kind, pairs), kind(WIDTH, INNER), kind(INNER, WIDTH)

    def forward(self, x):
        x = x + self.attention(x)
        return x + self.down(F.gelu(self.up(x)))


def loss(model, step):
    return square(model(numbers(2, 5, WIDTH, seed=step)))


@on_ranks(2)
@pytest.mark.parametrize(("kind", "rows"), [(OfWhisper, 2), (OfNanochat, 2), (ByNames, 2)])
def test_layers_that_cast_their_weights_are_split_together(kind, rows):
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(WIDTH), Block(kind)).double()
    check_exact(model, loss)
    assert len(split(model)[1]) == rows


@on_ranks(2)
@pytest.mark.parametrize("kind", [LeavesBiasAway, Scaled, Doubles])
def test_layers_that_do_something_else_stay_as_they_are(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, INNER), nn.ReLU(), nn.Linear(INNER, WIDTH), Block(kind)).double()
    check_exact(model, loss)
    assert split(model) == (["0"], ["2"])


@on_ranks(4)
@pytest.mark.parametrize("pairs", [2, HEADS])
def test_a_part_of_a_weight_is_cast_as_the_whole_is(pairs):
    torch.manual_seed(0)
    model = Block(OfWhisper, pairs)
    x = numbers(2, 5, WIDTH, seed=0).bfloat16()
    expected = model(x)
    tensor_parallel.apply(model, model_axis(), smallest_bytes=0)
    assert len(split(model)[1]) == 2
    found = model(x)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)
    found.sum().backward()
    assert model.down.weight.grad.dtype is torch.float32


@on_ranks(2)
def test_layers_of_torch_cast_nothing_here_either():
    model = tensor_parallel.apply(Block(nn.Linear), model_axis(), smallest_bytes=0)
    assert len(split(model)[1]) == 2
    with pytest.raises(RuntimeError, match="dtype"):
        model.down(numbers(2, INNER // 2, seed=0))
