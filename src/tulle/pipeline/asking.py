"""`Asked`: a placed module reads of an object what was not brought; it stops there, and runs again when that has come.

What it did until then is to be as if it had not been done. Its attributes and buffers are put back; but what it writes
in its arguments could not be, so that all is brought before it writes there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tulle.pipeline.placeholder import Placeholder
from tulle.traits import memory_key


class Asked(BaseException):
    """A module reads what was not brought.

    Args:
        leaf: The number of that; None for all.
    """

    def __init__(self, leaf: int | None) -> None:
        super().__init__(leaf)
        self.leaf = leaf


class AsksBeforeWriting(TorchDispatchMode):
    """Asks for all before something is written in tensors that cannot be put back.

    Args:
        tensors: These.
    """

    def __init__(self, tensors: Iterable[object]) -> None:
        super().__init__()
        there = (one for one in tensors if isinstance(one, Tensor) and not isinstance(one, Placeholder))
        self._memory = set(map(memory_key, there))

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Look at what an operation is about to write in, and let it through."""
        kwargs = kwargs or {}
        if func._schema.is_mutable and any(memory_key(one) in self._memory for one in _written(func, args, kwargs)):
            raise Asked(None)
        return func(*args, **kwargs)


def _written(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    given = [*zip(function._schema.arguments, args, strict=False)]
    given += [(argument, kwargs[argument.name]) for argument in function._schema.arguments if argument.name in kwargs]
    for argument, value in given:
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from (
                one for one in (value if isinstance(value, list | tuple) else [value]) if isinstance(one, Tensor)
            )
