"""How the layers of `torch.nn` are split."""

from __future__ import annotations

from torch import nn

from tulle.tensor_parallel.registry import Stack, path_of, register, register_names
from tulle.tensor_parallel.splitter import Splitter


def split_linear(linear: nn.Module, to: Splitter) -> None:
    """What computes each output feature by itself: by these, gathered on every rank, right between any other layers."""
    to.column_alone(linear)


def split_embedding(embedding: nn.Embedding, to: Splitter) -> None:
    """By rows."""
    to.vocabulary(embedding)


def split_attention(attention: nn.MultiheadAttention, to: Splitter) -> None:
    """By heads."""
    to.attention(attention)


def split_encoder_layer(layer: nn.TransformerEncoderLayer, to: Splitter) -> None:
    """Attention by heads, the feed-forward network by its inner features."""
    to.attention(layer.self_attn)
    _split_feed_forward(layer, to)
    to.residual_dropout(layer.dropout1, layer.dropout2)
    layer.activation_relu_or_gelu = 0  # torch's fused inference path reads the whole layer's weights


def split_decoder_layer(layer: nn.TransformerDecoderLayer, to: Splitter) -> None:
    """Both attentions by heads, the feed-forward network by its inner features."""
    to.attention(layer.self_attn)
    to.attention(layer.multihead_attn)
    _split_feed_forward(layer, to)
    to.norm(layer.norm3)
    to.residual_dropout(layer.dropout1, layer.dropout2, layer.dropout3)


def _split_feed_forward(layer: nn.TransformerEncoderLayer | nn.TransformerDecoderLayer, to: Splitter) -> None:
    features = to.features(layer.linear1)
    to.column_alone(layer.linear1, gather=False)
    if isinstance(layer.activation, nn.Module):  # which may be trained, as PReLU is
        to.summed(layer.activation)
    to.hidden_dropout(layer.dropout, features)
    to.row(layer.linear2)
    to.norm(layer.norm1)
    to.norm(layer.norm2)


def _sequence_dim(stack: nn.Module) -> int:
    layers = stack.get_submodule("layers")
    return 1 if next(m for m in layers.modules() if isinstance(m, nn.MultiheadAttention)).batch_first else 0


register(nn.Linear, split_linear)
register(nn.Embedding, split_embedding)
register(nn.MultiheadAttention, split_attention)
register(nn.TransformerEncoderLayer, split_encoder_layer)
register(nn.TransformerDecoderLayer, split_decoder_layer)
register_names(
    {},
    {
        "torch.nn.modules.transformer.TransformerEncoder": Stack("layers", ("norm",), _sequence_dim),
        "torch.nn.modules.transformer.TransformerDecoder": Stack("layers", ("norm",), _sequence_dim),
    },
    alone=[path_of(nn.Linear), path_of(nn.Embedding)],
)
