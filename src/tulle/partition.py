"""`Partition`: which rank owns which row of a table, by arithmetic alone: no rank has to see another's rows for it.

Zen (OSDI'25, section 3.2) deals rows to owners by a hash, because real ids are skewed: in a vocabulary ordered by
frequency nearly all touched rows lie in the first contiguous part. A hash that is a bijection also gives each row a
place at its owner, so that a bitmap over places needs no list of an owner's rows (Zen, section 3.3, keeps one).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

_MULTIPLIERS = (0x2C1B3C6D, 0x297A2D39)
_HALF = 0x7FFFFFFF
_ROUND_KEYS = (0x1B873593, 0x3C6EF372, 0x5BE0CD19, 0x1F83D9AB)
_SHARING_KEY = 0x2545F491
_KEPT_ROWS = 1 << 24
"""On a GPU what all rows of a table are mixed to is kept up to so many: 64 MiB."""


def order_by_owner(owner: Tensor) -> Tensor:
    """`[rows]` where rows lie, owner after owner; those of one owner in the order given.

    Args:
        owner: `[rows]` int64, of each row.

    Example:
        >>> order_by_owner(torch.tensor([1, 0, 1, 0])).tolist()
        [1, 3, 0, 2]
    """
    if owner.device.type == "cpu":  # numpy sorts 16 bits by radix, however few there are: a fifth of torch's time
        return torch.from_numpy(np.argsort(owner.numpy().astype(np.uint16), kind="stable"))
    return torch.argsort(owner, stable=True)


@dataclass(frozen=True, slots=True)
class Contiguous:
    """Rows in equal consecutive parts, one an owner: sorted rows stay sorted, and skew stays skew.

    Args:
        num_rows: Rows of the table.
        ranks: Number of owners.
    """

    num_rows: int
    ranks: int

    @property
    def places(self) -> int:
        """Places of one owner, the same number for each; the last owner's may be partly empty."""
        return max(1, -(-self.num_rows // self.ranks))

    def place(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Owner, and place at that owner, of each row: two int64 tensors of the shape of `rows`."""
        rows = rows.long()
        return rows // self.places, rows % self.places

    def rows(self, owner: int, places: Tensor) -> Tensor:
        """The rows that lie at these places of an owner, int64."""
        return places.long() + owner * self.places


@dataclass(frozen=True, slots=True)
class Hashed:
    """Rows dealt to owners by a fixed pseudo-random bijection, whatever the ids look like.

    A row number is a pair of digits in a mixed radix, `sides[0] x sides[1] >= num_rows`, and four rounds of a Feistel
    network mix each digit into the other (Black and Rogaway, *Ciphers with Arbitrary Finite Domains*, CT-RSA 2002,
    section 4, generalized Feistel). The mixed number modulo `ranks` is the owner, the quotient the place. Fewer than
    `sqrt(num_rows) + ranks` places stay empty.

    With `m` distinct touched rows the fullest owner has at most `m / n * (1 + Theta(sqrt(n log n / m)))` of them
    (Zen, theorem 2); with few rows and many ranks that is no small number (`docs/design/sparse-gradients.md`).

    Args:
        num_rows: Rows of the table.
        ranks: Number of owners.

    Example:
        >>> import torch
        >>> partition = Hashed(num_rows=1000, ranks=4)
        >>> owner, place = partition.place(torch.arange(0, 1000, 4))
        >>> torch.bincount(owner, minlength=4).tolist()
        [74, 61, 56, 59]
        >>> sorted(partition.rows(2, place[owner == 2]).tolist()) == torch.arange(0, 1000, 4)[owner == 2].tolist()
        True
    """

    num_rows: int
    ranks: int
    sides: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        first = max(1, math.isqrt(max(0, self.num_rows - 1)) + 1)
        object.__setattr__(self, "sides", (first, max(1, -(-self.num_rows // first))))

    @staticmethod
    def place_in(rows: Tensor, tables: Tensor, partitions: Sequence[Hashed]) -> tuple[Tensor, Tensor]:
        """As `place`, for rows of several tables at once: row i by `partitions[tables[i]]`, all of as many ranks."""
        if len(partitions) == 1:
            return partitions[0].place(rows)
        sizes = tuple(one.num_rows for one in partitions)
        if _is_kept(rows, sum(sizes)):
            mixed, firsts = _mixed_rows(sizes, rows.device)
            return _dealt(mixed[firsts[tables] + rows], partitions[0].ranks)
        firsts, seconds = torch.tensor([one.sides for one in partitions], device=rows.device)[tables].unbind(1)
        return _dealt(_mix(rows.long(), (firsts, seconds)), partitions[0].ranks)

    @property
    def places(self) -> int:
        """Places of one owner, the same number for each; a few are empty."""
        return -(-self.sides[0] * self.sides[1] // self.ranks)

    def place(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Owner, and place at that owner, of each row: two int64 tensors of the shape of `rows`."""
        is_kept = _is_kept(rows, self.num_rows)
        mixed = _mixed_rows((self.num_rows,), rows.device)[0][rows] if is_kept else _mix(rows.long(), self.sides)
        return _dealt(mixed, self.ranks)

    def rows(self, owner: int, places: Tensor) -> Tensor:
        """The rows that lie at these places of an owner, int64; of an empty place some number that says nothing."""
        return self._unmix(places.long() * self.ranks + owner)

    def held(self, owner: int) -> tuple[Tensor, Tensor]:
        """All rows of an owner, and the place of each: two int64 tensors, by ascending place."""
        places = torch.arange(self.places)
        rows = self.rows(owner, places)
        is_held = (places * self.ranks + owner < self.sides[0] * self.sides[1]) & (rows < self.num_rows)
        return rows[is_held], places[is_held]

    def _unmix(self, mixed: Tensor) -> Tensor:
        digits = [mixed % self.sides[0], mixed // self.sides[0]]
        for turn, key in reversed(list(enumerate(_ROUND_KEYS))):
            target = turn % 2
            digits[target] = (digits[target] - scatter(digits[1 - target], key)) % self.sides[target]
        return digits[1] * self.sides[0] + digits[0]


Partition = Contiguous | Hashed


def _dealt(mixed: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    """Owner, and place at that owner, of rows that are mixed: int64."""
    mixed = mixed.long()
    return mixed % ranks, mixed // ranks


def _is_kept(rows: Tensor, num_rows: int) -> bool:
    return rows.is_cuda and num_rows <= _KEPT_ROWS


@cache
def _mixed_rows(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """All rows of some tables, mixed, table after table, and where each table begins there, on a device.

    A GPU spends longer on beginning the sixty operations of `_mix` than on doing them. Kept until the process ends, by
    whatever stream they are used.
    """
    mixed = torch.cat([_mix(torch.arange(size, device=device), Hashed(size, 1).sides).int() for size in sizes])
    firsts = torch.tensor([0, *accumulate(sizes[:-1])], device=device)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return mixed, firsts


def _mix(rows: Tensor, sides: tuple[int, int] | tuple[Tensor, Tensor]) -> Tensor:
    digits = [rows % sides[0], rows // sides[0]]
    for turn, key in enumerate(_ROUND_KEYS):
        target = turn % 2
        digits[target] = (digits[target] + scatter(digits[1 - target], key)) % sides[target]
    return digits[1] * sides[0] + digits[0]


def share(rows: Tensor, shares: int) -> Tensor:
    """Which of some shares each row falls to: rows of one share are still dealt evenly by `Hashed`, to any owners.

    Example:
        >>> import torch
        >>> rows = torch.arange(1000)
        >>> first = rows[share(rows, 2) == 0]
        >>> len(first), torch.bincount(Hashed(1000, 4).place(first)[0]).tolist()
        (526, [129, 133, 138, 126])
    """
    return scatter(rows.long(), _SHARING_KEY) * shares >> 31


def scatter(numbers: Tensor, key: int) -> Tensor:
    """Two rounds of xor-shift and multiply on 31 bits, int64 in and out: the same on every device and machine."""
    mixed = (numbers ^ key) & _HALF
    for multiplier in _MULTIPLIERS:
        mixed = ((mixed ^ (mixed >> 15)) * multiplier) & _HALF
    return mixed ^ (mixed >> 14)
