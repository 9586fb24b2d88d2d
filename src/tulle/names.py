"""Names that users give: a single one stands for a list of it, and a misspelt one is told beside the nearest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches


def as_names(given: str | Iterable[str]) -> tuple[str, ...]:
    """Names as a tuple.

    Raises:
        TypeError: If neither one nor several were given, or a mapping, of which no more than its keys would be heard.

    Example:
        >>> as_names("encoder"), as_names(["encoder", "head"])
        (('encoder',), ('encoder', 'head'))
    """
    if isinstance(given, Mapping) or not isinstance(given, Iterable):
        raise TypeError(f"tulle was given {given!r}, expected names, or one")
    return (given,) if isinstance(given, str) else tuple(given)


def was_meant(name: object, known: Iterable[str]) -> str:
    """What ends an error about an unknown name: a question, if a known one is near.

    Example:
        >>> was_meant("row", ["auto", "rows"]), was_meant("zen", ["auto", "rows"])
        ("; was 'rows' meant?", '')
    """
    near = get_close_matches(str(name), list(known), n=1)
    return f"; was {near[0]!r} meant?" if near else ""
