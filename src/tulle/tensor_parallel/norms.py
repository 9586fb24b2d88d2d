"""Norms over all features where each rank has a part of these: their means travel, a number a token each way.

    y = x / sqrt(mean(x²) + eps) · weight       of which the mean is over the features of all ranks

Between a column and a row layer, as queries and keys of OLMo 2 have them, and networks with a norm within (Wang et al.,
*Foundation Transformers*, 2022). Of torch's two classes the sums are written here; one that is written out, as
`transformers` have them, keeps its own code, in which means over the last dimension become those of all ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tulle.tensor_parallel.dataflow.means import means
from tulle.tensor_parallel.dataflow.rewriting import Rewriting
from tulle.tensor_parallel.linear import take_on
from tulle.tensor_parallel.region import Region
from tulle.tensor_parallel.splitter import Splitter


class Averaged:
    """The mean over the features of all ranks, by that over a rank's.

    Args:
        region: Whose ranks.
        share: That of this rank's features among all.
    """

    def __init__(self, region: Region, share: float) -> None:
        self._region = region
        self._share = share

    def __call__(self, mean: Tensor) -> Tensor:
        """The same on every rank; each uses it for its own features. Every rank of the axis must call it."""
        return self._region.enter(self._region.leave(mean * self._share))

    def __deepcopy__(self, memo: object) -> Averaged:
        """A copied norm's features are those of the same ranks."""
        return self


class SplitLayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` of a rank's part of the features."""

    averaged: Averaged

    def forward(self, input: Tensor) -> Tensor:
        """This rank's part of the features to that of them with a mean of 0 and a variance of 1 over all ranks'."""
        x = input.to(torch.promote_types(input.dtype, torch.float32))
        x = x - self.averaged(x.mean(-1, keepdim=True))
        x = x * torch.rsqrt(self.averaged(x.square().mean(-1, keepdim=True)) + self.eps)
        x = x if self.weight is None else x * self.weight
        return (x if self.bias is None else x + self.bias).to(input.dtype)


class SplitRMSNorm(nn.RMSNorm):
    """`nn.RMSNorm` of a rank's part of the features."""

    averaged: Averaged

    def forward(self, x: Tensor) -> Tensor:
        """This rank's part of the features to that of them with a mean square of 1 over all ranks'."""
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        y = x.to(torch.promote_types(x.dtype, torch.float32))
        y = y * torch.rsqrt(self.averaged(y.square().mean(-1, keepdim=True)) + eps)
        return (y if self.weight is None else y * self.weight).to(x.dtype)


_OF_TORCH = {nn.LayerNorm: SplitLayerNorm, nn.RMSNorm: SplitRMSNorm}


def split_norm(norm: nn.Module, features: int, to: Splitter) -> None:
    """Split a norm over so many features, of which each rank has a part."""
    own = to.own(features)
    averaged = Averaged(to.whole_region, own / features)
    if type(norm) in _OF_TORCH:
        take_on(norm, _OF_TORCH[type(norm)], averaged=averaged)
    else:
        sites = means(norm)
        Rewriting(norm, sites).apply([averaged] * len(sites))
    for name in [*norm._parameters]:
        to.cut(norm, name, dim=0)
