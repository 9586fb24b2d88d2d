"""`LeftBehind`: the attributes and buffers of a model's modules in which forwards were seen to leave something."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from tulle.pipeline.attributes import own_attributes
from tulle.pipeline.kept import Attributes
from tulle.pipeline.placeholder import Placeholder
from tulle.pipeline.remembered import ABSENT, Remembered
from tulle.pipeline.stale import Buffers

Key = tuple[int, Hashable]
"""The identity of the dictionary that holds something, and its name there."""


@dataclass(slots=True, eq=False)
class Spot:
    """Where something may be left.

    Args:
        holder: The dictionary that holds it: a module's attributes, or its buffers.
        name: It has there.
        path: Of the module from the model, for errors.
        is_common: Whether all ranks have it; a placed module may keep things that only its own rank has.
    """

    holder: dict[Any, Any]
    name: Hashable
    path: str
    is_common: bool

    @property
    def label(self) -> str:
        """How the user calls it."""
        return f"{self.path}.{self.name}" if self.path else str(self.name)

    def now(self) -> Remembered:
        """What is there."""
        return Remembered(self.holder.get(self.name, ABSENT))


Walk = dict[Key, tuple[Spot, Remembered]]


class LeftBehind:
    """Where forwards of one model leave something.

    Args:
        between: Its modules that are not placed, nor within such, by name.
        placed: Those that are, by name.
    """

    def __init__(self, between: Mapping[str, nn.Module], placed: Mapping[str, nn.Module]) -> None:
        self._between, self._placed = between, placed
        self.buffers = Buffers(between, placed)
        self._before: Walk = {}
        self._drawn: dict[Any, Any] = {}
        self._is_whole = False
        self.spots: dict[Key, tuple[Spot, Remembered]] = {}
        """With what was there before the step at hand left something for the first time."""
        self.seen, self.tried = set[object](), set[object]()
        """Step functions that have run once, and those whose first micro-batch has run alone."""
        self.clashing = set[object]()
        """Step functions that set some of it after their backward."""

    @property
    def is_left(self) -> bool:
        """Whether anything was left that all ranks have."""
        return any(spot.is_common for spot, _ in self.spots.values())

    def follow(self, unit: str, attributes: Attributes) -> None:
        """Have a placed module tell what it leaves for all to see.

        Args:
            unit: Its name.
            attributes: Its own.
        """
        attributes.note = partial(self._note, unit, attributes)

    def begin(self, generators: Sequence[Any] = (), *, is_whole: bool) -> None:
        """What is there now is what a forward begins with.

        Args:
            generators: Of random numbers, not the model's, that are left where they stand by whoever draws.
            is_whole: Whether placed modules are looked at, too.
        """
        self._is_whole = is_whole
        self._before = self._walk()
        self._drawn = {f"the {type(one).__name__} that is drawn from ({n})": one for n, one in enumerate(generators)}
        for name in self._drawn:
            spot = Spot(self._drawn, name, "", is_common=True)
            self.spots[id(self._drawn), name] = spot, spot.now()
        self.buffers.begin()

    def look(self) -> None:
        """A forward is over, or waits: find what it has set."""
        for key, (spot, there) in self._walk().items():
            if key not in self.spots:
                before = self._before[key][1] if key in self._before else Remembered(ABSENT)
                if not there.is_like(before):
                    self.spots[key] = spot, before
        self.buffers.look()

    def end(self) -> None:
        """Let go of what was seen."""
        self._before = {}
        self.buffers.end()
        self.spots = {
            key: (spot, Remembered(ABSENT)) for key, (spot, _) in self.spots.items() if spot.holder is not self._drawn
        }

    def _note(self, unit: str, attributes: Attributes, path: str, module: nn.Module, name: str) -> None:
        holder = vars(module)
        known = self.spots.get((id(holder), name))
        if known is None or not known[0].is_common:
            whole = ".".join(filter(None, (unit, path)))
            for spot in (Spot(holder, name, whole, True), Spot(attributes.shown, (path, name), whole, False)):
                self.spots[id(spot.holder), spot.name] = spot, spot.now()

    def _walk(self) -> Walk:
        found: Walk = {}
        known: dict[int, Remembered] = {}  # one configuration hangs on many modules

        def see(holder: dict[Any, Any], names: Iterable[str], path: str, *, is_common: bool) -> None:
            for name in names:
                value = holder[name]
                there = known.get(id(value)) or known.setdefault(id(value), Remembered(value))
                found[id(holder), name] = Spot(holder, name, path, is_common), there

        for path, module in self._between.items():
            see(vars(module), own_attributes(module), path, is_common=True)
            see(module._buffers, module._buffers, path, is_common=True)
        for unit, placed in self._placed.items() if self._is_whole else ():
            for path, module in placed.named_modules(prefix=unit):
                names = [name for name, value in own_attributes(module).items() if _is_set_between(value)]
                see(vars(module), names, path, is_common=False)
        return found


def _is_set_between(value: object) -> bool:
    """Whether code between modules may have put a value on a placed module, which has others of its own."""
    return isinstance(value, Placeholder | int | float | complex | str | type(None))
