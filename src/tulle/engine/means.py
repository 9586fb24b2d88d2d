"""Marks gradients that were averaged over the ranks, or will be."""

from __future__ import annotations

from torch import Tensor

MEAN = "_tulle_mean"
"""The attribute of a gradient that was averaged over the ranks: its identity, which copies of it do not have."""


def as_mean(gradient: Tensor) -> Tensor:
    """Mark a tensor as a gradient that is, or will be, the mean over the ranks."""
    setattr(gradient, MEAN, id(gradient))
    return gradient


def is_mean(gradient: Tensor | None) -> bool:
    """Whether a gradient is so marked."""
    return getattr(gradient, MEAN, None) == id(gradient)
