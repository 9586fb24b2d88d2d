"""Tensor parallelism: layers whose work and weights are split over an axis, each class by its own rule."""

from tulle.tensor_parallel import alike, hugging_face, torch_layers
from tulle.tensor_parallel.clip import clip_grad_norm_, gradient_norm
from tulle.tensor_parallel.convert import apply, enabled, known
from tulle.tensor_parallel.loss import cross_entropy
from tulle.tensor_parallel.placement import Placement, guard_parts, placements, state_of_parts
from tulle.tensor_parallel.registry import register
from tulle.tensor_parallel.splitter import Splitter

__all__ = [
    "Placement",
    "Splitter",
    "alike",
    "apply",
    "clip_grad_norm_",
    "cross_entropy",
    "enabled",
    "gradient_norm",
    "guard_parts",
    "hugging_face",
    "known",
    "placements",
    "register",
    "state_of_parts",
    "torch_layers",
]
