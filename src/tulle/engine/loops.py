"""Whether a loop through `tulle.lookahead` is under way in this process: for who measures what a script does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_under_way: list[object] = []


@contextmanager
def looking_ahead() -> Iterator[None]:
    """Within this context such a loop is under way.

    Example:
        >>> with looking_ahead():
        ...     is_looking_ahead()
        True
        >>> is_looking_ahead()
        False
    """
    this = object()
    _under_way.append(this)
    try:
        yield
    finally:
        _under_way.remove(this)


def is_looking_ahead() -> bool:
    """Whether a loop through `tulle.lookahead` is under way."""
    return bool(_under_way)
