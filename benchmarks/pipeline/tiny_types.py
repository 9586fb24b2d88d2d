"""Every type of text model in `transformers` that one recipe makes tiny, by what configurations call their numbers."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from torch import nn
from transformers.models.auto import modeling_auto as auto

WORDS = 96
_FAMILIES = (
    auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)
TYPES: dict[str, str | tuple[str, ...]] = {
    kind: names for family in reversed(_FAMILIES) for kind, names in sorted(family.items())
}
"""The model's class of each type; of one that is in several families, in that which comes first."""
SINGLE = ("inkling2_text", "mra", "xglm")
"""Types with numbers or kernels of single precision in their code."""
_MOST_NUMBERS = 20_000_000
_NUMBERS = {
    96: "vocab_size vocab_size_per_layer_input",
    64: "max_position_embeddings n_positions n_ctx max_seq_len",
    48: "intermediate_size ffn_dim d_ff d_inner n_inner hidden_dim encoder_ffn_dim decoder_ffn_dim ffn_hidden_size",
    32: "hidden_size n_embd d_model dim model_dim embedding_size emb_dim lru_width",
    24: "moe_intermediate_size shared_expert_intermediate_size",
    8: "head_dim d_kv d_head global_head_dim linear_key_head_dim linear_value_head_dim hidden_size_per_layer_input "
    "mamba_d_state mamba_d_head mamba_n_heads mamba_chunk_size state_size attention_window_size",
    4: "num_hidden_layers n_layer n_layers num_layers num_attention_heads n_head n_heads num_heads "
    "encoder_attention_heads decoder_attention_heads num_linear_attention_heads linear_num_value_heads "
    "num_experts num_local_experts n_routed_experts rotary_dim sliding_window",
    2: "encoder_layers decoder_layers num_decoder_layers num_key_value_heads num_global_key_value_heads "
    "linear_num_key_heads num_kv_shared_layers num_experts_per_tok type_vocab_size eos_token_id",
    1: "n_shared_experts n_group topk_group first_k_dense_replace mamba_n_groups bos_token_id",
    0: "pad_token_id num_nextn_predict_layers",
}
_CHANCES = (
    "hidden_dropout_prob attention_probs_dropout_prob attention_dropout resid_pdrop embd_pdrop attn_pdrop "
    "hidden_dropout dropout activation_dropout dropout_rate residual_dropout layerdrop encoder_layerdrop "
    "decoder_layerdrop speech_encoder_layerdrop moe_token_dropout classifier_dropout router_jitter_noise"
)
"""What is drawn would differ between this program's two trainings."""
_SMALL: dict[str, float] = {name: number for number, names in _NUMBERS.items() for name in names.split()}
_SMALL |= dict.fromkeys(_CHANCES.split(), 0.0)
_SHORT = ("mlp_layer_types", "layers_block_type", "block_types", "attention_layers")
"""Lists with an entry a layer."""
_LATENT = ("head_dim", "d_head")
"""Of attention over a latent, whose parts have sizes of their own."""


class Untried(Exception):  # noqa: N818 - it is no error
    """The recipe does not make that type, or not so small that it could be tried."""


def tiny_model(kind: str) -> nn.Module:
    """A model of a type, with random weights, in double precision unless its code has numbers of another.

    Raises:
        Untried: If the recipe does not lead to one.
    """
    names = TYPES[kind]
    model_class = getattr(hf, names if isinstance(names, str) else names[0])
    try:
        config = _tiny(model_class.config_class)
        torch.manual_seed(0)
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in model_class(config).parameters())
    except Exception as error:
        raise Untried(f"{type(error).__name__}: {error}") from error
    if size > _MOST_NUMBERS:
        raise Untried(f"{size:,} parameters")
    model = model_class(config).train()
    return model if kind in SINGLE else model.double()


def _tiny(config_class: type[Any]) -> Any:
    given = config_class().to_dict()
    numbers = _small(given)
    if isinstance(given.get("text_config"), dict):
        inner = type(config_class().text_config)
        numbers["text_config"] = inner(**_small(inner().to_dict())).to_dict()
    config = config_class(**numbers)
    config.use_cache = False
    for one in (config, getattr(config, "text_config", None)):
        if one is not None:
            one._attn_implementation = one._experts_implementation = "eager"
    if not hasattr(config, "decoder_start_token_id"):
        config.decoder_start_token_id = 1
    return config


def _small(given: dict[str, Any]) -> dict[str, Any]:
    small: dict[str, Any] = {name: number for name, number in _SMALL.items() if name in given}
    small |= {name: given[name][:4] for name in _SHORT if isinstance(given.get(name), list)}
    if isinstance(given.get("layer_types"), list):
        kinds = list(dict.fromkeys(given["layer_types"]))
        small["layer_types"] = [kinds[layer % len(kinds)] for layer in range(4)]
    return {name: number for name, number in small.items() if "kv_lora_rank" not in given or name not in _LATENT}
