"""`written_back`: undoes what a trial run writes in parameters, such as those of a teacher that follows in forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tulle.parts import local_of, unwrapped, writes
from tulle.pipeline.structure import flatten
from tulle.traits import memory_key


class written_back(TorchFunctionMode):  # noqa: N801 - used like a function
    """Within it a parameter is copied before anything is written in it, and given its values back at the end.

    Args:
        model: Of whose parameters those that are only read take no memory.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._parameters: dict[int, list[nn.Parameter]] = {}
        for parameter in model.parameters():
            self._parameters.setdefault(memory_of(parameter), []).append(parameter)
        self._before: list[tuple[nn.Parameter, Tensor]] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Look at operations that write, and let everything through."""
        if writes(func):
            for leaf in flatten((args, kwargs))[0]:
                if type(leaf) is Tensor or type(leaf) is nn.Parameter:
                    written = self._parameters.pop(memory_of(leaf), ())
                    self._before += [(parameter, local_of(parameter).clone()) for parameter in written]
        return func(*args, **(kwargs or {}))

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        with torch.no_grad():
            for parameter, before in self._before:
                parameter.copy_(before)


def memory_of(tensor: Tensor) -> int:
    """What tells a tensor's memory from other memory."""
    tensor = unwrapped(tensor)  # what a transform of `torch.func` goes by says of no memory where it lies
    return memory_key(tensor)
