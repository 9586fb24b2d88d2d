"""Stretches of a sequence, taken, cut and put one after the other, leave attention split by heads."""

import pytest
import torch
from split_training import check_exact, numbers, split, square
from test_attention_of_more_forms import HEADS, WIDTH, Block, ByHeads, Four
from torch import nn
from torch.nn import functional

from ranks import on_ranks

LENGTH, PREFIX = 5, 2


def turned(part):
    """Features that are turned by their positions."""
    angle = torch.arange(part.shape[-2], dtype=torch.float64)[:, None]
    one, other = part[..., :2], part[..., 2:]
    return part * angle.cos() + torch.cat((-other, one), dim=-1) * angle.sin()


class Turns(ByHeads):
    """As vision transformers that turn patches, and not what stands before them."""

    def forward(self, x, mask=None):
        query, key, value = self.three(x)
        attended = functional.scaled_dot_product_attention(self.turn(query), self.turn(key), value)
        return self.out_proj(attended.transpose(1, 2).flatten(2))


class Cut(Turns):
    """DINOv3's."""

    def turn(self, x):
        prefix, patches = x.split((PREFIX, x.shape[-2] - PREFIX), dim=-2)
        return torch.cat((prefix, turned(patches)), dim=-2)


class Taken(Turns):
    """EVA's."""

    def turn(self, x):
        return torch.cat([x[:, :, :PREFIX, :], turned(x[:, :, PREFIX:, :])], dim=2)


class TakenByDots(Turns):
    def turn(self, x):
        return torch.concat([x[..., :PREFIX, :], turned(x[..., PREFIX:, :])], dim=-2)


class SizesOfTorch(Turns):
    def turn(self, x):
        prefix, patches = torch.split(x, [PREFIX, x.shape[-2] - PREFIX], 2)
        return torch.cat((prefix, turned(patches)), 2)


class OfTwo(nn.Module):
    """As Flux' and SD3's: text and pictures have projections of their own, and attend to one another."""

    def __init__(self):
        super().__init__()
        self.of_text, self.of_pictures = Four(), Four()

    def forward(self, x, mask=None):
        text, pictures = x[:, :PREFIX], x[:, PREFIX:]
        shape = (x.shape[0], -1, HEADS, WIDTH // HEADS)
        one, other = self.of_text, self.of_pictures
        query = torch.cat((one.q_proj(text).view(shape), other.q_proj(pictures).view(shape)), dim=1)
        key = torch.cat((one.k_proj(text).view(shape), other.k_proj(pictures).view(shape)), dim=1)
        value = torch.cat((one.v_proj(text).view(shape), other.v_proj(pictures).view(shape)), dim=1)
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        attended = functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        text, pictures = self.parts(attended)
        return torch.cat((one.out_proj(text), other.out_proj(pictures)), dim=1)

    def parts(self, attended):
        return attended.split_with_sizes([PREFIX, attended.shape[1] - PREFIX], dim=1)


class OfTwoTaken(OfTwo):
    def parts(self, attended):
        return attended[:, :PREFIX], attended[:, PREFIX:]


class Says(ByHeads):
    """What it would say names its class, as many of `transformers` do."""

    def forward(self, x, mask=None):
        if mask is not None:
            raise ValueError(f"{self.__class__.__name__} takes no mask")
        query, key, value = self.three(x)
        return self.out_proj(functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))


def loss(model, step):
    return square(model(numbers(3, LENGTH, WIDTH, seed=step)))


@on_ranks(2, 4)
@pytest.mark.parametrize("kind", [Cut, Taken, TakenByDots, SizesOfTorch, Says])
def test_it_is_split_by_heads(kind):
    torch.manual_seed(0)
    model = Block(kind()).double()
    check_exact(model, loss)
    assert split(model)[1] == ["attention.out_proj"]


@on_ranks(2, 4)
@pytest.mark.parametrize("kind", [OfTwo, OfTwoTaken])
def test_sequences_of_two_kinds_attend_by_heads(kind):
    torch.manual_seed(0)
    model = Block(kind()).double()
    check_exact(model, loss)
    assert split(model)[1] == ["attention.of_text.out_proj", "attention.of_pictures.out_proj"]


class FirstHeads(Turns):
    """A stretch of the heads, and not of the sequence."""

    def turn(self, x):
        return torch.cat((x[:, :PREFIX], turned(x[:, PREFIX:])), dim=1)


class ByCount(Turns):
    """Pieces of so many numbers of a head, of which the last is turned."""

    def turn(self, x):
        *before, last = x.split(2, dim=2)
        return torch.cat((*before, turned(last)), dim=2)


class OneOfThem(ByHeads):
    """The first of a sequence alone, of which the dimension goes."""

    def forward(self, x, mask=None):
        query, key, value = self.three(x)
        attended = functional.scaled_dot_product_attention(query, key, value)[:, :, 0]
        return self.out_proj(attended.flatten(1))[:, None]


@on_ranks(2)
@pytest.mark.parametrize("kind", [FirstHeads, ByCount, OneOfThem])
def test_what_else_is_taken_leaves_it_to_its_layers(kind):
    torch.manual_seed(0)
    model = Block(kind()).double()
    check_exact(model, loss)
    assert split(model) == ([], [])


class Gate(nn.Module):
    """Rows of features without a sequence, of which the first half is a gate."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask=None):
        hidden = self.up(x.flatten(0, 1))
        return self.down(hidden[:, :WIDTH].sigmoid() * hidden[:, WIDTH:]).view(x.shape)


@on_ranks(2)
def test_features_without_a_sequence_are_not_taken_for_one():
    torch.manual_seed(0)
    model = Block(Gate()).double()
    check_exact(model, loss)
    assert split(model) == ([], [])
