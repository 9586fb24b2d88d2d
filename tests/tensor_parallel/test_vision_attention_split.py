"""Attention of `transformers` between patches of all pictures, which has no dimension of samples."""

import importlib

import pytest
import torch
from split_training import check_exact, numbers, split, square
from torch import nn

from ranks import on_ranks

WIDTH, HEADS = 24, 12


class Tower(nn.Module):
    """A norm, and attention within two pictures, of four and of six patches."""

    def __init__(self, name, kind, config, **options):
        super().__init__()
        of = f"transformers.models.{name}"
        options |= {"hidden_size": WIDTH, "attention_dropout": 0.0}
        made = getattr(importlib.import_module(f"{of}.configuration_{name}"), config)(**options)
        made._attn_implementation = "eager"
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = getattr(importlib.import_module(f"{of}.modeling_{name}"), kind)(made)

    def forward(self, patches, turns):
        lengths = torch.tensor([0, 4, 10])
        return self.attention(self.norm(patches), cu_seqlens=lengths, position_embeddings=turns)


def loss(model, step):
    turns = numbers(10, WIDTH // HEADS, seed=7), numbers(10, WIDTH // HEADS, seed=8)
    return square(model(numbers(10, WIDTH, seed=step), turns))


@on_ranks(2, 4)
@pytest.mark.parametrize(
    ("name", "kind", "config", "options"),
    [
        ("qwen2_5_vl", "Qwen2_5_VLVisionAttention", "Qwen2_5_VLVisionConfig", {"num_heads": HEADS}),
        ("glm_ocr", "GlmOcrVisionAttention", "GlmOcrVisionConfig", {"num_heads": HEADS}),
    ],
)
def test_attention_between_patches_is_split_by_heads(name, kind, config, options):
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = Tower(name, kind, config, **options).double()
    with torch.no_grad():
        for norm in ("q_norm", "k_norm"):
            if hasattr(model.attention, norm):
                getattr(model.attention, norm).weight.copy_(numbers(WIDTH // HEADS, seed=9))
    check_exact(model, loss)
    assert split(model) == (["attention.qkv"], ["attention.proj"])
