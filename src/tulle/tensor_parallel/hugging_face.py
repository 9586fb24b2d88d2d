"""How the blocks of some models of `transformers` are split; nothing of that package is imported.

Attention is split by heads and what is fused in one projection section by section; feed-forward networks and experts by
their inner features. The fewer heads of keys and values of grouped queries are split too, or, where there are fewer
than ranks, stay whole on every rank, each of which uses the one that its queries need.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from tulle.tensor_parallel.experts import split_experts
from tulle.tensor_parallel.registry import Stack, register_names
from tulle.tensor_parallel.splitter import MisfitError, Splitter
from tulle.tensor_parallel.torch_layers import split_linear


def split_gpt2_block(block: Any, to: Splitter) -> None:
    """GPT-2: queries, keys and values are fused in `c_attn`."""
    _split_gpt2_attention(block.attn, to)
    if hasattr(block, "crossattention"):
        _split_gpt2_attention(block.crossattention, to)
        to.norm(block.ln_cross_attn)
    to.enter(block.mlp, "hidden_states")
    to.column(block.mlp.c_fc)
    to.row(block.mlp.c_proj)
    to.residual_dropout(block.mlp.dropout)
    to.norm(block.ln_1)
    to.norm(block.ln_2)


def _split_gpt2_attention(attention: Any, to: Splitter) -> None:
    width = attention.embed_dim
    heads = to.heads(attention.num_heads)
    to.enter(attention, "hidden_states", whole=["encoder_hidden_states", "attention_mask", "encoder_attention_mask"])
    to.column(attention.c_attn, sections=[width] * (2 if attention.is_cross_attention else 3))
    if attention.is_cross_attention:
        to.column(attention.q_attn)
    to.row(attention.c_proj)
    to.residual_dropout(attention.resid_dropout)
    attention.num_heads, attention.split_size = heads, heads * attention.head_dim
    if attention.attn_dropout.p:
        to.own_randomness(attention, end=attention.c_proj)


def split_bert_layer(layer: Any, to: Splitter) -> None:
    """BERT and RoBERTa."""
    _split_bert_attention(layer.attention, to)
    if hasattr(layer, "crossattention"):
        _split_bert_attention(layer.crossattention, to)
    _split_bert_feed_forward(layer, to)


def _split_bert_feed_forward(layer: Any, to: Splitter) -> None:
    to.column_alone(layer.intermediate.dense, gather=False)
    _split_bert_output(layer.output, to)


def _split_bert_attention(attention: Any, to: Splitter) -> None:
    core = attention.self
    heads = to.heads(core.num_attention_heads)
    is_cross = attention.is_cross_attention
    to.enter(core, "hidden_states", whole=["attention_mask", *(["encoder_hidden_states"] if is_cross else [])])
    for linear in (core.query, core.key, core.value):
        to.column(linear)
    core.num_attention_heads, core.all_head_size = heads, heads * core.attention_head_size
    if core.dropout.p:
        to.own_randomness(core, end=core)
    _split_bert_output(attention.output, to)


def _split_bert_output(output: Any, to: Splitter) -> None:
    to.row(output.dense)
    to.residual_dropout(output.dropout)
    to.norm(output.LayerNorm)


def split_deberta_layer(layer: Any, to: Splitter) -> None:
    """DeBERTa of both versions, whose heads attend to distances as well: these are whole, and enter too."""
    core = layer.attention.self
    if getattr(core, "talking_head", False):
        raise MisfitError(
            f"{to.name} has heads that talk to each other, which cannot be split: leave it out with select"
        )
    heads = to.heads(core.num_attention_heads)
    to.enter(core, "hidden_states", whole=["attention_mask", "query_states", "rel_embeddings"])
    for child in core.children():
        if not isinstance(child, nn.Dropout):
            to.column(child)
    for name in ("q_bias", "v_bias"):
        to.cut(core, name, dim=0)
    core.num_attention_heads, core.all_head_size = heads, heads * core.attention_head_size
    if core.dropout.p:
        to.own_randomness(core, end=core)
    _split_bert_output(layer.attention.output, to)
    _split_bert_feed_forward(layer, to)


def split_t5_block(block: Any, to: Splitter) -> None:
    """T5. The first block's table of position biases, one for each head, is read by all: all blocks are split."""
    *attentions, feed_forward = block.layer
    for layer in attentions:
        _split_t5_attention(getattr(layer, "SelfAttention", None) or layer.EncDecAttention, to)
        to.residual_dropout(layer.dropout)
        to.norm(layer.layer_norm)
    dense = feed_forward.DenseReluDense
    to.enter(dense, "hidden_states")
    ups = [dense.wi] if hasattr(dense, "wi") else [dense.wi_0, dense.wi_1]
    to.hidden_dropout(dense.dropout, to.features(ups[0]))
    for linear in ups:
        to.column(linear)
    to.row(dense.wo)
    to.residual_dropout(feed_forward.dropout)
    to.norm(feed_forward.layer_norm)


def _split_t5_attention(attention: Any, to: Splitter) -> None:
    heads = to.heads(attention.n_heads)
    to.enter(attention, "hidden_states", whole=["key_value_states", "mask"])
    for linear in (attention.q, attention.k, attention.v):
        to.column(linear)
    to.row(attention.o)
    if attention.has_relative_attention_bias:
        to.cut(attention.relative_attention_bias, "weight", dim=1)
    attention.n_heads, attention.inner_dim = heads, heads * attention.key_value_proj_dim
    if attention.dropout:
        to.own_randomness(attention, end=attention.o)


def split_llama_layer(layer: Any, to: Splitter) -> None:
    """Llama, and those that are built like it."""
    _split_grouped_attention(layer.self_attn, to)
    mlp = layer.mlp
    to.enter(mlp, "x")
    to.column(mlp.gate_proj)
    to.column(mlp.up_proj)
    to.row(mlp.down_proj)
    _keep_norms(layer, to)


def split_mixtral_layer(layer: Any, to: Splitter) -> None:
    """Mixtral: every expert is split by its inner features, so ranks are equally busy whatever the router says."""
    _split_grouped_attention(layer.self_attn, to)
    to.whole_within(layer.mlp)
    split_experts(layer.mlp.experts, to)
    _keep_norms(layer, to)


def _split_grouped_attention(attention: Any, to: Splitter) -> None:
    config = attention.config
    queries, pairs, width = config.num_attention_heads, config.num_key_value_heads, attention.head_dim
    own = to.heads(queries)
    to.enter(attention, "hidden_states", whole=["attention_mask"])
    to.column(attention.q_proj)
    if pairs % to.axis.size == 0:
        to.column(attention.k_proj)
        to.column(attention.v_proj)
        pairs //= to.axis.size
    else:
        first = to.shared_head(queries, pairs)
        to.shared_rows(attention.k_proj, slice(first * width, (first + 1) * width))
        to.shared_rows(attention.v_proj, slice(first * width, (first + 1) * width))
        pairs = 1
    to.row(attention.o_proj)
    to.summed(getattr(attention, "q_norm", None))
    to.summed(getattr(attention, "k_norm", None))
    attention.num_key_value_groups = own // pairs
    if attention.attention_dropout:
        to.own_randomness(attention, end=attention.o_proj)


def split_latent_attention(attention: Any, to: Splitter) -> None:
    """DeepSeek's: of latents, which stay whole, come all heads' queries, keys and values, which are split.

    What of keys is turned by position is one for all heads, and the last of what the second latent comes with.
    """
    attention.num_heads = to.heads(attention.num_heads)
    ups = [getattr(attention, name, None) for name in ("q_b_proj", "kv_b_proj", "g_proj")]
    for linear in (ups[0] or attention.q_proj, *ups[1:]):
        if linear is not None:
            to.column_alone(linear, gather=False)
    to.last_enter(attention.kv_a_proj_with_mqa, attention.qk_rope_head_dim)
    to.row(attention.o_proj)
    if attention.attention_dropout:
        to.own_randomness(attention, end=attention.o_proj)


def split_vision_attention(attention: Any, to: Splitter) -> None:
    """Of patches of all pictures one after the other, without a dimension of samples: Qwen VL's and GLM V's."""
    attention.num_heads = to.heads(attention.num_heads)
    to.enter(attention, "hidden_states")
    to.column(attention.qkv, sections=[to.features(attention.qkv) // 3] * 3)
    to.row(attention.proj)
    for name in ("q_norm", "k_norm"):
        to.summed(getattr(attention, name, None))
    if attention.attention_dropout:
        to.own_randomness(attention, end=attention.proj)


def _keep_norms(layer: nn.Module, to: Splitter) -> None:
    for name, child in layer.named_children():
        if name not in ("self_attn", "mlp"):
            to.norm(child)


_MODELS = "transformers.models"
_LIKE_LLAMA = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2")
_CLASSES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "gemma": "Gemma",
    "gemma2": "Gemma2",
    "mixtral": "Mixtral",
}
_LATENT = {
    "axk1": "AXK1",
    "bailing_hybrid": "BailingHybrid",
    "deepseek_v2": "DeepseekV2",
    "deepseek_v3": "DeepseekV3",
    "deepseek_v32": "DeepseekV32",
    "glm4_moe_lite": "Glm4MoeLite",
    "glm_moe_dsa": "GlmMoeDsa",
    "kimi_linear": "KimiLinear",
    "minicpm3": "MiniCPM3",
    "mistral4": "Mistral4",
    "youtu": "Youtu",
}
_VISION = {
    "cohere_compass": "CohereCompass",
    "dots3_note": "Dots3Note",
    "ernie4_5_vl_moe": "Ernie4_5_VLMoe",
    "glm4v": "Glm4v",
    "glm4v_moe": "Glm4vMoe",
    "glm5_next": "Glm5Next",
    "glm_image": "GlmImage",
    "glm_ocr": "GlmOcr",
    "qwen2_5_vl": "Qwen2_5_VL",
    "qwen2_vl": "",
    "qwen3_5": "Qwen3_5",
    "qwen3_5_moe": "Qwen3_5Moe",
    "qwen3_omni_moe": "Qwen3OmniMoe",
    "qwen3_vl": "Qwen3VL",
    "qwen3_vl_moe": "Qwen3VLMoe",
    "qwen4_exp": "Qwen4Exp",
}
register_names(
    {
        f"{_MODELS}.{name}.modeling_{name}.{kind}VisionAttention": split_vision_attention
        for name, kind in _VISION.items()
    }
    | {f"{_MODELS}.{name}.modeling_{name}.{kind}Attention": split_latent_attention for name, kind in _LATENT.items()}
    | {f"{_MODELS}.longcat_flash.modeling_longcat_flash.LongcatFlashMLA": split_latent_attention}
    | {f"{_MODELS}.{name}.modeling_{name}.{_CLASSES[name]}DecoderLayer": split_llama_layer for name in _LIKE_LLAMA}
    | {
        f"{_MODELS}.mixtral.modeling_mixtral.MixtralDecoderLayer": split_mixtral_layer,
        f"{_MODELS}.gpt2.modeling_gpt2.GPT2Block": split_gpt2_block,
        f"{_MODELS}.bert.modeling_bert.BertLayer": split_bert_layer,
        f"{_MODELS}.roberta.modeling_roberta.RobertaLayer": split_bert_layer,
        f"{_MODELS}.deberta.modeling_deberta.DebertaLayer": split_deberta_layer,
        f"{_MODELS}.deberta_v2.modeling_deberta_v2.DebertaV2Layer": split_deberta_layer,
        f"{_MODELS}.sew_d.modeling_sew_d.SEWDLayer": split_deberta_layer,
        f"{_MODELS}.t5.modeling_t5.T5Block": split_t5_block,
        f"{_MODELS}.mt5.modeling_mt5.MT5Block": split_t5_block,
        f"{_MODELS}.pop2piano.modeling_pop2piano.Pop2PianoBlock": split_t5_block,
        "transformers.pytorch_utils.Conv1D": split_linear,
        f"{_MODELS}.falcon.modeling_falcon.FalconLinear": split_linear,
    },
    {f"{_MODELS}.{name}.modeling_{name}.{kind}Model": Stack("layers", ("norm",)) for name, kind in _CLASSES.items()}
    | {
        f"{_MODELS}.gpt2.modeling_gpt2.GPT2Model": Stack("h", ("ln_f",)),
        f"{_MODELS}.bert.modeling_bert.BertEncoder": Stack("layer", ()),
        f"{_MODELS}.roberta.modeling_roberta.RobertaEncoder": Stack("layer", ()),
        f"{_MODELS}.t5.modeling_t5.T5Stack": Stack("block", ("final_layer_norm",), is_one=True),
        f"{_MODELS}.mt5.modeling_mt5.MT5Stack": Stack("block", ("final_layer_norm",), is_one=True),
        f"{_MODELS}.pop2piano.modeling_pop2piano.Pop2PianoStack": Stack("block", ("final_layer_norm",), is_one=True),
    },
    alone=[
        "transformers.pytorch_utils.Conv1D",
        f"{_MODELS}.falcon.modeling_falcon.FalconLinear",
    ],
)
