"""Strays: tensors that hooks on modules within a placed one have left somewhere, which its own rank alone has.

`transformers` collects attention weights by such hooks, which it puts on modules when a forward is first asked for
them. A profile that sees hooks places what is around them in pieces; those that come later, or where stages are given
by hand, run within the module. What is made there is noted then, and refused where code between modules reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from tulle.comm import eager
from tulle.errors import ModelError
from tulle.pipeline.holdings import Unit
from tulle.pipeline.hooks import is_hooked
from tulle.pipeline.placeholder import is_about_shape
from tulle.pipeline.structure import flatten

_strays = WeakTensorKeyDictionary()
"""Of each tensor that was made within a module with such hooks: the placed one, and those with hooks."""


def strays_noted(function: Callable[..., Any], unit: Unit) -> Callable[..., Any]:
    """What runs a placed module, and notes what is made in it if the user has put hooks on modules within."""
    hooked = [name for name, one in unit.within if is_hooked(one)] if unit.has_inner_hooks else []
    if not hooked or unit.compiled is not None:
        return function
    where = unit.name, ", ".join(map(repr, hooked[:4])) + (", ..." if hooked[4:] else "")

    def run(*args: Any, **kwargs: Any) -> Any:
        with _Noting(where):
            return function(*args, **kwargs)

    return run


def are_strays() -> bool:
    """Whether there are any on this rank."""
    return bool(_strays)


def check_no_stray(tensor: Tensor) -> None:
    """Refuse to read between modules what one rank alone has."""
    found = _strays.get(tensor) if _strays else None
    if found is None:
        return
    name, hooked = found
    raise ModelError(
        f"code between modules reads a tensor of shape {list(tensor.shape)} that was made in module {name!r} and left "
        f"by a hook on a module within it ({hooked}): other ranks do not have it. Place the modules in {name!r} one by "
        "one (a profile does if the hook is there, or the sample asks for what it collects, as output_attentions=True "
        "and output_router_logits=True do)"
    )


class _Noting(TorchFunctionMode):
    def __init__(self, where: tuple[str, str]) -> None:
        super().__init__()
        self._where = where

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation of the module."""
        result = func(*args, **(kwargs or {}))
        if not is_about_shape(func):
            self._note(result, args)
        return result

    @eager
    def _note(self, result: Any, args: Any) -> None:
        given = {id(leaf) for leaf in flatten(args)[0]}
        for leaf in [result] if isinstance(result, Tensor) else flatten(result)[0]:
            if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter) and id(leaf) not in given:
                _strays[leaf] = self._where
