"""Named dimensions laid out over a mesh: the mathematics written once, the layout chosen afterwards."""

from tulle.named.attention import attention
from tulle.named.convolution import convolution, transposed_convolution
from tulle.named.dims import Dim, Layout, dims
from tulle.named.edges import from_local, from_torch, to_torch
from tulle.named.explain import Explanation, explain
from tulle.named.interchange import from_dtensor, load, save, to_dtensor
from tulle.named.layers.wrapping import wrap
from tulle.named.lookup import gather
from tulle.named.loss import cross_entropy
from tulle.named.module import Module, Parameter, ones, param
from tulle.named.neighbours import halo, shift
from tulle.named.norms import layer_norm, rms_norm
from tulle.named.optimizer import Adafactor, clip_grad_norm
from tulle.named.pointwise import (
    abs,
    broadcast_to,
    causal_bias,
    dropout,
    equal,
    exp,
    full,
    gelu,
    log,
    mask,
    maximum,
    minimum,
    one_hot,
    range,
    relu,
    rsqrt,
    sigmoid,
    silu,
    sqrt,
    square,
    stop_gradient,
    tanh,
    where,
    zeros,
)
from tulle.named.randomness import manual_seed
from tulle.named.rates import Rates
from tulle.named.reduction import cumsum, log_softmax, logsumexp, max, mean, min, softmax, sum
from tulle.named.repeat import recompute, serialize
from tulle.named.reshape import concat, merge, pad, slice, split, stack, unstack
from tulle.named.scope import use
from tulle.named.search import best_layout
from tulle.named.selection import argmax, sample, top_k
from tulle.named.tensor import Tensor, einsum, elementwise

__all__ = [
    "Adafactor",
    "Dim",
    "Explanation",
    "Layout",
    "Module",
    "Parameter",
    "Rates",
    "Tensor",
    "abs",
    "argmax",
    "attention",
    "best_layout",
    "broadcast_to",
    "causal_bias",
    "clip_grad_norm",
    "concat",
    "convolution",
    "cross_entropy",
    "cumsum",
    "dims",
    "dropout",
    "einsum",
    "elementwise",
    "equal",
    "exp",
    "explain",
    "from_dtensor",
    "from_local",
    "from_torch",
    "full",
    "gather",
    "gelu",
    "halo",
    "layer_norm",
    "load",
    "log",
    "log_softmax",
    "logsumexp",
    "manual_seed",
    "mask",
    "max",
    "maximum",
    "mean",
    "merge",
    "min",
    "minimum",
    "one_hot",
    "ones",
    "pad",
    "param",
    "range",
    "recompute",
    "relu",
    "rms_norm",
    "rsqrt",
    "sample",
    "save",
    "serialize",
    "shift",
    "sigmoid",
    "silu",
    "slice",
    "softmax",
    "split",
    "sqrt",
    "square",
    "stack",
    "stop_gradient",
    "sum",
    "tanh",
    "to_dtensor",
    "to_torch",
    "top_k",
    "transposed_convolution",
    "unstack",
    "use",
    "where",
    "wrap",
    "zeros",
]
