"""`LateState`: an optimizer's state of which updates wait; whoever asks for that of a parameter has its update done."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from torch import Tensor

from tulle.engine.late_tensors import LateParameter


class LateState(defaultdict[Tensor, Any]):
    """What an optimizer keeps, by parameter. A copy or a pickle is what torch's optimizers have.

    Args:
        state: What there is.
        make_all_true: Has all updates done.
    """

    def __init__(self, state: dict[Tensor, Any], make_all_true: Callable[[], None]) -> None:
        super().__init__(dict, state)
        self._make_all_true = make_all_true

    def as_it_is(self, parameter: Tensor) -> dict[str, Any]:
        """What is kept of a parameter by the updates that were done."""
        return dict.get(self, parameter) or {}

    def __getitem__(self, parameter: Tensor) -> Any:
        _make_true(parameter)
        return super().__getitem__(parameter)

    def __contains__(self, parameter: object) -> bool:
        _make_true(parameter)
        return super().__contains__(parameter)

    def get(self, parameter: Any, default: Any = None) -> Any:
        """As of a dictionary."""
        _make_true(parameter)
        return super().get(parameter, default)

    def pop(self, parameter: Any, *default: Any) -> Any:
        """As of a dictionary."""
        _make_true(parameter)
        return super().pop(parameter, *default)

    def setdefault(self, parameter: Any, default: Any = None) -> Any:
        """As of a dictionary."""
        _make_true(parameter)
        return super().setdefault(parameter, default)

    def __setitem__(self, parameter: Tensor, value: Any) -> None:
        _make_true(parameter)
        super().__setitem__(parameter, value)

    def __delitem__(self, parameter: Tensor) -> None:
        _make_true(parameter)
        super().__delitem__(parameter)

    def __len__(self) -> int:
        self._make_all_true()
        return super().__len__()

    def __iter__(self) -> Any:
        self._make_all_true()
        return super().__iter__()

    def keys(self) -> Any:
        """As of a dictionary."""
        self._make_all_true()
        return super().keys()

    def values(self) -> Any:
        """As of a dictionary."""
        self._make_all_true()
        return super().values()

    def items(self) -> Any:
        """As of a dictionary."""
        self._make_all_true()
        return super().items()

    def update(self, *others: Any, **named: Any) -> None:
        """As of a dictionary."""
        self._make_all_true()
        super().update(*others, **named)

    def clear(self) -> None:
        """As of a dictionary."""
        self._make_all_true()
        super().clear()

    def popitem(self) -> Any:
        """As of a dictionary."""
        self._make_all_true()
        return super().popitem()

    def copy(self) -> Any:
        """A plain one."""
        return defaultdict(dict, {**self})

    def __reversed__(self) -> Any:
        self._make_all_true()
        return super().__reversed__()

    def __eq__(self, other: object) -> bool:
        self._make_all_true()
        return super().__eq__(other)

    def __ior__(self, other: Any) -> Any:
        self.update(other)
        return self

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        return defaultdict(dict, other) | self.copy()

    __copy__ = copy

    def __reduce__(self) -> Any:
        return defaultdict, (dict, {**self})


def _make_true(parameter: object) -> None:
    if isinstance(parameter, LateParameter):
        parameter.make_true()
