"""Random numbers of a whole tensor, a chunk of rows at a time: the same, to the last bit, as drawn in one go.

PyTorch's `uniform_` on CPU draws element after element. `normal_` (at least 16 elements, contiguous) first fills all
with uniform numbers and then turns them into normal ones, 16 at a time (Box and Muller 1958); if their number is not a
multiple of 16, it draws the last 16 anew. So chunks of a multiple of 16 elements follow on each other, and the last
chunk skips what was drawn for its rest in vain:

    37 elements      0 ............ 15 | 16 ........... 31 | 32 .. 36
    drawn            block             | block             | 5, in vain
    drawn anew                              21 ........................ 36
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

Kind = Literal["normal_", "uniform_"]
_BLOCK = 16


def draw_in_chunks(
    kind: Kind,
    shape: Sequence[int],
    dtype: torch.dtype,
    arguments: Sequence[float] = (),
    *,
    chunk_bytes: int,
    generator: torch.Generator | None = None,
) -> Iterator[tuple[int, Tensor]]:
    """Rows from the first to the last, `(first row, [rows, ...])`; the generator ends as after one draw of all.

    Args:
        kind: The method of a tensor.
        shape: Of the whole.
        dtype: Of the elements.
        arguments: Of the method.
        chunk_bytes: Of a chunk, about.
        generator: None for PyTorch's own.

    Example:
        >>> import torch
        >>> whole = torch.empty(37, 3).normal_(generator=torch.Generator().manual_seed(0))
        >>> generator = torch.Generator().manual_seed(0)
        >>> chunks = draw_in_chunks("normal_", (37, 3), torch.float32, chunk_bytes=200, generator=generator)
        >>> torch.equal(torch.cat([chunk for _, chunk in chunks]), whole)
        True
    """
    num_rows = shape[0]
    width = torch.Size(shape[1:]).numel()
    rows = max(1, chunk_bytes // (_BLOCK * max(1, width) * dtype.itemsize)) * _BLOCK
    first = 0
    while first < num_rows:
        # The last 16 elements lie in the last chunk.
        is_last = num_rows - first <= rows or (num_rows - first - rows) * width < _BLOCK
        last = num_rows if is_last else first + rows
        chunk = torch.empty(last - first, *shape[1:], dtype=dtype)
        _draw(kind, chunk.view(-1), arguments, generator)
        yield first, chunk
        first = last


def can_draw_in_chunks(kind: str, dtype: torch.dtype, elements: int) -> bool:
    """Whether chunks are equal to the whole: it is tried, as other versions of PyTorch may draw in another way."""
    return kind in ("normal_", "uniform_") and _are_alike(kind, dtype, elements % _BLOCK != 0)


def _draw(kind: Kind, flat: Tensor, arguments: Sequence[Any], generator: torch.Generator | None) -> None:
    draw = getattr(torch.Tensor, kind)
    rest = len(flat) % _BLOCK
    if kind == "uniform_" or rest == 0 or len(flat) < _BLOCK:
        draw(flat, *arguments, generator=generator)
        return
    draw(flat[: len(flat) - rest], *arguments, generator=generator)
    torch.empty(rest, dtype=flat.dtype).uniform_(generator=generator)
    draw(flat[len(flat) - _BLOCK :], *arguments, generator=generator)


@cache
def _are_alike(kind: Kind, dtype: torch.dtype, has_rest: bool) -> bool:  # noqa: FBT001
    shape = (5 * _BLOCK - has_rest, 3)
    whole, generator = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    try:
        expected = getattr(torch.empty(shape, dtype=dtype), kind)(generator=whole)
        chunks = draw_in_chunks(kind, shape, dtype, chunk_bytes=1, generator=generator)
        drawn = torch.cat([chunk for _, chunk in chunks])
    except (RuntimeError, NotImplementedError):  # no such numbers of this dtype
        return False
    return torch.equal(drawn, expected) and torch.equal(whole.get_state(), generator.get_state())
