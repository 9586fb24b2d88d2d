"""Models as Hugging Face and others wrote them: tiny, with random weights, none changed for a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

VOCABULARY, LENGTH = 128, 16
Inputs = Callable[[int], dict[str, Tensor]]


@dataclass(frozen=True)
class Entry:
    """A model of the zoo.

    Args:
        build: Makes it.
        inputs: A batch of so many samples, as keywords.
        is_single: Whether it has kernels in single precision only.
        tracer: What torch 2.13's `torch.distributed.pipelining.pipeline` does with it on 2 ranks.
    """

    build: Callable[[], nn.Module]
    inputs: Inputs
    tracer: str
    is_single: bool = False


ZOO: dict[str, Entry] = {}
WRONG, CONTIGUOUS, ROPE = "wrong gradients", "not contiguous", "parameter not passed in"
KEYWORD, DYNAMIC = "unexpected keyword", "data-dependent guard"


def _random(samples: int, *shape: int) -> Tensor:
    return torch.randn(samples, *shape, generator=torch.Generator().manual_seed(samples))


def _ids(samples: int) -> Tensor:
    return torch.randint(3, VOCABULARY, (samples, LENGTH), generator=torch.Generator().manual_seed(samples))


def _text(samples: int) -> dict[str, Tensor]:
    return {"input_ids": _ids(samples)}


def _masked(samples: int) -> dict[str, Tensor]:
    return {"input_ids": _ids(samples), "attention_mask": torch.ones(samples, LENGTH, dtype=torch.long)}


def _pairs(samples: int) -> dict[str, Tensor]:
    return {"input_ids": _ids(samples), "decoder_input_ids": _ids(samples)}


def _pixels(samples: int) -> dict[str, Tensor]:
    return {"pixel_values": _random(samples, 3, 32, 32)}


def _add(name: str, model: str, config: str, inputs: Inputs, tracer: str, **options: Any) -> None:
    def build() -> nn.Module:
        return getattr(hf, model)(getattr(hf, config)(**options))

    ZOO[name] = Entry(build, inputs, tracer, is_single=name in ("mixtral", "xlnet"))


_STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_BERT = {
    "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128,
    "vocab_size": VOCABULARY, "max_position_embeddings": 64, **_STILL,
}  # fmt: skip
_GPT2 = {
    "n_layer": 4, "n_embd": 64, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 64,
    "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
}  # fmt: skip
_LLAMA = {
    "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 128, "vocab_size": VOCABULARY, "use_cache": False,
}  # fmt: skip
_T5 = {
    "num_layers": 2, "num_decoder_layers": 2, "d_model": 64, "d_ff": 128, "num_heads": 4, "d_kv": 16,
    "vocab_size": VOCABULARY, "dropout_rate": 0.0, "use_cache": False,
}  # fmt: skip
_BART = {
    "encoder_layers": 2, "decoder_layers": 2, "d_model": 64, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": VOCABULARY, "dropout": 0.0,
    "use_cache": False,
}  # fmt: skip
_PLACES = {"max_position_embeddings": 64}
_MARIAN = {**_BART, **_PLACES, "pad_token_id": 0, "decoder_start_token_id": 0}
_WHISPER = {
    **_BART, "num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 32, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "suppress_tokens": None,
    "begin_suppress_tokens": None,
}  # fmt: skip
_MIXTRAL = {**_LLAMA, "intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2}
_OPT = {
    "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "ffn_dim": 128, "vocab_size": VOCABULARY,
    "word_embed_proj_dim": 64, "use_cache": False, "dropout": 0.0, **_PLACES,
}  # fmt: skip
_VIT = {**_BERT, "image_size": 32, "patch_size": 8, "num_labels": 10}
_HALF = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
_CLIP = {
    "text_config": {**_HALF, "vocab_size": VOCABULARY, "max_position_embeddings": 32, "eos_token_id": 2,
                    "pad_token_id": 0, "bos_token_id": 1},
    "vision_config": {**_HALF, "image_size": 32, "patch_size": 8},
    "projection_dim": 32,
}  # fmt: skip
_WAVES = {
    "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128,
    "conv_dim": (32, 32), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "hidden_dropout": 0.0,
    "attention_dropout": 0.0, "activation_dropout": 0.0, "feat_proj_dropout": 0.0, "layerdrop": 0.1,
    "final_dropout": 0.0, "mask_time_prob": 0.0,
}  # fmt: skip
_SWIN = {
    "image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4,
    "num_labels": 10, "drop_path_rate": 0.0,
}  # fmt: skip
_MAMBA = {"num_hidden_layers": 4, "hidden_size": 64, "state_size": 8, "vocab_size": VOCABULARY, "use_cache": False}
_XLNET = {"vocab_size": VOCABULARY, "d_model": 64, "n_layer": 4, "n_head": 4, "d_inner": 128, "dropout": 0.0}
_NEOX = {
    **{name: value for name, value in _LLAMA.items() if name != "num_key_value_heads"},
    "attention_dropout": 0.0, "hidden_dropout": 0.0,
}  # fmt: skip

_add("gpt2", "GPT2LMHeadModel", "GPT2Config", _text, WRONG, **_GPT2, use_cache=False)
_add("gpt2, with a cache", "GPT2LMHeadModel", "GPT2Config", _text, "unknown output type", **_GPT2)
_UNTIED = {**_GPT2, "use_cache": False, "tie_word_embeddings": False}
_add("gpt2, untied", "GPT2LMHeadModel", "GPT2Config", _text, "right", **_UNTIED)
_add("gpt2, with a mask", "GPT2LMHeadModel", "GPT2Config", _masked, WRONG, **_GPT2, use_cache=False)
_add("bert", "BertForMaskedLM", "BertConfig", _text, CONTIGUOUS, **_BERT)
_add("roberta", "RobertaForSequenceClassification", "RobertaConfig", _text, CONTIGUOUS, **_BERT)
_add("albert", "AlbertForMaskedLM", "AlbertConfig", _text, CONTIGUOUS, **_BERT, embedding_size=32)
_add("t5", "T5ForConditionalGeneration", "T5Config", _pairs, KEYWORD, **_T5)
_add("bart", "BartForConditionalGeneration", "BartConfig", _pairs, KEYWORD, **_BART, **_PLACES)
_add("marian", "MarianMTModel", "MarianConfig", _pairs, KEYWORD, **_MARIAN)
_add("llama", "LlamaForCausalLM", "LlamaConfig", _text, ROPE, **_LLAMA)
_add("llama, tied", "LlamaForCausalLM", "LlamaConfig", _masked, ROPE, **_LLAMA, tie_word_embeddings=True)
_add("mixtral", "MixtralForCausalLM", "MixtralConfig", _text, ROPE, **_MIXTRAL)
_add("gemma2", "Gemma2ForCausalLM", "Gemma2Config", _text, ROPE, **_LLAMA, head_dim=16)
_add("qwen3", "Qwen3ForCausalLM", "Qwen3Config", _text, ROPE, **_LLAMA, head_dim=16)
_add("gpt-neox", "GPTNeoXForCausalLM", "GPTNeoXConfig", _text, ROPE, **_NEOX)
_add("opt", "OPTForCausalLM", "OPTConfig", _text, CONTIGUOUS, **_OPT)
_add("vit", "ViTForImageClassification", "ViTConfig", _pixels, CONTIGUOUS, **_VIT)
_add("clip", "CLIPModel", "CLIPConfig", lambda n: {**_text(n), **_pixels(n)}, "no submodule", **_CLIP)
_add("swin", "SwinForImageClassification", "SwinConfig", _pixels, "right", **_SWIN)
_add("mamba", "MambaForCausalLM", "MambaConfig", _text, WRONG, **_MAMBA)
_add("deberta", "DebertaV2ForMaskedLM", "DebertaV2Config", _text, "not tried", **_BERT)
_add("xlnet", "XLNetLMHeadModel", "XLNetConfig", _text, "not tried", **_XLNET)
_add(
    "whisper", "WhisperForConditionalGeneration", "WhisperConfig",
    lambda n: {"input_features": _random(n, 16, 64), "decoder_input_ids": _ids(n)}, KEYWORD, **_WHISPER,
)  # fmt: skip
_add(
    "wav2vec2", "Wav2Vec2ForSequenceClassification", "Wav2Vec2Config",
    lambda n: {"input_values": _random(n, 800)}, DYNAMIC, **_WAVES,
)  # fmt: skip


def _eager_mixtral() -> nn.Module:
    model = hf.MixtralForCausalLM(hf.MixtralConfig(**_MIXTRAL))
    model.set_experts_implementation("eager")
    return model


ZOO["mixtral, eager experts"] = Entry(_eager_mixtral, _text, DYNAMIC)


class Recommender(nn.Module):
    """Neural collaborative filtering."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(100, 16) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
        self.out = nn.Linear(48, 1)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        product = self.tables[0](user) * self.tables[1](item)
        mixed = self.mlp(torch.cat([self.tables[2](user), self.tables[3](item)], -1))
        return self.out(torch.cat([product, mixed], -1))


class Branch(nn.Module):
    """A branch that the data takes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.hot, self.cold, self.out = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.out(self.hot(x) if x.sum() > 0 else self.cold(x))


class Loop(nn.Module):
    """A loop whose length is in the data."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.cell, self.out = nn.Linear(16, 16), nn.GRUCell(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, count: Tensor) -> Tensor:
        hidden, x = torch.zeros(x.shape[0], 16), self.inlet(x)
        for _ in range(int(count[0])):
            hidden = self.cell(x, hidden)
        return self.out(hidden)


class Reuse(nn.Module):
    """A module that runs before and after another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice = nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 16), nn.ReLU())
        self.middle, self.out = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.twice(self.middle(self.twice(self.first(x)))))


class Dictionaries(nn.Module):
    """Dictionaries between modules, and an argument that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(16, 16), Dictionary(), nn.Linear(16, 4)

    def forward(self, x: Tensor, kind: str = "mean") -> Tensor:
        return self.out(self.second({"hidden": self.first(x), "sizes": [1, 2]}, kind)["hidden"])


class Dictionary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, state: dict[str, Any], kind: str) -> dict[str, Any]:
        return {**state, "hidden": self.inner(state["hidden"]), "kind": kind}


ZOO["recommender"] = Entry(Recommender, lambda n: {"user": torch.arange(n), "item": torch.arange(n)}, "right")
ZOO["branch"] = Entry(Branch, lambda n: {"x": _random(n, 16)}, DYNAMIC)
ZOO["loop"] = Entry(Loop, lambda n: {"x": _random(n, 16), "count": torch.full((n,), 3)}, DYNAMIC)
ZOO["reuse"] = Entry(Reuse, lambda n: {"x": _random(n, 16)}, WRONG)
ZOO["dictionaries"] = Entry(Dictionaries, lambda n: {"x": _random(n, 16)}, "right")


def first_tensor(result: Any) -> Tensor:
    """What a loss is made of."""
    if isinstance(result, Tensor):
        return result
    for name in ("logits", "logits_per_image"):
        if getattr(result, name, None) is not None:
            return getattr(result, name)
    values = result.values() if isinstance(result, dict) else result
    return first_tensor(next(value for value in values if value is not None))
