"""`Dim` and `Layout`: a tensor dimension with a name, and the rules that say which is split over which mesh axis.

Source: Shazeer et al., *Mesh-TensorFlow* (NeurIPS 2018), section 3: a layout is a map from dimensions to mesh axes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import NamedTuple

from tulle.errors import ModelError, PlanError

_declared: set[str] = set()
"""Names given to `dims` in this process: a rule that nearly names one is a slip."""


class Dim(NamedTuple):
    """A tensor dimension: a name and a size.

    Example:
        >>> d_ff = Dim("d_ff", 2048)
        >>> d_ff, d_ff.size
        (d_ff=2048, 2048)
    """

    name: str
    size: int

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
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ModelError(f"dimension {name!r} was given size {size!r}, expected a positive integer")
    _declared.update(sizes)
    return tuple(Dim(name, size) for name, size in sizes.items())


def as_dims(given: Dim | Iterable[Dim]) -> Dims:
    """One dimension or several, as a tuple."""
    return (given,) if isinstance(given, Dim) else tuple(given)


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
    """Which dimension is split over which mesh axis, as rules `dimension:axis`.

    A rule whose dimension or axis does not occur is ignored, so that one set of rules serves every model and mesh. A
    rule that nearly names one that does is an error, once the layout is put to use.

    Args:
        rules: Text such as `"batch:data, heads:model"`, or a mapping of names.

    Raises:
        PlanError: If a rule cannot be read or a dimension has two.

    Example:
        >>> layout = Layout("batch:data, heads:model, d_ff:model")
        >>> layout, layout["heads"]
        (Layout('batch:data, heads:model, d_ff:model'), 'model')
    """

    __slots__ = ("_axis_of",)

    def __init__(self, rules: str | Mapping[str, str] = "") -> None:
        pairs = _parsed(rules) if isinstance(rules, str) else list(rules.items())
        self._axis_of: dict[str, str] = {}
        for name, axis in pairs:
            if self._axis_of.setdefault(name, axis) != axis:
                raise PlanError(
                    f"the layout splits dimension {name!r} over axes {self._axis_of[name]!r} and {axis!r}: "
                    "a dimension is split over one axis at most"
                )

    def get(self, name: str) -> str | None:
        """The axis over which a dimension is split, or None."""
        return self._axis_of.get(name)

    def __getitem__(self, name: str) -> str:
        return self._axis_of[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._axis_of)

    def items(self) -> Iterable[tuple[str, str]]:
        """The rules as pairs of a dimension's and an axis' name."""
        return self._axis_of.items()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self._axis_of == other._axis_of

    def __hash__(self) -> int:
        return hash(frozenset(self._axis_of.items()))

    def __repr__(self) -> str:
        return f"Layout({str(self)!r})"

    def __str__(self) -> str:
        return ", ".join(f"{name}:{axis}" for name, axis in self._axis_of.items())

    def check_spelling(self, axes: Iterable[str]) -> None:
        """Refuse rules that nearly name a declared dimension or an axis of the mesh.

        Raises:
            PlanError: Naming the rule, and what it should probably say.
        """
        axes = list(axes)
        for name, axis in self._axis_of.items():
            for what, word, known in (("dimension", name, _declared), ("axis", axis, axes)):
                near = [] if word in known else get_close_matches(word, sorted(known), n=1, cutoff=0.8)
                if near:
                    raise PlanError(
                        f"the layout's rule '{name}:{axis}' names the {what} {word!r}, which is not there, but "
                        f"{near[0]!r} is: correct the name, or leave the rule out"
                    )


def _parsed(rules: str) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for rule in filter(None, (rule.strip() for rule in rules.replace(";", ",").split(","))):
        name, colon, axis = (word.strip() for word in rule.partition(":"))
        if not (name and colon and axis):
            raise PlanError(f"the layout's rule {rule!r} is not of the form 'dimension:axis'")
        pairs.append((name, axis))
    return pairs
