"""Linear layers split over an axis: by output features (columns of the transposed weight), or by input features.

    column      x on every rank  ->  own part of the features of x Wᵀ + b
    row         own part of the features of x  ->  x Wᵀ, summed over ranks, + b

A row layer takes what a column layer gives, with anything elementwise in between, and nothing travels there. Source:
Shoeybi et al., *Megatron-LM* (2019), section 3.

These are classes that an existing layer takes on, as `fully_shard` does: the object, its hooks and its names stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as hooks

from tulle.comm import eager
from tulle.derived import derived, put_before
from tulle.errors import ModelError
from tulle.tensor_parallel.casting import like
from tulle.tensor_parallel.placement import gather_uneven, length_on
from tulle.tensor_parallel.region import Region

_REGIONS = "_tulle_regions"
"""The attribute by which a module holds the regions that its own parameters enter, by their names in it."""


class Column(nn.Module):
    """What a layer that holds a part of its output features adds to the layer's class."""

    region: Region | None
    """What the input enters; None where a module around this one has seen to it."""
    gathered: int | None
    """The number of all features, if they are gathered on every rank; None if they stay split."""

    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        """`[..., in_features]`, the same on every rank, to this rank's part of the features, or all of them."""
        (given,) = (*inputs, *named.values())  # a linear layer has one input
        region = self.region
        features = super().forward(region.enter(given) if region else given)
        if self.gathered is None or region is None:
            return features
        axis = region.axis
        lengths = [length_on(rank, self.gathered, axis.size) for rank in range(axis.size)]
        if features.shape[-1] != lengths[axis.rank]:
            raise ModelError(
                f"{region.label} gives {features.shape[-1]} features where a rank's part of it has "
                f"{lengths[axis.rank]}: its weight is another than the one that was split, as by "
                "torch.func.functional_call with whole tensors; leave it out, with select or Plan.tensor_parallel"
            )
        return gather_uneven(features, lengths, axis, features.dim() - 1, label=region.label)


class RowLinear(nn.Linear):
    """`nn.Linear` that holds a part of its input features."""

    region: Region
    is_cast: bool
    """Whether it brings its weight to the dtype of its input."""

    def forward(self, input: Tensor) -> Tensor:
        """This rank's part of the features to `[..., out_features]`, the same on every rank."""
        total = self.region.leave(functional.linear(input, like(self.weight, input, is_cast=self.is_cast)))
        return total if self.bias is None else total + self.bias.to(total.dtype)  # autocast has made it narrow


class RowTransposed(nn.Module):
    """What a layer with a weight `[in_features, out_features]` (`Conv1D` of transformers) adds when it is split so."""

    region: Region
    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        """This rank's part of the features to `[..., out_features]`, the same on every rank."""
        total = self.region.leave(x @ self.weight)
        return total if self.bias is None else total + self.bias.to(total.dtype)  # autocast has made it narrow


class SharedRows(nn.Module):
    """What a layer adds whose weight is whole on every rank, each of which needs some output features.

    Keys and values of grouped queries are so where there are fewer of them than ranks. The gradient is summed over
    the ranks, each of which has that of its own rows.
    """

    rows: slice
    is_cast: bool
    """Whether it brings its weight to the dtype of its input."""
    weight: Tensor
    bias: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        """`[..., in_features]` to the features `rows`."""
        weight = like(self.weight[self.rows], input, is_cast=self.is_cast)
        bias = None if self.bias is None else like(self.bias[self.rows], input, is_cast=self.is_cast)
        return functional.linear(input, weight, bias)


def take_on(module: nn.Module, added: type[nn.Module], *, inside: bool = False, **attributes: Any) -> None:
    """Have a module be of a class that adds something to its own, with some attributes.

    Args:
        module: The module.
        added: What it takes on: it calls, or replaces, what the module's own class does.
        inside: Whether the module's own class calls it instead.
        attributes: What it needs.
    """
    own = type(module)
    if issubclass(added, own):
        first, second, name = added, own, added.__name__
    else:
        first, second = (own, added) if inside else (added, own)
        name = f"{first.__name__}{second.__name__}"
    kind = derived(first, second, name=name, module=__name__, given=own)
    module.__dict__.update(attributes)  # past Module.__setattr__, which is for parameters, buffers and submodules
    object.__setattr__(module, "__class__", kind)
    _watch_places()


@cache
def _watch_places() -> None:
    """Look at what is put in the place of split layers from now on."""
    hooks.register_module_module_registration_hook(_check_adapter)


@eager
def _check_adapter(owner: nn.Module, name: str, module: nn.Module | None) -> None:
    """Refuse an adapter around a layer that takes or gives parts of features: its gradients would be of these alone.

    Raises:
        ModelError: Naming both.
    """
    layer = owner._modules.get(name)
    if module is None or layer is None or not _sees_parts(layer) or all(one is not layer for one in module.modules()):
        return
    own = {id(parameter) for parameter in layer.parameters()}
    if any(id(parameter) not in own for parameter in module.parameters()):
        raise ModelError(
            f"a {type(module).__name__} with parameters of its own was put around {name!r} of a "
            f"{type(owner).__name__}, as an adapter (LoRA) is, but that layer is split, and sees a rank's part of the "
            "features: leave the module around it out, with select or of Plan.tensor_parallel"
        )


def _sees_parts(layer: nn.Module) -> bool:
    """Whether what is around a layer knows that it takes, or gives, a rank's part of the features."""
    is_column = isinstance(layer, Column) and layer.gathered is None
    return is_column or isinstance(layer, RowLinear | RowTransposed | SharedRows)


def is_transposed(module: nn.Module) -> bool:
    """Whether a linear layer keeps its weight as `[in_features, out_features]`, as `Conv1D` of transformers does."""
    return type(module).__name__ == "Conv1D" and not isinstance(module, nn.Linear)


def outputs_of(linear: nn.Module) -> int:
    """How many features a linear layer gives, by its weight: a rank's own once it is split."""
    return linear.get_parameter("weight").shape[1 if is_transposed(linear) else 0]


def inputs_of(linear: nn.Module) -> int:
    """How many it takes."""
    return linear.get_parameter("weight").shape[0 if is_transposed(linear) else 1]


class _Summed(nn.Module):
    """What a module gains whose parameters are whole on every rank, each of which uses them for a part of the work."""

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """As before; what this use of the parameters adds to their gradients is summed, and no penalty of them is."""
        entered = _entered(self)
        try:
            return super().forward(*arguments, **keywords)
        finally:
            self._parameters.update(entered)


@eager
def _entered(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Have the parameters of a module enter their regions; give these as they were."""
    regions: Mapping[str, Region] = module.__dict__[_REGIONS]
    before = {name: module._parameters.get(name) for name in regions}
    for name, parameter in before.items():
        if parameter is not None:
            module._parameters[name] = regions[name].enter(parameter)  # pyright: ignore[reportArgumentType]
    return before


def summed_over(module: nn.Module, names: Iterable[str], region: Region) -> None:
    """Sum what a module's forward adds to the gradients of some of its own parameters over the ranks.

    Each of these has a part of it. Every rank must call it.
    """
    regions = module.__dict__.setdefault(_REGIONS, {})
    regions |= dict.fromkeys(names, replace(region, sequence_dim=None))
    if not isinstance(module, _Summed):
        put_before(_Summed, module)
