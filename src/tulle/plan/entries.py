"""`refuse_unknown`: an entry of a plan's JSON that no plan has, a misspelt one say, is not dropped in silence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from tulle.errors import PlanError


def refuse_unknown(parsed: Mapping[str, Any], kind: type, besides: Iterable[str] = ()) -> None:
    """Check that JSON has no entries but those of a dataclass.

    Args:
        parsed: From JSON.
        kind: The dataclass.
        besides: Names of other entries that may be there.

    Raises:
        PlanError: Naming the first that is none.

    Example:
        >>> from tulle.plan import Memory
        >>> refuse_unknown({"recompute": ["h.0"]}, Memory)
    """
    known = {one.name for one in fields(kind)} | {*besides}
    unknown = sorted({*parsed} - known)
    if unknown:
        raise PlanError(f"{unknown[0]!r} is no entry of a {kind.__name__}: it has {', '.join(sorted(known))}")
