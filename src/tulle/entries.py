"""`Entries`: an object of a plan's or profile's JSON, whose entries are checked as they are read.

Errors say where it stands, and a misspelt entry, which no plan has, is not dropped in silence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, TypeVar

from tulle.errors import PlanError, TulleError

T = TypeVar("T")
_SHOWN = 60
"""Letters of a value that an error shows."""


@dataclass(frozen=True, slots=True)
class Entries:
    """An object of JSON, whose entries are checked as they are read.

    Args:
        values: Its entries by name.
        path: Where it stands in the whole: `"tables[0]"`; empty for the whole.

    Example:
        >>> Entries({"rows": "many"}, "tables[0]").whole("rows", least=1)
        Traceback (most recent call last):
        tulle.errors.PlanError: tables[0].rows is 'many', expected a whole number from 1
    """

    values: Mapping[str, Any]
    path: str = ""

    @staticmethod
    def of(parsed: object, path: str, kind: type, besides: Iterable[str] = ()) -> Entries:
        """Those of what should be a dataclass.

        Args:
            parsed: From JSON.
            path: Where it stands.
            kind: The dataclass.
            besides: Names of other entries that may be there.

        Raises:
            PlanError: If it is not an object, or has an entry that the dataclass has not.
        """
        if not isinstance(parsed, Mapping):
            raise PlanError(f"{path or 'it'} is {_shown(parsed)}, expected an object of a {kind.__name__}")
        known = {one.name for one in fields(kind)} | {*besides}
        unknown = sorted({*parsed} - known, key=str)
        if unknown:
            where = f" at {path}" if path else ""
            raise PlanError(
                f"{unknown[0]!r}{where} is no entry of a {kind.__name__}: it has {', '.join(sorted(known))}"
            )
        return Entries(parsed, path)

    def at(self, name: str) -> str:
        """Where an entry stands in the whole JSON, as errors name it: `"tables[0].rows"`."""
        return f"{self.path}.{name}" if self.path else name

    def get(self, name: str, kind: type | tuple[type, ...], expected: str) -> Any:
        """An entry that is of some type; truth values are no numbers.

        Raises:
            PlanError: If it is not there, or is something else.
        """
        if name not in self.values:
            raise PlanError(f"{self.at(name)} is not there, expected {expected}")
        value = self.values[name]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.wrong(name, expected)
        return value

    def wrong(self, name: str, expected: str) -> PlanError:
        """What is raised of an entry that is not as it should be."""
        return PlanError(f"{self.at(name)} is {_shown(self.values[name])}, expected {expected}")

    def whole(self, name: str, *, least: int = 0, default: int | None = None) -> int:
        """A whole number that is not less than some."""
        if default is not None and name not in self.values:
            return default
        expected = f"a whole number from {least}"
        value = self.get(name, int, expected)
        if value < least:
            raise self.wrong(name, expected)
        return value

    def number(self, name: str, *, least: float = 0, most: float = math.inf) -> float:
        """A number that is not less than some, and not more than another; it is not endless."""
        expected = f"a number from {least:g}" + (f" to {most:g}" if most < math.inf else "")
        value = self.get(name, (int, float), expected)
        if not least <= value <= most or value == math.inf:
            raise self.wrong(name, expected)
        return value

    def rate(self, name: str) -> float:
        """A number above nothing: by a rate is divided."""
        value = self.get(name, (int, float), "a number above 0")
        if not 0 < value < math.inf:
            raise self.wrong(name, "a number above 0")
        return value

    def flag(self, name: str) -> bool:
        """True or false."""
        return self.get(name, bool, "true or false")

    def text(self, name: str, *, default: str | None = None) -> str:
        """A string."""
        return default if default is not None and name not in self.values else self.get(name, str, "a string")

    def list_of(self, name: str, kind: type[T]) -> tuple[T, ...]:
        """Strings, or whole numbers; none if nothing is said."""
        expected = f"a list of {'strings' if kind is str else 'whole numbers'}"
        found = self.get(name, (list, tuple), expected) if name in self.values else ()
        if not all(isinstance(one, kind) and not isinstance(one, bool) for one in found):
            raise self.wrong(name, expected)
        return tuple(found)

    def names(self, name: str) -> tuple[str, ...]:
        """Strings, for which a single one may stand."""
        given = self.values.get(name)
        return (given,) if isinstance(given, str) else self.list_of(name, str)

    def wholes(self, name: str, *, least: int = 0) -> dict[str, int]:
        """Whole numbers by name."""
        entries = self.by_name(name)
        return {key: entries.whole(key, least=least) for key in entries.values}

    def numbers(self, name: str) -> dict[str, float]:
        """Numbers by name."""
        entries = self.by_name(name)
        return {key: entries.number(key) for key in entries.values}

    def objects(self, name: str, kind: type, besides: Iterable[str] = ()) -> list[Entries]:
        """Objects that should be of a dataclass, in a list; none if nothing is said."""
        expected = f"a list of objects of a {kind.__name__}"
        found = self.get(name, (list, tuple), expected) if self.values.get(name) is not None else ()
        return [Entries.of(one, f"{self.at(name)}[{place}]", kind, besides) for place, one in enumerate(found)]

    def made(self, name: str, make: Callable[[Any], T]) -> T:
        """What is made of an entry; an error says where it stands."""
        if name not in self.values:
            raise PlanError(f"{self.at(name)} is not there")
        try:
            return make(self.values[name])
        except TulleError as error:
            raise PlanError(f"{self.at(name)}: {error}") from error
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise PlanError(f"{self.at(name)} cannot be read ({type(error).__name__}: {error})") from error

    def by_name(self, name: str, of: str = "numbers") -> Entries:
        """Those of an object that is no dataclass."""
        return Entries(self.get(name, Mapping, f"an object of {of} by name"), self.at(name))

    def within(self, name: str, kind: type) -> Entries:
        """Those of an entry that should be a dataclass."""
        return Entries.of(self.get(name, object, f"an object of a {kind.__name__}"), self.at(name), kind)

    def of_fields(self, kind: type, readers: Mapping[str, Callable[[str], Any]]) -> dict[str, Any]:
        """Values for the fields of a dataclass, by what reads each; a field that is not there has its default.

        Where the default is None, null says the same.
        """
        found: dict[str, Any] = {}
        for one in fields(kind):
            has_default = one.default is not MISSING or one.default_factory is not MISSING
            is_left_out = one.name not in self.values or (one.default is None and self.values[one.name] is None)
            if one.name in readers and not (has_default and is_left_out):
                found[one.name] = readers[one.name](one.name)
        return found


def cause(error: Exception) -> object:
    """Why a file cannot be read, without its path, which whoever tells of it names.

    Example:
        >>> cause(FileNotFoundError(2, "No such file or directory", "plan.json")), str(cause(ValueError("no JSON")))
        ('No such file or directory', 'no JSON')
    """
    return error.strerror if isinstance(error, OSError) and error.strerror else error


def finite(value: float) -> bool:
    """Whether a number is positive and not endless."""
    return 0 < value < math.inf


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
