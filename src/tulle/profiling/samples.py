"""What a sample holds: how many of them it is, and half of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tulle.pipeline.structure import Spec, flatten, rebuild


def apart(sample: object) -> tuple[list[Any], Spec]:
    """The leaves of a sample and what puts them together; a mapping of another class, a tokenizer's say, as a dict."""
    return flatten(dict(sample) if isinstance(sample, Mapping) else sample)


def samples_in(sample: object) -> int:
    """How many samples a batch is: the length of its first tensor that has dimensions, 1 if there is none.

    Example:
        >>> import torch
        >>> samples_in({"temperature": 0.5, "ids": torch.zeros(8, 32)})
        8
    """
    return _samples_in(apart(sample)[0])


def size_of(sample: object) -> int:
    """How many numbers the tensors of a batch have.

    Example:
        >>> import torch
        >>> size_of(([torch.zeros(8, 32), None], torch.zeros(8)))
        264
    """
    return sum(leaf.numel() for leaf in apart(sample)[0] if isinstance(leaf, Tensor))


def halved(sample: object) -> tuple[object, float]:
    """A sample with half of the entries along the first dimension of what has as many, and the share that is left.

    Sparse tensors have no slices, and are mostly graphs: what holds one stays whole.
    """
    leaves, spec = apart(sample)
    batch = _samples_in(leaves)
    counted = [isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == batch for leaf in leaves]
    if batch == 1 or any(one and leaf.layout != torch.strided for one, leaf in zip(counted, leaves, strict=True)):
        return sample, 1.0
    cut = [leaf[: batch // 2] if one else leaf for one, leaf in zip(counted, leaves, strict=True)]
    return rebuild(spec, cut), (batch // 2) / batch


def _samples_in(leaves: list[Any]) -> int:
    return max(1, next((len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()), 1))
