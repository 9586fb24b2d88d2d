"""Attention whose queries, keys and values are one layer is split by heads, as its users write it everywhere."""

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


class Fused(nn.Module):
    """What all of them have."""

    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.num_heads, self.n_embd, self.head_dim, self.scale = HEADS, WIDTH, WIDTH // HEADS, 0.5
        self.attn_drop = nn.Dropout(0.0)


class NanoGPT(Fused):
    """Lengths of the input say the rest, and a buffer what may be seen."""

    def __init__(self):
        super().__init__()
        self.register_buffer("bias", torch.tril(torch.ones(8, 8)).view(1, 1, 8, 8))
        self.c_attn, self.resid_dropout = self.qkv, nn.Dropout(0.1)
        del self.qkv

    def forward(self, x):
        B, T, C = x.size()  # noqa: N806 - as its users write it
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.num_heads, C // self.num_heads).transpose(1, 2)
        q = q.view(B, T, self.num_heads, C // self.num_heads).transpose(1, 2)
        v = v.view(B, T, self.num_heads, C // self.num_heads).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / k.size(-1) ** 0.5)
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        att = functional.softmax(att, dim=-1)
        att = self.attn_drop(att)
        y = att @ v
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.proj(y))


class Timm(Fused):
    """Vision transformers."""

    def __init__(self, *, fused_attn=True):
        super().__init__()
        self.q_norm, self.k_norm, self.norm = nn.LayerNorm(self.head_dim), nn.Identity(), nn.Identity()
        self.fused_attn = fused_attn

    def forward(self, x):
        B, N, C = x.shape  # noqa: N806
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.fused_attn:
            x = functional.scaled_dot_product_attention(q, k, v, dropout_p=self.attn_drop.p if self.training else 0.0)
        else:
            q = q * self.scale
            attn = q @ k.transpose(-2, -1)
            attn = attn.softmax(dim=-1)
            attn = self.attn_drop(attn)
            x = attn @ v
        x = x.transpose(1, 2).reshape(B, N, C)
        x = self.norm(x)
        return self.proj(x)


class Dino(Fused):
    def forward(self, x):
        B, N, C = x.shape  # noqa: N806
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        attn = (q @ k.transpose(-2, -1)) * self.scale
        attn = self.attn_drop(attn.softmax(dim=-1))
        return self.proj((attn @ v).transpose(1, 2).reshape(B, N, C))


class ModernBert(Fused):
    def forward(self, x):
        shape = x.shape[:-1]
        q, k, v = self.qkv(x).view(*shape, 3, -1, self.head_dim).unbind(dim=-3)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        attended = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return self.proj(attended.reshape(*shape, -1).contiguous())


class Bloom(Fused):
    """Heads first, and in each of them queries, keys and values; a method cuts them."""

    def _split_heads(self, fused):
        batch, length, _ = fused.shape
        fused = fused.view(batch, length, self.num_heads, 3, self.head_dim)
        return fused[..., 0, :], fused[..., 1, :], fused[..., 2, :]

    def forward(self, x):
        q, k, v = self._split_heads(self.qkv(x))
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True).permute(0, 2, 1, 3)
        return self.proj(attended.reshape(*x.shape[:2], self.num_heads * self.head_dim))


class Unflattened(Fused):
    """As torch's tutorial."""

    def forward(self, x):
        q, k, v = torch.chunk(self.qkv(x), 3, dim=-1)
        q = q.unflatten(-1, [self.num_heads, self.head_dim]).transpose(1, 2)
        k = k.unflatten(-1, [self.num_heads, self.head_dim]).transpose(1, 2)
        v = v.unflatten(-1, [self.num_heads, self.head_dim]).transpose(1, 2)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(attended.transpose(1, 2).flatten(-2))


class Einops(Fused):
    """As lucidrains'."""

    def __init__(self):
        super().__init__()
        self.norm, self.attend = nn.LayerNorm(WIDTH), nn.Softmax(dim=-1)
        self.to_out = nn.Sequential(self.proj, nn.Dropout(0.0))
        del self.proj

    def forward(self, x):
        x = self.norm(x)
        qkv = self.qkv(x).chunk(3, dim=-1)
        q, k, v = map(lambda t: einops.rearrange(t, "b n (h d) -> b h n d", h=self.num_heads), qkv)  # noqa: C417
        attn = self.attend(torch.matmul(q, k.transpose(-1, -2)) * self.scale)
        out = torch.matmul(self.attn_drop(attn), v)
        return self.to_out(einops.rearrange(out, "b h n d -> b n (h d)"))


einops = pytest.importorskip("einops")
KINDS = {
    "nanoGPT": NanoGPT,
    "timm": Timm,
    "timm, by hand": lambda: Timm(fused_attn=False),
    "DINO": Dino,
    "ModernBERT": ModernBert,
    "Bloom": Bloom,
    "torch's tutorial": Unflattened,
    "einops": Einops,
}


def loss(model, step):
    return square(model(numbers(2, 5, WIDTH, seed=step)))


def block(kind):
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(WIDTH), KINDS[kind]()).double()


@on_ranks(2, 4)
@pytest.mark.parametrize("kind", KINDS)
def test_attention_with_one_layer_for_queries_keys_and_values_is_split_by_heads(kind):
    model = block(kind)
    check_exact(model, loss)
    columns, rows = split(model)
    assert (len(columns), len(rows)) == (1, 1)
    assert model[1].num_heads == HEADS  # to whoever asks


@on_ranks(3)
@pytest.mark.parametrize("kind", KINDS)
def test_heads_that_do_not_divide_leave_it_to_its_layers(kind):
    model = block(kind)
    check_exact(model, loss)
    assert split(model) == ([], [])
