"""Layer and RMS normalization over named dimensions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from tulle.named.dims import Dim, united
from tulle.named.placed import shared_scope
from tulle.named.reduction import mean
from tulle.named.summation import reduced
from tulle.named.tensor import Tensor


def rms_norm(tensor: Tensor, over: Dim | Sequence[Dim], gain: Tensor | None = None, *, eps: float = 1e-6) -> Tensor:
    """Scale to a root mean square of 1 over a dimension, or over several together, then by a gain.

    Source: Zhang and Sennrich, *Root Mean Square Layer Normalization* (NeurIPS 2019).
    """
    last = _last(tensor, over, "rms_norm", gain)
    if last:
        local = tensor.local
        scaled = tensor.with_part(F.rms_norm(local, local.shape[-last:], eps=eps))
    else:
        scaled = tensor * (mean(tensor.map(torch.square), over) + eps).map(torch.rsqrt)
    return scaled if gain is None else scaled * gain


def layer_norm(
    tensor: Tensor,
    over: Dim | Sequence[Dim],
    gain: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
) -> Tensor:
    """Shift and scale to a mean of 0 and a variance of 1 over a dimension, or several, then by a gain and a bias.

    Source: Ba, Kiros and Hinton, *Layer Normalization* (2016).
    """
    last = _last(tensor, over, "layer_norm", gain, bias)
    if last:
        local = tensor.local
        scaled = tensor.with_part(F.layer_norm(local, local.shape[-last:], eps=eps))
    else:
        centred = tensor - mean(tensor, over)
        scaled = centred * (mean(centred.map(torch.square), over) + eps).map(torch.rsqrt)
    scaled = scaled if gain is None else scaled * gain
    return scaled if bias is None else scaled + bias


def _last(tensor: Tensor, over: Dim | Sequence[Dim], what: str, *after: Tensor | None) -> int:
    """How many dimensions torch's kernel takes: all of them, if they are whole and come last; else none.

    Raises:
        ModelError: If the tensor lacks one of them, or what comes after does not fit: before anything is sent.
    """
    places, _, axes = reduced(tensor, over, what)
    given = [one for one in after if one is not None]
    if given:
        scope = shared_scope(given, what)
        scope.axes(united(tensor.dims, *[one.dims for one in given]), f"{what} of")
    if axes or tensor.scope.trace is not None:
        return 0
    count, dims = len(places), len(tensor.dims)
    return count if places == [dims - 1] or sorted(places) == list(range(dims - count, dims)) else 0
