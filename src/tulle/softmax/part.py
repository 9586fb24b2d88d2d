"""`Part`: the part of a softmax that one rank computes, in chunks of tokens: exponentials, their sums, their gradients.

With `z` the logits of a token over the rows here, and `m` their maximum, `e = exp(z - m)` is all that is ever stored of
them. The gradient of the loss with respect to the logits is `g (softmax - onehot)`, and `softmax = e exp(m - lse)`
differs from `e` by a factor a token, which may as well be applied to the narrow side of each product:

    softmax @ table        =  exp(m - lse) * (e @ table)               `[tokens, width]`
    softmax.T @ hidden     =  e.T @ (exp(m - lse) * hidden)            `[rows, width]`

so backward reads `e` in its two products and otherwise leaves it alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)
_CHUNKS = 4
"""A chunk is this part of the memory that logits may take, so that most of it can hold what is kept for backward."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """In what numbers of a dtype are summed up."""
    return torch.float32 if dtype in HALF else dtype


def product(left: Tensor, right: Tensor) -> Tensor:
    """The product of two matrices of one dtype, in float32 if they are of half precision."""
    if left.dtype not in HALF:
        return left @ right
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add `product(left, right)` to a total."""
    if left.dtype in HALF:
        total += product(left, right)
    else:
        total.addmm_(left, right)


class Part:
    """The rows that one rank scores, and what it found for each chunk of tokens.

    Args:
        table: `[rows, width]`.
        offset: `[rows]` what is added to the logits, -inf where there is no row; or None.
        logits_bytes: Memory for logits. What does not fit into it is computed again in backward.
        kept: Exponentials of chunks, by their first token.
    """

    def __init__(self, table: Tensor, offset: Tensor | None, logits_bytes: int, kept: Mapping[int, Tensor]) -> None:
        self.table = table
        self._offset = offset
        row_bytes = max(1, len(table) * table.element_size())
        self._chunk_tokens = max(1, logits_bytes // (_CHUNKS * row_bytes))
        self._left_bytes = logits_bytes - self._chunk_tokens * len(table) * wide(table.dtype).itemsize
        self.kept = dict(kept)

    def chunks(self, tokens: slice) -> Iterator[slice]:
        """The chunks of some tokens."""
        for first in range(tokens.start, tokens.stop, self._chunk_tokens):
            yield slice(first, min(first + self._chunk_tokens, tokens.stop))

    def logits(self, hidden: Tensor) -> Tensor:
        """`[tokens, rows]` of `[tokens, width]`."""
        if self._offset is None:
            return product(hidden, self.table.T)
        if self.table.dtype in HALF:
            return product(hidden, self.table.T).add_(self._offset)
        return torch.addmm(self._offset, hidden, self.table.T)

    def look(self, chunk: slice, hidden: Tensor, *, is_kept: bool) -> tuple[Tensor, Tensor]:
        """Of each token of a chunk the maximum of the logits, and the logarithm of the sum of their exponentials.

        Args:
            chunk: Which.
            hidden: `[tokens of the chunk, width]`.
            is_kept: Whether there will be a backward, for which the exponentials are kept while there is room.
        """
        logits = self.logits(hidden)
        peak = _peak(logits)
        exponentials = logits.sub_(peak.unsqueeze(1)).exp_()
        total = exponentials.sum(1)
        size_bytes = exponentials.numel() * self.table.element_size()
        if is_kept and size_bytes <= self._left_bytes:
            self._left_bytes -= size_bytes
            self.kept[chunk.start] = exponentials.to(self.table.dtype)
        return peak, peak + total.log()

    def exponentials(self, chunk: slice, hidden: Tensor, peak: Tensor) -> Tensor:
        """`[tokens, rows]` of a chunk that was looked at, as kept or computed again."""
        kept = self.kept.get(chunk.start)
        if kept is not None:
            return kept
        return self.logits(hidden).sub_(peak.unsqueeze(1)).exp_().to(self.table.dtype)


def _peak(logits: Tensor) -> Tensor:
    """Maximum of each token, finite also where no row is."""
    if logits.shape[1] == 0:
        return logits.new_zeros(len(logits))
    return logits.amax(1).clamp_(min=torch.finfo(logits.dtype).min)
