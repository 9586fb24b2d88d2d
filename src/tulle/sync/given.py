"""What is asked of a gradient that users give: it lies where its axis' collectives take it, and its indices fit."""

from __future__ import annotations

import torch
from torch import Tensor

from tulle.errors import GradientError
from tulle.mesh import Axis
from tulle.rows import RowSparse


def check_device(grad: RowSparse | Tensor, axis: Axis, *, by: str) -> None:
    """Refuse a gradient on a device that the axis' backend does not take; gloo takes those of GPUs too.

    Raises:
        GradientError: On this rank alone.
    """
    device = grad.device if isinstance(grad, Tensor) else grad.values.device
    if device != axis.device and (device.type != "cuda" or axis.device.type != "cpu"):
        raise GradientError(
            f"{by} was given a gradient on device {device}, but axis {axis.name!r} reduces on {axis.device}: "
            f"move it there, with tensor.to({str(axis.device)!r})"
        )


def check_indices(grad: RowSparse | Tensor, *, by: str) -> None:
    """Refuse a sparse gradient with an index out of range: torch makes such tensors without a word.

    Where it lies on a GPU, the host waits for it.

    Raises:
        GradientError: On this rank alone.
    """
    if isinstance(grad, RowSparse):
        RowSparse(grad.indices, grad.values, grad.num_rows)
    elif grad.layout == torch.sparse_coo:
        try:
            torch.sparse_coo_tensor(grad._indices(), grad._values(), grad.shape, check_invariants=True)
        except RuntimeError as error:
            raise GradientError(f"{by} was given a sparse tensor with an index out of range: {error}") from error
