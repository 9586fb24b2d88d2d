"""`PieceStates`: the state of an optimizer that is sharded, by piece; who asks for a whole parameter's is told."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import Any

from torch import Tensor
from torch._guards import CompileContext

from tulle.errors import ModelError


class PieceStates(defaultdict[Tensor, Any]):
    """What an optimizer keeps on this rank. A copy or a pickle would step whole parameters with none of it: refused.

    Args:
        state: What there is.
        cut: Parameters of which each rank has a piece, or none.
    """

    def __init__(self, state: dict[Tensor, Any], cut: Collection[object]) -> None:
        super().__init__(dict, state)
        self._cut = cut

    def __getitem__(self, parameter: Tensor) -> Any:
        self._check(parameter)
        return super().__getitem__(parameter)

    def __contains__(self, parameter: object) -> bool:
        self._check(parameter)
        return super().__contains__(parameter)

    def get(self, parameter: Any, default: Any = None) -> Any:
        """As of a dictionary."""
        self._check(parameter)
        return super().get(parameter, default)

    def pop(self, parameter: Any, *default: Any) -> Any:
        """As of a dictionary."""
        self._check(parameter)
        return super().pop(parameter, *default)

    def setdefault(self, parameter: Any, default: Any = None) -> Any:
        """As of a dictionary."""
        self._check(parameter)
        return super().setdefault(parameter, default)

    def __setitem__(self, parameter: Tensor, value: Any) -> None:
        self._check(parameter)
        super().__setitem__(parameter, value)

    def __delitem__(self, parameter: Tensor) -> None:
        self._check(parameter)
        super().__delitem__(parameter)

    def __reduce__(self) -> Any:
        if any(isinstance(key, Tensor) for key in self):
            raise ModelError(
                "an optimizer was to be copied or pickled, but its state is sharded over the ranks, so a copy would "
                "step whole parameters as if it had none: have every rank call optimizer.state_dict(), of all, and "
                "give it to load_state_dict of a new optimizer; or leave shard_optimizer out"
            )
        return defaultdict, (dict, {**self})

    def _check(self, parameter: object) -> None:
        is_asked_by_compiler = CompileContext.current_compile_id() is not None
        if isinstance(parameter, Tensor) and parameter in self._cut and not is_asked_by_compiler:
            raise ModelError(
                f"optimizer.state was asked for that of a parameter of shape {list(parameter.shape)}, but it is "
                "sharded over the ranks: each has a piece's, or none. Have every rank call optimizer.state_dict(), "
                "which has that of the whole, and load_state_dict, which takes it; or leave shard_optimizer out"
            )
