"""Layers and models in named dimensions: programs as a user would write them, of which any layout can be asked."""

from tulle.named.layers.attention import Attention, RelativeBias
from tulle.named.layers.decoding import beam_search
from tulle.named.layers.experts import Experts
from tulle.named.layers.linear import GLU, Linear, Norm
from tulle.named.layers.transformer import Block, EncoderDecoder, LanguageModel, Widths
from tulle.named.layers.wrapping import wrap

__all__ = [
    "GLU",
    "Attention",
    "Block",
    "EncoderDecoder",
    "Experts",
    "LanguageModel",
    "Linear",
    "Norm",
    "RelativeBias",
    "Widths",
    "beam_search",
    "wrap",
]
