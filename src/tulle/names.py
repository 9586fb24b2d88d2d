"""`as_names`: where names are asked for, a single one stands for a list of it, whose letters are no names."""

from __future__ import annotations

from collections.abc import Iterable


def as_names(given: str | Iterable[str]) -> tuple[str, ...]:
    """Names as a tuple.

    Raises:
        TypeError: If they are none.

    Example:
        >>> as_names("encoder"), as_names(["encoder", "head"])
        (('encoder',), ('encoder', 'head'))
    """
    if not isinstance(given, Iterable):
        raise TypeError(f"tulle was given {given!r}, expected names, or one")
    return (given,) if isinstance(given, str) else tuple(given)
