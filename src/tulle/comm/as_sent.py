"""`as_sent`: a tensor as it travels, for whatever sends memory and knows nothing of strides, graphs or conjugates."""

from __future__ import annotations

import torch
from torch import Tensor


def as_sent(tensor: Tensor) -> Tensor:
    """The tensor itself where its numbers lie in memory as they are to come, end to end, else a copy; without a graph.

    Example:
        >>> matrix = torch.ones(2, 3)
        >>> as_sent(matrix) is matrix, as_sent(matrix.t()).is_contiguous()
        (True, True)
    """
    sent = tensor.detach() if tensor.requires_grad else tensor
    return sent.resolve_conj().resolve_neg().contiguous()


def as_bytes(sent: Tensor) -> Tensor:
    """The same memory, flat: backends do not know all dtypes (gloo no int16, say)."""
    return sent.view(-1).view(torch.uint8)
