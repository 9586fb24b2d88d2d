"""Experts of `transformers`, each of which is split by its inner features: ranks are equally busy whatever routers say.

    gate and up   [experts, features, inputs]   | g0 g1 g2 g3 | u0 u1 u2 u3 |      rank 0 has g0 g1 u0 u1
    down          [experts, outputs, features]  | d0 d1 d2 d3 |                    rank 0 has d0 d1; results are summed

Most of what a model has lies there. Classes are not known by name: their decorator `use_experts_implementation` has
each say how its weights lie, and one that does is computed by any of that package's kernels for experts.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from tulle.tensor_parallel.registry import Kind, register_kind, register_names
from tulle.tensor_parallel.splitter import Splitter

_PLAIN = {"has_bias": False, "has_post_expert_norm": False, "is_concatenated": True, "_is_expert_parallel": False}
"""What experts that can be split say of themselves."""


def are_experts(module: Any) -> bool:
    """Whether a module is of a class that says to be experts that can be split."""
    if not hasattr(type(module).forward, "__wrapped__") or any(
        getattr(module, name, None) is not value for name, value in _PLAIN.items()
    ):
        return False
    arguments = inspect.signature(module.forward).parameters
    return [*module._parameters] == [_up(module), "down_proj"] and {"hidden_states", "top_k_weights"} <= {*arguments}


def split_experts(experts: Any, to: Splitter) -> None:
    """Each expert by its inner features."""
    features, inputs = (2, 1) if experts.is_transposed else (1, 2)
    inner = experts.down_proj.shape[inputs]
    to.enter(experts, whole=["hidden_states", "top_k_weights"])
    to.cut(experts, _up(experts), dim=features, sections=[inner, inner] if experts.has_gate else None)
    to.cut(experts, "down_proj", dim=inputs)
    for activation in experts.children():  # which may be trained
        to.summed(activation)
    to.leave(experts)
    experts.intermediate_dim = experts.down_proj.shape[inputs]


def split_llama4_experts(experts: Any, to: Splitter) -> None:
    """Llama 4's, whose weights lie as `[experts, inputs, features]`, and which are given each expert's own tokens."""
    inner = experts.down_proj.shape[1]
    to.enter(experts, "hidden_states")
    to.cut(experts, "gate_up_proj", dim=2, sections=[inner, inner])
    to.cut(experts, "down_proj", dim=1)
    to.leave(experts)


def _up(experts: nn.Module) -> str:
    return "gate_up_proj" if getattr(experts, "has_gate", True) else "up_proj"


register_names({"transformers.models.llama4.modeling_llama4.Llama4TextExperts": split_llama4_experts}, {})
register_kind(Kind(are_experts, split_experts, is_alone=False))
