"""What code says of a rank's heads and features is said of them alone: not of wholes, nor where it may be another."""

import copy
import sys

import pytest
import torch
from split_training import check_exact, numbers, split, square
from torch import nn
from torch.nn import functional

import tulle
from ranks import on_ranks
from tulle import tensor_parallel
from tulle.errors import ModelError

WIDTH, HEADS = 16, 4


def loss(model, step):
    return square(model(numbers(2, 5, WIDTH, seed=step)))


class Fused(nn.Module):
    has_mean = False

    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.heads, self.width, self.head = HEADS, WIDTH, WIDTH // HEADS
        self.norm = nn.LayerNorm(WIDTH // HEADS)

    def attend(self, three, length):
        q, k, v = (one.reshape(2, length, self.heads, self.head).transpose(1, 2) for one in three)
        return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, length, self.width)


class SplitWithAWhole(Fused):
    """A function cuts what a layer gives, and what is whole, at one place."""

    def forward(self, x):
        fused, whole = (torch.split(one, self.width, dim=-1) for one in (self.qkv(x), torch.cat([x, x, x], -1)))
        return self.proj(self.attend(fused, 5)) + whole[0].mean()


class StretchesOfAWhole(Fused):
    def first(self, one):
        return one[..., : self.width], one[..., self.width : 2 * self.width], one[..., 2 * self.width :]

    def forward(self, x):
        q, k, v = self.first(self.qkv(x))
        one, other, _ = self.first(torch.cat([x, 2 * x, 3 * x], -1))
        return self.proj(self.attend((q, k, v), 5)) + (one * other).mean()


class ViewOfAWhole(Fused):
    def by_heads(self, one):
        return torch.reshape(one, (2, 5, self.heads, self.head)).transpose(1, 2)

    def forward(self, x):
        q, k, v = (self.by_heads(one) for one in self.qkv(x).chunk(3, -1))
        attended = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 5, self.width)
        return self.proj(attended) + self.by_heads(x).amax(1).mean()


class NormOfAWhole(Fused):
    def forward(self, x):
        q, k, v = (one.view(2, 5, self.heads, self.head).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        attended = functional.scaled_dot_product_attention(self.norm(q), k, v).transpose(1, 2).reshape(2, 5, WIDTH)
        return self.proj(attended) + self.norm(x[..., : self.head]).mean(-1, keepdim=True)


@on_ranks(2, 4)
@pytest.mark.parametrize("kind", [SplitWithAWhole, StretchesOfAWhole, ViewOfAWhole, NormOfAWhole])
def test_layers_stay_apart_where_a_number_or_a_norm_is_that_of_wholes_too(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(WIDTH), kind()).double()
    check_exact(model, loss)
    assert split(model)[1] == []


class FusedWidth(Fused):
    """The width that is said is that of all three, which are cut afterwards."""

    def forward(self, x):
        samples, length, width = x.shape
        q, k, v = self.qkv(x).view(samples, length, self.heads, 3 * width // self.heads).transpose(1, 2).chunk(3, -1)
        return self.proj(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@on_ranks(2, 4)
def test_heads_may_be_seen_before_what_is_fused_in_them_is_cut():
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(WIDTH), FusedWidth()).double()
    check_exact(model, loss)
    assert len(split(model)[1]) == 1


class MoreTokens(Fused):
    """With twice as many tokens there are half as many heads, which -1 does not say."""

    def forward(self, x):
        samples, length, _ = x.shape
        q, k, v = (one.reshape(samples, 2 * length, -1, self.head).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        return self.proj(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(samples, length, -1))


class Switched(Fused):
    def forward(self, x):
        q, k, v = (one.view(2, 5, self.heads, self.head).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        if self.has_mean:
            q = q.mean(1, keepdim=True).expand_as(k)
        return self.proj(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 5, WIDTH))


@on_ranks(2, 4)
def test_what_is_left_is_not_taken_for_all_heads():
    model = tensor_parallel.apply(MoreTokens().double(), tulle.init(model=-1)["model"], smallest_bytes=0)
    with pytest.raises(RuntimeError, match="is invalid for input of size"):
        model(numbers(2, 5, WIDTH, seed=0))


@on_ranks(2)
def test_an_attribute_of_a_class_that_decides_is_watched():
    model = tensor_parallel.apply(Switched().double(), tulle.init(model=-1)["model"], smallest_bytes=0)
    model(numbers(2, 5, WIDTH, seed=0))
    model.has_mean = True
    with pytest.raises(ModelError, match="has_mean of a Switched was False"):
        model(numbers(2, 5, WIDTH, seed=0))


einops = pytest.importorskip("einops")
IS_FLIPPED = False


class SwitchedElsewhere(Fused):
    def forward(self, x):
        q, k, v = (one.view(2, 5, self.heads, self.head).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        if SwitchedElsewhere.has_mean or IS_FLIPPED:
            q = q.flip(1)
        return self.proj(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 5, WIDTH))


@on_ranks(2)
@pytest.mark.parametrize("name", ["has_mean of SwitchedElsewhere", "IS_FLIPPED of test_numbers_that_mislead"])
def test_what_decides_is_watched_in_a_class_and_in_a_module_of_python(name, monkeypatch):
    model = tensor_parallel.apply(SwitchedElsewhere().double(), tulle.init(model=-1)["model"], smallest_bytes=0)
    assert len(split(model)[1]) == 1
    copied = copy.deepcopy(model)
    attribute, _, owner = name.split()
    monkeypatch.setattr(SwitchedElsewhere if owner == "SwitchedElsewhere" else sys.modules[__name__], attribute, True)
    for one in (model, copied):
        with pytest.raises(ModelError, match=f"{name} was False"):
            one(numbers(2, 5, WIDTH, seed=0))


class OfPictures(Fused):
    """Tokens lie in rows and columns, before and after."""

    def forward(self, x):
        samples, rows, columns, width = x.shape
        q, k, v = self.qkv(x).reshape(samples, rows * columns, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return self.proj(attended.reshape(samples, rows, columns, width))


class OfPicturesByEinops(Fused):
    def forward(self, x):
        three = self.qkv(x.flatten(1, 2)).chunk(3, -1)
        q, k, v = (einops.rearrange(one, "b n (h d) -> b h n d", h=self.heads) for one in three)
        attended = functional.scaled_dot_product_attention(q, k, v)
        return self.proj(einops.rearrange(attended, "b h n d -> b n (h d)", h=self.heads)).view(x.shape)


@on_ranks(2, 4)
@pytest.mark.parametrize("kind", [OfPictures, OfPicturesByEinops])
def test_heads_become_features_of_pictures(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(WIDTH), kind()).double()
    check_exact(model, lambda one, step: square(one(numbers(2, 3, 4, WIDTH, seed=step))))
    assert len(split(model)[1]) == 1


class OfFourDimensions(Fused):
    def forward(self, x):
        inner = self.qkv(x)
        return self.proj(torch.tanh(inner[..., : self.width])) * inner.size(3)


@on_ranks(2)
def test_a_fourth_dimension_may_be_asked_for():
    torch.manual_seed(0)
    check_exact(OfFourDimensions().double(), lambda one, step: square(one(numbers(2, 3, 4, WIDTH, seed=step))))
