"""`Dim` and `Layout`: a tensor dimension with a name, and the rules that say which is split over which mesh axis.

Source: Shazeer et al., *Mesh-TensorFlow* (NeurIPS 2018), section 3: a layout is a map from dimensions to mesh axes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple, Protocol

import torch

from tulle.errors import ModelError, PlanError

_declared: set[str] = set()
"""Names of this process's dimensions: a rule that nearly names one is a slip."""


class _NameAndSize(NamedTuple):
    name: str
    size: int


class Dim(_NameAndSize):
    """A tensor dimension: a name and a size.

    Example:
        >>> d_ff = Dim("d_ff", 2048)
        >>> d_ff, d_ff.size
        (d_ff=2048, 2048)

    Raises:
        ModelError: If the name is no text, or the size not a positive integer.
    """

    __slots__ = ()

    def __new__(cls, name: str, size: int) -> Dim:
        """Make one, and remember its name."""
        if not isinstance(name, str) or not name:
            raise ModelError(f"a dimension was given the name {name!r}, expected text: tn.Dim('batch', 32)")
        if not isinstance(size, int | torch.SymInt) or isinstance(size, bool) or size < 1:
            raise ModelError(f"dimension {name!r} was given size {size!r}, expected a positive integer")
        _declared.add(name)
        return super().__new__(cls, name, size)

    def __repr__(self) -> str:
        return f"{self.name}={self.size}"

    def resized(self, size: int) -> Dim:
        """The dimension of the same name with another size, as a micro-batch's or a padded one."""
        return Dim(self.name, size)


Dims = tuple[Dim, ...]


def dims(**sizes: int) -> Dims:
    """Declare dimensions by name and size, in the order given.

    Raises:
        ModelError: If a size is not a positive integer.

    Example:
        >>> batch, length = dims(batch=32, length=128)
        >>> batch.name, length.size
        ('batch', 128)
    """
    return tuple(Dim(name, size) for name, size in sizes.items())


def as_dims(given: Dim | Iterable[Dim]) -> Dims:
    """One dimension or several, as a tuple.

    Raises:
        ModelError: If something else is given, such as a name.
    """
    if isinstance(given, Dim):
        return (given,)
    if isinstance(given, str) or not isinstance(given, Iterable):
        check_dim(given)
    several = tuple(given)
    for one in several:
        check_dim(one)
    return several


def check_dim(given: object) -> None:
    """Refuse what is no dimension.

    Raises:
        ModelError: Saying what was given.
    """
    if not isinstance(given, Dim):
        raise ModelError(f"{given!r} was given as a dimension, expected the dimension itself, as tn.dims gives it")


def check_once(dims: Sequence[Dim], what: str) -> None:
    """Refuse dimensions of which one name comes twice.

    Raises:
        ModelError: Naming all of them.
    """
    names = [dim.name for dim in dims]
    if len(set(names)) < len(names):
        raise ModelError(f"{what} {spelled(dims)} has one name twice: rename one of the two first")


def volume(dims: Iterable[Dim]) -> int:
    """Entries of a tensor of some dimensions."""
    entries = 1
    for dim in dims:
        entries *= dim.size
    return entries


def united(*several: Dims) -> Dims:
    """All dimensions of several tensors, each once, in the order in which they come.

    Raises:
        ModelError: If one name comes with two sizes.
    """
    sizes: dict[str, Dim] = {}
    for one in several:
        for dim in one:
            known = sizes.setdefault(dim.name, dim)
            if known.size != dim.size:
                raise ModelError(
                    f"dimension {dim.name!r} has size {known.size} in one tensor of the operation and {dim.size} in "
                    "another: give one of them another name, or cut it to the other's size"
                )
    return tuple(sizes.values())


def spelled(wanted: Iterable[Dim]) -> str:
    """Dimensions for an error text: `(batch=32, length=128)`."""
    return f"({', '.join(map(repr, wanted))})"


class Layout:
    """Which dimension is split over which mesh axis, or axes, as rules `dimension:axis` or `dimension:axis+axis`.

    A rule whose dimension or axis does not occur is ignored, so that one set of rules serves every model and mesh. A
    rule that nearly names one that does is an error, once the layout is put to use.

    Args:
        rules: Text such as `"batch:data, heads:model"` or `"batch:data+model"`, or a mapping of names.

    Raises:
        PlanError: If a rule cannot be read or a dimension has two.

    Example:
        >>> layout = Layout("batch:data+pod, heads:model, d_ff:model")
        >>> layout["heads"], layout["batch"], layout.axes_of("batch")
        ('model', 'data+pod', ('data', 'pod'))
    """

    __slots__ = ("_rules",)

    def __init__(self, rules: str | Mapping[str, str] = "") -> None:
        if not isinstance(rules, str | Mapping):
            raise PlanError(f"a layout was made of {rules!r}, expected text such as 'batch:data, heads:model'")
        pairs = _parsed(rules) if isinstance(rules, str) else list(rules.items())
        self._rules: dict[str, str] = {}
        for name, given in pairs:
            axes = sorted(_axes_in(name, given))
            rule = self._rules.setdefault(name, "+".join(axes))
            if rule != "+".join(axes):
                raise PlanError(
                    f"the layout splits dimension {name!r} over {rule!r} and over {given!r}: "
                    f"a dimension has one rule; '{name}:{rule}+{given}' splits it over both"
                )

    @classmethod
    def of(cls, given: Layout | str | Mapping[str, str] | Chosen) -> Layout:
        """The layout itself, made of its rules, or that of an explanation or of what `tn.best_layout` has found."""
        found: Any = getattr(given, "layout", given)
        return found if isinstance(found, Layout) else cls(found)

    def axes_of(self, name: str) -> tuple[str, ...]:
        """The axes over which a dimension is split together, in the order of the alphabet: the mesh's own holds."""
        rule = self._rules.get(name)
        return tuple(rule.split("+")) if rule else ()

    def __getitem__(self, name: str) -> str:
        return self._rules[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rules)

    def items(self) -> Iterable[tuple[str, str]]:
        """The rules as pairs of a dimension's name and its axis, or its axes joined by `+`."""
        return self._rules.items()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self._rules == other._rules

    def __hash__(self) -> int:
        return hash(frozenset(self._rules.items()))

    def __repr__(self) -> str:
        return f"Layout({str(self)!r})"

    def __str__(self) -> str:
        return ", ".join(f"{name}:{rule}" for name, rule in self._rules.items())

    def check_spelling(self, axes: Iterable[str]) -> None:
        """Refuse rules that nearly name a declared dimension or an axis of the mesh.

        Raises:
            PlanError: Naming the rule, and what it should probably say.
        """
        axes = list(axes)
        for name, rule in self._rules.items():
            words = [("dimension", name, _declared), *[("axis", axis, axes) for axis in self.axes_of(name)]]
            for what, word, known in words:
                near = [] if word in known else get_close_matches(word, sorted(known), n=1, cutoff=0.8)
                if near:
                    raise PlanError(
                        f"the layout's rule '{name}:{rule}' names the {what} {word!r}, which is not there, but "
                        f"{near[0]!r} is: correct the name, or leave the rule out"
                    )


class Chosen(Protocol):
    """What has chosen a layout."""

    @property
    def layout(self) -> Layout:
        """The layout."""
        ...


def _parsed(rules: str) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for rule in filter(None, (rule.strip() for rule in rules.replace(";", ",").split(","))):
        name, colon, axis = (word.strip() for word in rule.partition(":"))
        if not (name and colon and axis) or ":" in axis:
            raise PlanError(f"the layout's rule {rule!r} is not of the form 'dimension:axis'")
        pairs.append((name, axis))
    return pairs


def _axes_in(name: str, rule: str) -> list[str]:
    axes = [axis.strip() for axis in rule.split("+")] if isinstance(rule, str) else []
    if not axes or not all(axes) or len(set(axes)) < len(axes):
        raise PlanError(f"the layout's rule '{name}:{rule}' must name one axis, or several joined by '+', each once")
    return axes
