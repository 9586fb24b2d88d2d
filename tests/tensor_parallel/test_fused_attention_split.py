"""Attention whose queries, keys and values are one layer is split by heads, as its users write it everywhere."""

import copy
import inspect
from types import SimpleNamespace

import pytest
import torch
from split_training import check_exact, drawn, numbers, split, square
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
        B, T, C = x.size()
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
        B, N, C = x.shape
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
        B, N, C = x.shape
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
        q, k, v = map(lambda t: einops.rearrange(t, "b n (h d) -> b h n d", h=self.num_heads), qkv)
        attn = self.attend(torch.matmul(q, k.transpose(-1, -2)) * self.scale)
        out = torch.matmul(self.attn_drop(attn), v)
        return self.to_out(einops.rearrange(out, "b h n d -> b n (h d)"))


class Einsum(Fused):
    """Products by `einsum`, of heads beside features."""

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim)).unbind(2)
        scores = torch.einsum("bihd,bjhd->bhij", q, k) * self.scale
        attended = torch.einsum("b h i j, b j h d -> b i h d", scores.softmax(dim=-1), v)
        return self.proj(attended.flatten(2))


class OfItsHeads(Fused):
    """What is made with the number of heads has them all, on every rank."""

    def forward(self, x):
        shape = x.shape[:-1]
        q, k, v = (one.view(*shape, -1, 4).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        slopes = 0.5 ** torch.arange(1, self.num_heads + 1)
        scores = q @ k.transpose(-1, -2) - slopes[:, None, None]
        return self.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(*shape, -1))


class Grouped(nn.Module):
    """As Phi 3's: fewer heads of keys and values, and stretches of what one layer gives."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(num_attention_heads=HEADS)
        self.head_dim, self.num_key_value_heads, self.num_key_value_groups = 4, 2, HEADS // 2
        self.qkv, self.proj = nn.Linear(WIDTH, (HEADS + 2 * 2) * 4), nn.Linear(HEADS * 4, WIDTH)

    def parts(self, qkv):
        place = self.config.num_attention_heads * self.head_dim
        keys = qkv[..., place : place + self.num_key_value_heads * self.head_dim]
        return qkv[..., :place], keys, qkv[..., place + self.num_key_value_heads * self.head_dim :]

    def forward(self, x):
        shape = x.shape[:-1]
        q, k, v = (one.view(*shape, -1, self.head_dim).transpose(1, 2) for one in self.parts(self.qkv(x)))
        k, v = repeat_kv(k, self.num_key_value_groups), repeat_kv(v, self.num_key_value_groups)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return self.proj(attended.reshape(*shape, -1))


class Repeated(Grouped):
    """Heads of keys and values repeated in place, as often as something else says."""

    def forward(self, x):
        shape, times = x.shape[:-1], HEADS // self.num_key_value_heads
        q, k, v = (one.view(*shape, -1, self.head_dim).transpose(1, 2) for one in self.parts(self.qkv(x)))
        k, v = k.repeat_interleave(times, dim=1), v.repeat_interleave(times, 1)
        attended = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return self.proj(attended.reshape(*shape, -1))


class Listed(Grouped):
    """The same sections as a list of lengths."""

    def parts(self, qkv):
        sizes = [HEADS * self.head_dim, 2 * self.head_dim, 2 * self.head_dim]
        return qkv.split(sizes, dim=-1)


def repeat_kv(pairs, times):
    return pairs.repeat_interleave(times, dim=1)


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
    "einsum": Einsum,
}
GROUPED = {"stretches": Grouped, "lengths": Listed, "repeated": Repeated}


def loss(model, step):
    return square(model(numbers(2, 5, WIDTH, seed=step)))


def block(kind):
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(WIDTH), (KINDS | GROUPED)[kind]()).double()


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


@on_ranks(2)
@pytest.mark.parametrize("kind", GROUPED)
def test_sections_may_differ_in_length(kind):
    model = block(kind)
    check_exact(model, loss)
    assert split(model) == (["1.qkv"], ["1.proj"])


@on_ranks(4)
@pytest.mark.parametrize("kind", GROUPED)
def test_sections_with_fewer_heads_than_ranks_leave_it_to_its_layers(kind):
    model = block(kind)
    check_exact(model, loss)
    assert split(model) == ([], [])


@on_ranks(2, 4)
def test_what_is_made_with_the_number_of_heads_is_split_where_it_meets_them():
    model = nn.Sequential(nn.LayerNorm(WIDTH), OfItsHeads()).double()
    check_exact(model, loss)
    assert split(model) == (["1.qkv"], ["1.proj"])


@on_ranks(2)
def test_a_number_that_is_another_than_it_was_is_refused_by_name():
    model = tensor_parallel.apply(block("timm"), tulle.init(model=-1)["model"], smallest_bytes=0)
    model[1].num_heads = 2
    with pytest.raises(ModelError, match="1 says 2 where its layers, split together, give 4"):
        model(numbers(2, 5, WIDTH, seed=0))


@on_ranks(2)
def test_code_is_as_it_was_for_whoever_reads_or_calls_it():
    model = block("Bloom")
    before, fused = inspect.getsource(model[1].forward), numbers(2, 5, 3 * WIDTH, seed=0)
    expected = model[1]._split_heads(fused)
    copied = copy.deepcopy(tensor_parallel.apply(model, tulle.init(model=-1)["model"], smallest_bytes=0))
    assert inspect.getsource(model[1].forward) == before
    written = next(vars(one)["forward"] for one in type(model[1]).__mro__ if one.__name__ == "_Rewritten")
    lines = [[line for *_, line in one.__code__.co_lines()] for one in (written, Bloom.forward)]
    assert {*lines[0]} == {*lines[1]}  # as a traceback says them
    assert all(map(torch.equal, model[1]._split_heads(fused), expected))
    x = numbers(2, 5, WIDTH, seed=0)
    assert torch.equal(copied(x), model(x))
    with torch.no_grad():
        assert torch.equal(torch.compile(model, backend="eager")(x), model(x))


@on_ranks(2)
def test_modules_of_one_class_are_of_one_class_afterwards():
    model = nn.Sequential(NanoGPT(), NanoGPT()).double()
    tensor_parallel.apply(model, tulle.init(model=-1)["model"], smallest_bytes=0)
    assert type(model[0]) is type(model[1])


@on_ranks(2)
def test_what_kernels_drop_between_sections_is_each_ranks_own():
    torch.manual_seed(0)
    model = nn.Sequential(Timm(), nn.Dropout(0.5))
    model[0].attn_drop.p = 0.5
    axis = tulle.init(model=-1)["model"]
    tensor_parallel.apply(model, axis, smallest_bytes=0)
    assert len(split(model)[1]) == 1
    of_first, of_second = drawn(model, numbers(2, 5, WIDTH, seed=0).float(), axis)
    assert of_first[0] != of_first[1]
    assert of_first == of_second


class OfAnyShape(Fused):
    """Sections that are seen by heads whatever comes before: with two dimensions it attends between other things."""

    def forward(self, x):
        shape = x.shape[:-1]
        q, k, v = (one.view(*shape, -1, self.head_dim).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        return self.proj(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(*shape, -1))


@on_ranks(2)
def test_sections_of_other_dimensions_than_were_understood_are_refused():
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(WIDTH), OfAnyShape()).double()
    check_exact(model, loss)
    assert split(model) == (["1.qkv"], ["1.proj"])
    with pytest.raises(ModelError, match=r"1\.qkv was given 2 dimensions"):
        model(numbers(5, WIDTH, seed=0))
