"""What a norm gives, a softmax, or an activation that is trained, of heads and features of which a rank has a part."""

from __future__ import annotations

from torch import nn

from tulle.tensor_parallel.dataflow.flow import Frame
from tulle.tensor_parallel.dataflow.lasts import looks_at_last_alone
from tulle.tensor_parallel.dataflow.means import is_over
from tulle.tensor_parallel.dataflow.products import softened
from tulle.tensor_parallel.dataflow.sources import forward_of
from tulle.tensor_parallel.dataflow.values import Heads, Known, Parts, Value


def of_norm(frame: Frame, module: nn.Module, value: Value) -> Value | None:
    """What one of them gives of each head, or of features; None for other modules."""
    flow = frame.flow
    if type(module) is nn.Softmax and (found := softened(value, Known(module.dim))) is not None:
        flow.decided[id(module), "dim"] = module.dim
        return found
    is_of_each = _is_of_each_head(frame, module, value) if isinstance(value, Heads) else _is_trained_activation(module)
    if isinstance(value, Heads | Parts) and is_of_each:
        _, layers = flow.norms.get(id(module), (module, frozenset()))
        flow.norms[id(module)] = module, layers | value.layers
        return Parts(value.layers) if isinstance(value, Parts) else value
    if isinstance(value, Parts) and _is_of_all(frame, module, value):
        flow.wide_norms[id(module)] = module, value.layers
        return Parts(value.layers)
    return None


def _is_trained_activation(module: nn.Module) -> bool:
    """Whether a module treats each number by itself, and what is trained in it is for all of them."""
    is_known = type(module) is nn.PReLU or type(module).__module__ == "transformers.activations"
    return is_known and {parameter.numel() for parameter in module.parameters()} == {1}


def _is_of_all(frame: Frame, module: nn.Module, parts: Parts) -> bool:
    """Whether a module is a norm of as many features as layers give, which is used once."""
    features = {frame.flow.columns[layer].features for layer in parts.layers}
    return len(features) == 1 and id(module) not in frame.flow.wide_norms and is_over(module, features.pop())


def _is_of_each_head(frame: Frame, module: nn.Module, heads: Heads) -> bool:
    """Whether a module is a norm of as many features as a head has."""
    widths = {frame.flow.columns[layer].head_width for layer in heads.layers}
    widths_of = {(width,) for width in widths}
    shapes = {tuple(parameter.shape) for parameter in module.parameters()}
    is_torchs = type(module).__module__.startswith("torch.")
    if is_torchs and not (isinstance(module, nn.LayerNorm | nn.RMSNorm) and {module.normalized_shape} == widths_of):
        return False
    forward = None if is_torchs else forward_of(module)
    is_norm = is_torchs or (
        forward is not None and "Norm" in type(module).__name__ and looks_at_last_alone(forward, type(module))
    )
    return is_norm and len(widths) == 1 and (shapes == widths_of or not shapes)
