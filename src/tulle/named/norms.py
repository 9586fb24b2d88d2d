"""Layer and RMS normalization over a named dimension."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tulle.named.dims import Dim
from tulle.named.reduction import mean
from tulle.named.tensor import Tensor


def rms_norm(tensor: Tensor, over: Dim, gain: Tensor | None = None, *, eps: float = 1e-6) -> Tensor:
    """Scale to a root mean square of 1 over a dimension, then by a gain.

    Source: Zhang and Sennrich, *Root Mean Square Layer Normalization* (NeurIPS 2019).
    """
    place = tensor.place(over, "rms_norm")
    if tensor.scope.is_whole(over) and place == len(tensor.dims) - 1:
        scaled = tensor.map(lambda local: F.rms_norm(local, local.shape[-1:], eps=eps))
    else:
        scaled = tensor * (mean(tensor.map(torch.square), over) + eps).map(torch.rsqrt)
    return scaled if gain is None else scaled * gain


def layer_norm(
    tensor: Tensor, over: Dim, gain: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5
) -> Tensor:
    """Shift and scale to a mean of 0 and a variance of 1 over a dimension, then by a gain and a bias.

    Source: Ba, Kiros and Hinton, *Layer Normalization* (2016).
    """
    place = tensor.place(over, "layer_norm")
    if tensor.scope.is_whole(over) and place == len(tensor.dims) - 1:
        scaled = tensor.map(lambda local: F.layer_norm(local, local.shape[-1:], eps=eps))
    else:
        centred = tensor - mean(tensor, over)
        scaled = centred * (mean(centred.map(torch.square), over) + eps).map(torch.rsqrt)
    scaled = scaled if gain is None else scaled * gain
    return scaled if bias is None else scaled + bias
