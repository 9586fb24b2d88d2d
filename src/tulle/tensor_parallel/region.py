"""`Region`: where activations that all ranks hold go into work that is split over an axis, and where they come out.

                      goes in                        comes out
    whole             f: gradients are summed        g: results are summed
    along sequences   all-gather of the sequence     reduce-scatter: each rank keeps its part of the sequence

The first is Shoeybi et al., *Megatron-LM* (2019), section 3; the second Korthikanti et al., *Reducing Activation
Recomputation in Large Transformer Models* (2022), section 4.2.2: as many bytes, but between two regions (norms,
dropout, residual sums) a rank then holds and computes only its part of each sequence.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, cat, nn

from tulle.comm import enter, gather, leave, reduce_scatter, scatter
from tulle.derived import put_before
from tulle.errors import ModelError
from tulle.mesh import Axis

_ENTRANCES = "_tulle_entrances"
"""The attribute by which a module holds where its arguments enter."""


@dataclass(frozen=True, slots=True)
class Region:
    """Some layers' work that is split over an axis.

    Args:
        axis: Whose ranks split the work.
        label: Whose work it is: counters, timeline and errors name it.
        sequence_dim: The dimension along which activations outside are split; None if they are whole on every rank.
    """

    axis: Axis
    label: str
    sequence_dim: int | None = None

    def enter(self, tensor: Tensor) -> Tensor:
        """What goes in, whole on every rank. Every rank of the axis must call it."""
        if self.sequence_dim is None:
            return enter(tensor, self.axis, label=self.label)
        return gather(tensor, self.axis, dim=self.sequence_dim, label=self.label, backward="reduce_scatter")

    def leave(self, tensor: Tensor) -> Tensor:
        """The sum of what all ranks worked out. Every rank of the axis must call it."""
        if self.sequence_dim is None:
            return leave(tensor, self.axis, label=self.label)
        return reduce_scatter(tensor, self.axis, dim=self.sequence_dim, label=self.label)

    def __deepcopy__(self, memo: object) -> Region:
        """A copied model works over the same ranks; a process group cannot be copied."""
        return self


@dataclass(frozen=True, slots=True)
class OfFirst(Region):
    """Where what is whole on every rank goes into a sum over the ranks: the first brings it, the others nothing."""

    def enter(self, tensor: Tensor) -> Tensor:
        """What goes in. Every rank of the axis must call it."""
        entered = Region.enter(self, tensor)
        return entered if self.axis.rank == 0 else 0 * entered


@dataclass(frozen=True, slots=True)
class OfHeads(Region):
    """What may have a dimension of heads, of which each rank then has its own, as masks may.

    Args:
        heads: How many there are in all.
        dim: Which dimension that is, from the end.
    """

    heads: int = 0
    dim: int = -3

    def enter(self, tensor: Tensor) -> Tensor:
        """What goes in. Every rank of the axis must call it."""
        if tensor.dim() < -self.dim or tensor.shape[self.dim] != self.heads:
            return Region.enter(self, tensor)
        if not tensor.requires_grad:
            return tensor.tensor_split(self.axis.size, self.dim)[self.axis.rank]
        return scatter(tensor, self.axis, dim=self.dim + tensor.dim(), label=self.label)


class Entrance:
    """A hook before forward: some of a module's arguments enter a region.

    Args:
        module: Whose forward names them.
        regions: By name of an argument, what it enters.
    """

    def __init__(self, module: nn.Module, regions: dict[str, Region]) -> None:
        names = list(inspect.signature(module.forward).parameters)
        self._places = {name: (names.index(name), region) for name, region in regions.items()}

    def __call__(self, _: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, Any]:
        """Replace the arguments that are tensors, or tuples or lists with tensors."""
        given = list(arguments)
        for name, (place, region) in self._places.items():
            if place < len(given):
                given[place] = _entered(given[place], region)
            elif name in keywords:
                keywords = {**keywords, name: _entered(keywords[name], region)}
        return tuple(given), keywords

    def __deepcopy__(self, memo: object) -> Entrance:
        """A copied module's arguments enter the same regions."""
        return self


class _Entering(nn.Module):
    """What a module's class gains: some arguments of its forward enter regions, after all hooks before it."""

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """As before."""
        for entrance in self.__dict__[_ENTRANCES]:
            arguments, keywords = entrance(self, arguments, keywords)
        return super().forward(*arguments, **keywords)


def enter_within(module: nn.Module, regions: dict[str, Region]) -> None:
    """Have some of a module's arguments enter a region in its forward, so that a hook before it may still change them.

    Args:
        module: Whose forward names them.
        regions: By name of an argument, what it enters.
    """
    module.__dict__.setdefault(_ENTRANCES, []).append(Entrance(module, regions))
    put_before(_Entering, module)


class Entering:
    """What a value that meets heads becomes where it is made: this rank's.

    Args:
        region: What it enters.
    """

    def __init__(self, region: OfHeads) -> None:
        self._region = region

    def __call__(self, given: Any) -> Any:
        """The same, or of its heads this rank's.

        Raises:
            ModelError: If it is no tensor of as many dimensions as what it meets, and no number.
        """
        if given is None or isinstance(given, int | float):
            return given
        if not isinstance(given, Tensor) or given.dim() > 4:
            found = f"{given.dim()} dimensions" if isinstance(given, Tensor) else f"a {type(given).__name__}"
            raise ModelError(
                f"{self._region.label}: what meets its heads is of {found}, expected a tensor of up to four, which "
                "these have: leave it out with select"
            )
        return self._region.enter(given)

    def __deepcopy__(self, memo: object) -> Entering:
        """A copied module's heads are those of the same ranks."""
        return self


def _entered(given: Any, region: Region) -> Any:
    if isinstance(given, Tensor):
        return region.enter(given)
    if type(given) in (tuple, list):
        return type(given)(_entered(one, region) for one in given)
    if isinstance(given, tuple) and hasattr(given, "_fields"):
        return type(given)(*(_entered(one, region) for one in given))
    return given


class Exit:
    """A hook after forward: what every rank worked out of a module's result is summed."""

    def __init__(self, region: Region) -> None:
        self._region = region

    def __call__(self, _module: nn.Module, _arguments: object, output: Tensor) -> Tensor:
        """Give the sum."""
        return self._region.leave(output)

    def __deepcopy__(self, memo: object) -> Exit:
        """A copied module's result leaves the same region."""
        return self


class LastEnter:
    """A hook after forward: the last features of a module's result enter a region, each rank has the others alike.

    Args:
        region: Which they enter.
        count: How many they are.
    """

    def __init__(self, region: Region, count: int) -> None:
        self._region = region
        self._count = count

    def __call__(self, _module: nn.Module, _arguments: object, output: Tensor) -> Tensor:
        """The same numbers, where the last have the sum of all ranks' gradients."""
        others, last = output.tensor_split([output.shape[-1] - self._count], -1)
        return cat([others, self._region.enter(last)], -1)

    def __deepcopy__(self, memo: object) -> LastEnter:
        """A copied module's result enters the same region."""
        return self


class Gathered:
    """A hook after forward: what each rank worked out of its own heads is given out of all.

    Args:
        region: Whose heads.
        place: Which of the results that is, of which there may be fewer; None if there is one result.
        dim: The dimension of heads, from the end.
    """

    def __init__(self, region: Region, place: int | None, dim: int) -> None:
        self._region = region
        self._place = place
        self._dim = dim

    def __call__(self, _module: nn.Module, _arguments: object, output: Any) -> Any:
        """Give the whole."""
        if self._place is None:
            return self._whole(output)
        if not isinstance(output, tuple | list) or len(output) <= self._place:
            return output
        items = [*output]
        items[self._place] = self._whole(items[self._place])
        return type(output)(items)

    def _whole(self, given: Any) -> Any:
        region = self._region
        return gather(given, region.axis, dim=self._dim, label=region.label) if isinstance(given, Tensor) else given

    def __deepcopy__(self, memo: object) -> Gathered:
        """A copied module's heads are those of the same ranks."""
        return self


class Kept(Gathered):
    """A hook after forward: what it kept as an attribute of each rank's own heads is of all.

    Args:
        region: Whose heads.
        name: Of the attribute.
        dim: The dimension of heads, from the end.
    """

    def __init__(self, region: Region, name: str, dim: int) -> None:
        super().__init__(region, None, dim)
        self._name = name

    def __call__(self, module: nn.Module, _arguments: object, _output: Any) -> None:
        """Keep the whole instead."""
        setattr(module, self._name, self._whole(getattr(module, self._name, None)))


class Sequences:
    """Hooks that split activations along sequences, and make them whole again.

    Args:
        region: Along which dimension, over which axis.
    """

    def __init__(self, region: Region) -> None:
        self._region = region

    def scatter_before(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Before forward: of its first argument, each rank keeps its part of the sequences."""
        return _on_first(self._part, module, arguments, keywords)

    def gather_before(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Before forward: its first argument is whole on every rank."""
        return _on_first(self._whole, module, arguments, keywords)

    def scatter_after(self, _module: nn.Module, _arguments: object, output: Any) -> Any:
        """After forward: of its result, or the first of several, each rank keeps its part."""
        return (self._part(output[0]), *output[1:]) if isinstance(output, tuple) else self._part(output)

    def gather_after(self, _module: nn.Module, _arguments: object, output: Any) -> Any:
        """After forward: its result, or the first of several, is whole on every rank."""
        return (self._whole(output[0]), *output[1:]) if isinstance(output, tuple) else self._whole(output)

    def _part(self, tensor: Tensor) -> Tensor:
        region = self._region
        assert region.sequence_dim is not None, "activations are split along sequences"
        return scatter(tensor, region.axis, dim=region.sequence_dim, label=region.label)

    def _whole(self, tensor: Tensor) -> Tensor:
        region = self._region
        assert region.sequence_dim is not None, "activations are split along sequences"
        return gather(tensor, region.axis, dim=region.sequence_dim, label=region.label)

    def __deepcopy__(self, memo: object) -> Sequences:
        """A copied module's sequences are split over the same ranks."""
        return self


def _on_first(
    change: Callable[[Tensor], Tensor], module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if arguments:
        return (change(arguments[0]), *arguments[1:]), keywords
    name = next(iter(inspect.signature(module.forward).parameters))
    return arguments, {**keywords, name: change(keywords[name])}
