"""`Known`: which parameters must stay whole, and which layers apart, by all of a model's code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from tulle.tensor_parallel.dataflow.callers import callers
from tulle.tensor_parallel.groups import Group
from tulle.tensor_parallel.readers import is_used_past_forward, may_read, read_past
from tulle.tensor_parallel.registry import factory_of, is_alone
from tulle.tensor_parallel.splitter import has_own_keys, has_plain_rows

_TOGETHER = 4
"""Layers that are split together may be smaller by this, all of them, than one that is split by itself."""


@dataclass(frozen=True, slots=True)
class Known:
    """What a model's code says of its layers.

    Args:
        held: Parameters that must stay whole, by identity.
        apart: Layers that are not split together with others, by identity.
        callers: By identity of a module, whose code calls it past the one that has it.
    """

    held: set[int] = field(default_factory=set)
    apart: set[int] = field(default_factory=set)
    callers: Mapping[int, set[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module) -> Known:
        """Look at a model, not split yet."""
        return cls(held_by_unknown(model), _apart(model), callers(model))

    def allows(self, group: Group, module: nn.Module, smallest_bytes: int) -> bool:
        """Whether layers in a module, which can be split together by what its forward does, may be, and are to be.

        A quarter of the size is enough at which a layer by itself is: of attention a third of the numbers travel for
        each that is held, and of a feed-forward network a sixth, as between its layers none do.
        """
        parameters = [own for layer in group.layers for own in layer.parameters()]
        is_apart = not self.apart.isdisjoint(map(id, (*group.layers, *group.wide)))
        if is_apart or any(id(own) in self.held for own in parameters):
            return False
        is_called = any(self._is_called(one, module) for one in (*group.layers, *group.between))
        return not is_called and _TOGETHER * sum(own.nbytes for own in parameters) >= smallest_bytes

    def _is_called(self, layer: nn.Module, module: nn.Module) -> bool:
        """Whether other code than a module's calls a layer in it, or what has the layer."""
        around = (
            one for one in module.modules() if one is not module and any(layer is inner for inner in one.modules())
        )
        return any(self.callers.get(id(one), {id(module)}) - {id(module)} for one in around)


def held_by_unknown(model: nn.Module) -> set[int]:
    """Identities of parameters that must stay whole, and of all that layers tied to them have.

    They are those of modules that no factory can split, and what the model's code reads past its layer. Such a layer
    can not be split unasked, nor can one that is tied to it. What a module only has a second name for is not held:
    heads of BERT's kind give the bias of their output layer a name of their own, which forward does not read.
    """
    whole = (module for module in model.modules() if factory_of(module) is None or is_bound_to_stay(module))
    held = {
        id(own)
        for module in whole
        for name, own in module.named_parameters(recurse=False)
        if not only_names(module, name)
    } | set(map(id, read_past(model)))
    layers = [{id(own) for own in module.parameters()} for module in model.modules() if is_alone(module)]
    while tied := [layer for layer in layers if layer & held and not layer <= held]:
        held = held.union(*tied)
    return held


def only_names(module: nn.Module, name: str) -> bool:
    """Whether a module of no known class has a parameter of that name, and its forward does not read it."""
    return factory_of(module) is None and not may_read(type(module), name)


def is_bound_to_stay(module: nn.Module) -> bool:
    """Whether a module of a known class cannot be split unasked, for what it is made with, or computes."""
    return (
        (isinstance(module, nn.Embedding) and not has_plain_rows(module))
        or (isinstance(module, nn.MultiheadAttention) and has_own_keys(module))
        or ("forward" in vars(module) and is_alone(module))
    )


def _apart(model: nn.Module) -> set[int]:
    """Identities of layers that are not split together with others.

    Code calls them past the forward of the module that has them, or reads a parameter of theirs, or they share one with
    another layer, which may be split another way.
    """
    layers = [module for module in model.modules() if not module._modules]
    counts = Counter(id(parameter) for layer in layers for parameter in layer._parameters.values())
    past = {
        id(child)
        for module in model.modules()
        for name, child in module._modules.items()
        if child is not None and is_used_past_forward(type(module), name)
    }
    tied = {
        id(one) for one in layers if any(counts[id(own)] > 1 for own in one._parameters.values() if own is not None)
    }
    read = {*map(id, read_past(model))}
    told = {id(one) for one in layers if any(id(own) in read for own in one._parameters.values())}
    return tied | past | told
