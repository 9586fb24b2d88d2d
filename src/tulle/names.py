"""Names that users give: a single one stands for a list of it, and a misspelt one is told beside the nearest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches


def as_names(given: str | Iterable[str]) -> tuple[str, ...]:
    """Names as a tuple.

    Raises:
        TypeError: If neither one nor several were given, but a class, say, or what is to be done by name.

    Example:
        >>> as_names("encoder"), as_names(["encoder", "head"])
        (('encoder',), ('encoder', 'head'))
    """
    names = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Iterable) else ()
    if isinstance(given, Mapping) or not isinstance(given, Iterable) or not all(isinstance(one, str) for one in names):
        raise TypeError(
            f"tulle was given {given!r}, expected names, or one; of modules those of named_modules(): "
            "[name for name, one in model.named_modules() if isinstance(one, nn.TransformerEncoderLayer)], say"
        )
    return names


def was_meant(name: object, known: Iterable[str]) -> str:
    """What ends an error about an unknown name: a question, if a known one is near.

    Example:
        >>> was_meant("row", ["auto", "rows"]), was_meant("zen", ["auto", "rows"])
        ("; was 'rows' meant?", '')
    """
    near = get_close_matches(str(name), list(known), n=1)
    return f"; was {near[0]!r} meant?" if near else ""
