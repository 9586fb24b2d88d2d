"""Layers of classes that nobody knows by name, whose forward is that of a layer of torch, or calls nothing but it.

class Linear(nn.Linear):                                      # as often for the sake of other first values
    def reset_parameters(self): ...

class ScaledWordEmbedding(nn.Embedding):                      # of BART and many others
    def forward(self, ids):
        return super().forward(ids) * self.scale
"""

from __future__ import annotations

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from tulle.tensor_parallel.casting import writes_out_linear
from tulle.tensor_parallel.readers import is_used_past_forward, may_read, names_in_forward
from tulle.tensor_parallel.registry import Kind, register_kind
from tulle.tensor_parallel.torch_layers import split_embedding, split_linear


def is_linear(module: nn.Module) -> bool:
    """Whether a module is an `nn.Linear` by another name: it has the same parameters, and the same forward."""
    if not _has_only(module, nn.Linear, "weight", "bias"):
        return False
    return type(module).forward is nn.Linear.forward or writes_out_linear(module)


def is_table(module: nn.Module) -> bool:
    """Whether a module looks up as `nn.Embedding` does, and does something with what it finds, perhaps."""
    if not _has_only(module, nn.Embedding, "weight"):
        return False
    kind = type(module)
    if kind.forward is nn.Embedding.forward:
        return True
    names = names_in_forward(kind)  # which calls the class by its name if it calls it past super()
    calls_it = {"super", "forward"} <= names and "Embedding" not in names
    return calls_it and not may_read(kind, "weight") and not is_used_past_forward(kind, "forward")


def _has_only(module: nn.Module, kind: type[nn.Module], *names: str) -> bool:
    return (
        isinstance(module, kind)
        and not type(module).__module__.startswith("torch.")  # whose modules read each other's parameters
        and not isinstance(module, LazyModuleMixin)
        and tuple(module._parameters) == names
        and not module._modules
        and "forward" not in vars(module)
        and type(module).__call__ is nn.Module.__call__
    )


register_kind(Kind(is_linear, split_linear, is_alone=True))
register_kind(Kind(is_table, split_embedding, is_alone=True))
