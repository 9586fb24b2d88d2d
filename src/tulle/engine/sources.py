"""`Sources`: which lookups of a model take their ids from its batch as they lie there, learned by watching.

In the first steps every lookup tells its own rows when it comes. Meanwhile each is compared with the batch's tensors,
by memory and not by content: `model.words(batch["source"][:, :-1])` takes all but the last column of one of them.
What was so in two steps, on all ranks, is taken to stay so: from then on the rows of all these lookups travel at once,
as soon as the batch is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path

from tulle.comm import gather_values
from tulle.mesh import Axis

_STEPS_WATCHED = 2
_LABEL = "where lookups take their ids"


@dataclass(frozen=True, slots=True)
class Source:
    """Where ids lie in a batch.

    Args:
        leaf: Of the tensor the place in the batch, as its keys and numbers say it: a mask that some batches have and
            others have not, on one rank alone too, moves no other tensor.
        cuts: Of each of its dimensions, how much the ids leave out at the beginning and at the end; None for all of it.
        picks: The one index that they take in a dimension, by dimension; -1 for the last of several.
    """

    leaf: str
    cuts: tuple[tuple[int, int], ...] | None = None
    picks: tuple[tuple[int, int], ...] = ()

    def ids(self, leaves: Mapping[str, Tensor]) -> Tensor:
        """The ids in another batch."""
        found = leaves[self.leaf]
        if self.cuts is None:
            return found
        for dimension, (begin, end) in enumerate(self.cuts):
            size = found.shape[dimension]  # of a short batch nothing may be left, as in `ids[:, 2:]`
            found = found.narrow(dimension, min(begin, size), max(0, size - begin - end))
        for dimension, index in reversed(self.picks):
            size = found.shape[dimension]
            if not -size <= index < size:  # so there are no ids; a lookup that has some says what to do
                return found.new_zeros(0)
            found = found.select(dimension, index)
        return found


def integer_leaves(batch: object) -> dict[str, Tensor]:
    """The tensors of a batch that can hold ids, by place, in the order of its structure."""
    return {
        keystr(path): leaf
        for path, leaf in tree_flatten_with_path(batch)[0]
        if isinstance(leaf, Tensor) and not leaf.is_floating_point() and not leaf.is_complex()
    }


def locate(ids: Tensor, leaves: Mapping[str, Tensor]) -> Source | None:
    """Where ids lie in a batch, or None if they were computed, or lie there in a way that is not known.

    Example:
        >>> import torch
        >>> batch = torch.arange(12).view(3, 4)
        >>> locate(batch[:, :-1], {"[0]": batch})
        Source(leaf='[0]', cuts=((0, 0), (0, 1)), picks=())
        >>> locate(batch[:, 1], {"[0]": batch}).ids({"[0]": torch.arange(8).view(2, 4)}).tolist()
        [1, 5]
        >>> locate(batch[:, -1], {"[0]": batch}).ids({"[0]": torch.arange(10).view(2, 5)}).tolist()
        [4, 9]
        >>> locate(batch[:, 2:], {"[0]": batch}).ids({"[0]": torch.arange(3).view(3, 1)}).shape
        torch.Size([3, 0])
        >>> locate(batch[:2], {"[0]": batch[:1]}) is None
        True
        >>> locate(batch[:2].flatten(), {"[0]": batch}) is None
        True
    """
    for place, leaf in leaves.items():
        if leaf.untyped_storage().data_ptr() != ids.untyped_storage().data_ptr() or not leaf.numel():
            continue
        is_whole = ids.numel() == leaf.numel() and ids.is_contiguous() and leaf.is_contiguous()
        if is_whole and ids.storage_offset() == leaf.storage_offset():
            return Source(place)
        found = _cut(ids, leaf, place)
        if found is not None:
            same = found.ids(leaves)
            lies = (same.storage_offset(), same.shape, same.stride())
            if lies == (ids.storage_offset(), ids.shape, ids.stride()):
                return found
    return None


def _cut(ids: Tensor, leaf: Tensor, place: str) -> Source | None:
    """Ids as a part of a tensor, if each of their dimensions is one of its own, told by its stride."""
    offset = int(ids.storage_offset()) - int(leaf.storage_offset())
    strides = [int(stride) for stride in leaf.stride()]
    if offset < 0 or len(set(strides)) < len(strides) or any(stride not in strides for stride in ids.stride()):
        return None
    sizes = dict(zip(ids.stride(), ids.shape, strict=True))
    begins = dict.fromkeys(strides, 0)
    for stride in sorted(strides, reverse=True):
        begins[stride], offset = divmod(offset, stride) if stride else (0, offset)
    cuts: list[tuple[int, int]] = []
    picks: list[tuple[int, int]] = []
    for dimension, stride in enumerate(strides):
        if stride in sizes:
            left = leaf.shape[dimension] - begins[stride] - sizes[stride]
            if left < 0:  # they reach past the batch, or are rows of it that were laid flat
                return None
            cuts.append((begins[stride], left))
        else:
            cuts.append((0, 0))
            # What is last is taken for `ids[:, -1]`: that batches were of one length so far says nothing of the next.
            is_last = 0 < begins[stride] == leaf.shape[dimension] - 1
            picks.append((dimension, -1 if is_last else begins[stride]))
    return Source(place, tuple(cuts), tuple(picks))


Pattern = dict[int, list[Source | None]]
"""The sources of each table's lookups in a step, in their order, by number of the table."""


class Sources:
    """Watches the lookups of steps that begin with a batch.

    Args:
        axis: Whose ranks must agree.
    """

    def __init__(self, axis: Axis) -> None:
        self.pattern: Pattern | None = None
        """What was learned, None as long as it is being learned."""
        self._axis = axis
        self._leaves: dict[str, Tensor] | None = None
        self._copies: dict[str, Tensor] = {}
        """Of the leaves, as they were when they would have been told."""
        self._seen: Pattern = {}
        self._watched: list[Pattern] = []

    def watch(self, batch: object) -> None:
        """A step begins with a batch. Every rank must call it."""
        if self.pattern is None and len(self._watched) == _STEPS_WATCHED:
            self._learn()
        if self.pattern is None:
            self._leaves, self._seen = integer_leaves(batch), {}
            self._copies = {place: leaf.clone() for place, leaf in self._leaves.items()}

    def ids(self, batch: object) -> dict[int, Tensor]:
        """What the lookups that were learned will look up in a batch, by number of the table."""
        if not self.pattern:
            return {}
        leaves = integer_leaves(batch)
        if any(source is not None and source.leaf not in leaves for some in self.pattern.values() for source in some):
            return {}  # a batch of another kind
        found: dict[int, Tensor] = {}
        for number, sources in sorted(self.pattern.items()):
            parts = [source.ids(leaves) for source in sources if source is not None]
            if parts:
                found[number] = parts[0] if len(parts) == 1 else torch.cat([part.reshape(-1) for part in parts])
        return found

    def tables(self) -> list[int]:
        """Numbers of the tables of which `ids` knows something."""
        return [number for number, sources in sorted((self.pattern or {}).items()) if any(sources)]

    def holds(self, table: int, lookup: int) -> bool:
        """Whether the ids of a lookup, counted from the beginning of the step, are among those of `ids`."""
        sources = (self.pattern or {}).get(table, [])
        return lookup < len(sources) and sources[lookup] is not None

    def note(self, table: int, ids: Tensor) -> None:
        """A lookup whose gradient will be wanted."""
        if self._leaves is not None:
            source = locate(ids, self._leaves)
            is_same = source is not None and torch.equal(source.ids(self._copies).reshape(-1), ids.reshape(-1))
            self._seen.setdefault(table, []).append(source if is_same else None)

    def end(self) -> None:
        """Keep what was seen of the step, whose lookups are over."""
        if self._leaves is not None and self._seen:  # else it was no step, but an evaluation say
            self._watched.append(self._seen)
        self._leaves, self._copies = None, {}

    def _learn(self) -> None:
        first, *others = self._watched
        stable = first if all(other == first for other in others) else {}
        heard = gather_values(stable, self._axis, label=_LABEL)
        self.pattern = heard[0] if all(other == heard[0] for other in heard) else {}
