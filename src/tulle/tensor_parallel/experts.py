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

from tulle.errors import ModelError
from tulle.tensor_parallel.registry import Kind, register_kind, register_names
from tulle.tensor_parallel.splitter import Splitter

_PLAIN = {"has_post_expert_norm": False, "_is_expert_parallel": False}
"""What experts that can be split say of themselves."""
_TOLD = ("has_bias", "is_concatenated", "is_transposed")
"""What else they tell."""
_GIVEN = ("hidden_states", "top_k_weights", "routing_weights")
"""Names of what experts are given that has a gradient: tokens, and by either name the weights of their results."""


def are_experts(module: Any) -> bool:
    """Whether a module is of a class that says to be experts that can be split."""
    is_told = hasattr(type(module).forward, "__wrapped__") and all(hasattr(module, name) for name in _TOLD)
    if not is_told or any(getattr(module, name, None) is not value for name, value in _PLAIN.items()):
        return False
    names = [_up(module), "down_proj"]
    if module.has_bias:
        names = [name for one in names for name in (one, f"{one}_bias")]
    return [*module._parameters] == names and len(_given(module)) == 2


def split_experts(experts: Any, to: Splitter) -> None:
    """Each expert by its inner features, whose gate and up may lie in turns (GPT-OSS): `g0 u0 g1 u1 | g2 u2 g3 u3`.

    Raises:
        ModelError: If features that lie in turns do not divide evenly.
    """
    features, inputs = (2, 1) if experts.is_transposed else (1, 2)
    inner, up = experts.down_proj.shape[inputs], _up(experts)
    if experts.has_gate and not experts.is_concatenated and inner % to.axis.size:
        raise ModelError(
            f"{to.name} has experts of {inner} inner features, whose gate and up lie in turns, and which do not divide "
            f"among the {to.axis.size} ranks of axis {to.axis.name!r}: use an axis whose size divides {inner}, or "
            "leave the module out with select"
        )
    sections = [inner, inner] if experts.has_gate and experts.is_concatenated else None
    to.enter(experts, whole=_given(experts))
    to.cut(experts, up, dim=features, sections=sections)
    to.cut(experts, f"{up}_bias", dim=1, sections=sections)
    to.cut(experts, "down_proj", dim=inputs)
    to.added_once(experts, "down_proj_bias")
    for activation in experts.children():  # which may be trained
        to.summed(activation)
    to.leave(experts)
    if hasattr(experts, "intermediate_dim"):
        experts.intermediate_dim = experts.down_proj.shape[inputs]


def split_llama4_experts(experts: Any, to: Splitter) -> None:
    """Llama 4's, whose weights lie as `[experts, inputs, features]`, and which are given each expert's own tokens."""
    inner = experts.down_proj.shape[1]
    to.enter(experts, "hidden_states")
    to.cut(experts, "gate_up_proj", dim=2, sections=[inner, inner])
    to.cut(experts, "down_proj", dim=1)
    to.leave(experts)


def _given(experts: nn.Module) -> list[str]:
    arguments = inspect.signature(experts.forward).parameters
    return [name for name in _GIVEN if name in arguments]


def _up(experts: nn.Module) -> str:
    return "gate_up_proj" if getattr(experts, "has_gate", True) else "up_proj"


register_names({"transformers.models.llama4.modeling_llama4.Llama4TextExperts": split_llama4_experts}, {})
register_kind(Kind(are_experts, split_experts, is_alone=False))
