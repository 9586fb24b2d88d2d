"""`check_equal`: holds a model that was split against the whole one, on one batch."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tulle.comm import raise_together
from tulle.errors import ModelError
from tulle.mesh import Axis
from tulle.tensor_parallel.placement import placements

_TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4}
_COARSE = 5e-2
"""Relative, for narrower dtypes."""


@contextmanager
def check_equal(model: nn.Module, axis: Axis, sample: object) -> Iterator[None]:
    """Raise, on every rank of the axis, if a model gives other results or gradients after the body than before.

    Dropout is off. Without a sample nothing is checked.

    Raises:
        ModelError: Naming the result or the parameter with the largest relative difference.
    """
    if sample is None:
        yield
        return
    expected = _results(copy.deepcopy(model), sample)
    yield
    found = _results(model, sample)
    worst, name = max((_difference(found.get(name), value), name) for name, value in expected.items())
    dtype = next(iter(expected.values())).dtype
    tolerance = _TOLERANCES.get(dtype, _COARSE)
    error = None
    if not worst <= tolerance:
        error = ModelError(
            f"the split {type(model).__name__} differs from the whole one: {name} by {worst:.1e} relative, expected at "
            f"most {tolerance:.0e}: a factory or a move of select does not fit what that layer computes"
        )
    raise_together(error, axis, label="check of the split model")


def _results(model: nn.Module, sample: object) -> dict[str, Tensor]:
    """Outputs and whole gradients by name, of a loss that sums all outputs, each number with a weight of its own."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    output = _call(model, sample)
    tensors = [leaf for leaf in tree_leaves(_plain(output)) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    loss = sum((leaf * _weights(leaf)).sum() for leaf in tensors if leaf.requires_grad)
    kept = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    if isinstance(loss, Tensor):
        loss.backward()
    cut = placements(model)
    results = {f"output {number}": leaf.detach() for number, leaf in enumerate(tensors)}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if gradient is not None:
            dense = gradient.to_dense() if gradient.layout != torch.strided else gradient
            whole = cut[name].whole(dense, label=f"gradient of {name}") if name in cut else dense.clone()
            results[f"gradient of {name}"] = whole
        parameter.grad = kept[name]
    for module, is_training in modes.items():
        module.training = is_training
    return results


def _call(model: nn.Module, sample: object) -> Any:
    if isinstance(sample, Mapping):
        return model(**sample)
    return model(*sample) if isinstance(sample, tuple) else model(sample)


def _plain(output: Any) -> Any:
    return dict(output) if isinstance(output, Mapping) else output


def _weights(leaf: Tensor) -> Tensor:
    return torch.cos(torch.arange(leaf.numel(), dtype=leaf.dtype, device=leaf.device)).view(leaf.shape)


def _difference(found: Tensor | None, expected: Tensor) -> float:
    if found is None or found.shape != expected.shape:
        return float("inf")
    scale = expected.abs().max().clamp_min(1e-6) if expected.numel() else torch.ones(())
    difference = ((found - expected).abs().max() / scale).item() if expected.numel() else 0.0
    return float("inf") if math.isnan(difference) else difference
