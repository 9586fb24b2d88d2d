"""Linear maps between named dimensions, the gated feed-forward layer, and the norm."""

from __future__ import annotations

from collections.abc import Sequence

from tulle.named.dims import Dim, as_dims
from tulle.named.module import Module, ones, param
from tulle.named.norms import rms_norm
from tulle.named.pointwise import gelu
from tulle.named.tensor import Tensor


class Linear(Module):
    """`x w + b`, from some dimensions to others.

    Args:
        inputs: Dimensions that are summed over.
        outputs: Dimensions that come instead.
        bias: Whether to add one.
    """

    def __init__(self, inputs: Dim | Sequence[Dim], outputs: Dim | Sequence[Dim], *, bias: bool = True) -> None:
        super().__init__()
        self.inputs, outputs = as_dims(inputs), as_dims(outputs)
        self.weight = param(*self.inputs, *outputs, inputs=self.inputs)
        self.bias = param(*outputs, std=0.0) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Map the input dimensions to the output dimensions."""
        y = x.dot(self.weight, self.inputs)
        return y if self.bias is None else y + self.bias


class GLU(Module):
    """A feed-forward layer whose inner values are gated: `(gelu(x u) * (x v)) w`.

    Source: Shazeer, *GLU Variants Improve Transformer* (2020).
    """

    def __init__(self, d_model: Dim, d_ff: Dim) -> None:
        super().__init__()
        self.d_model, self.d_ff = d_model, d_ff
        self.gate, self.up = param(d_model, d_ff), param(d_model, d_ff)
        self.down = param(d_ff, d_model)

    def forward(self, x: Tensor) -> Tensor:
        """From `d_model` to `d_model`."""
        inner = gelu(x.dot(self.gate, self.d_model)) * x.dot(self.up, self.d_model)
        return inner.dot(self.down, self.d_ff)


class Norm(Module):
    """RMS norm with a gain."""

    def __init__(self, over: Dim) -> None:
        super().__init__()
        self.over = over
        self.gain = ones(over)

    def forward(self, x: Tensor) -> Tensor:
        """Scale to a root mean square of the gain."""
        return rms_norm(x, self.over, self.gain)
