"""`Held`: what this rank has of a model, under the names that it has in the whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from tulle.memory import shard_of


class Held(nn.Module):
    """A model without the parameters and buffers that live at other stages, which are on device meta here.

    Args:
        model: The whole model, whose modules stay where they are.
        only_replicas: Whether to leave out parameters that are shared out over axis `data`.
    """

    whole: nn.Module

    def __init__(self, model: nn.Module, *, only_replicas: bool = False) -> None:
        super().__init__()
        self.__dict__["whole"] = model  # past Module.__setattr__: its names must not change
        self._only_replicas = only_replicas

    def named_parameters(self, *arguments: Any, **keywords: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that this rank has, by their names in the whole model."""
        named = self.__dict__["whole"].named_parameters(*arguments, **keywords)
        return (
            (name, parameter)
            for name, parameter in named
            if not parameter.is_meta and not (self._only_replicas and shard_of(parameter) is not None)
        )

    def named_buffers(self, *arguments: Any, **keywords: Any) -> Iterator[tuple[str, Tensor]]:
        """The buffers that this rank has, by their names in the whole model."""
        named = self.__dict__["whole"].named_buffers(*arguments, **keywords)
        return ((name, buffer) for name, buffer in named if not buffer.is_meta)

    def named_modules(self, *arguments: Any, **keywords: Any) -> Any:
        """All modules of the model, those of other stages too."""
        return self.__dict__["whole"].named_modules(*arguments, **keywords)
