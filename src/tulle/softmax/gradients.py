"""Backward: the gradients of all tokens' hidden states go back in parts; those of the rows here need no message."""

from __future__ import annotations

import torch
from torch import Tensor

from tulle.comm import all_reduce
from tulle.softmax.part import add_product, product
from tulle.softmax.scoring import Found


class Gradients:
    """The gradients of one cross entropy; `hidden` or `visit_all` before `weight` and `bias`.

    The gradient of a logit is `g (p - (1 - s) [it is the target's] - s / num_rows)`, with g the gradient of the token's
    loss, p the row's probability and s the label smoothing; the three terms are added up one by one.

    Args:
        found: What forward left.
        upstream: `[all tokens]` gradients of their losses.
        log_sum: `[all tokens]`.
        of_weight: Whether `weight` will be asked for.
        of_bias: Whether `bias` will be.
    """

    def __init__(self, found: Found, upstream: Tensor, log_sum: Tensor, *, of_weight: bool, of_bias: bool) -> None:
        self._found = found
        self._factor = upstream * torch.exp(found.peak - log_sum)
        targets = found.targets
        self._of_targets = upstream[targets.tokens] * (found.terms.label_smoothing - 1)
        self._of_all = upstream * (-found.terms.label_smoothing / found.terms.shard.num_rows)
        self._sum_of_rows = found.candidates.sum_of_rows() if found.terms.label_smoothing else None
        self._of_rows = upstream.new_zeros(found.part.table.shape) if of_weight else None
        self._of_logits = upstream.new_zeros(len(found.part.table)) if of_bias else None

    def hidden(self) -> Tensor:
        """`[own tokens, width]`. Every rank must call it."""
        return self._found.terms.tokens.sum_back(self._visit)

    def visit_all(self) -> None:
        """What `hidden` leaves behind for the rows, without it."""
        for rank in range(len(self._found.terms.tokens.counts)):
            self._visit(rank)

    def weight(self) -> Tensor:
        """`[places, width]`, the mean over ranks."""
        assert self._of_rows is not None, "it was said to be wanted"
        found, targets = self._found, self._found.targets
        of_target_rows = self._of_targets.unsqueeze(1) * found.hidden.index_select(0, targets.tokens)
        total = self._of_rows.index_add_(0, targets.places, of_target_rows)
        if found.terms.label_smoothing:
            is_held = found.candidates.is_held
            held = total.new_ones(len(total)) if is_held is None else is_held.to(total.dtype)
            total.addr_(held, self._of_all @ found.hidden.to(total.dtype))
        return total.div_(found.terms.shard.ranks)

    def bias(self, dtype: torch.dtype) -> Tensor:
        """`[num_rows]`, such that its mean over ranks is the mean of theirs. Every rank must call it.

        Zero but for the rows here, of which it is the sum over ranks. A float16 may be too small for that where it is
        not for the mean: there all ranks have the mean.

        Args:
            dtype: In which it is kept.
        """
        assert self._of_logits is not None, "it was said to be wanted"
        found = self._found
        of_rows = self._of_logits + self._of_all.sum()
        rows = found.candidates.rows
        if found.candidates.is_held is not None:
            rows, of_rows = rows[found.candidates.is_held], of_rows[found.candidates.is_held]
        whole = of_rows.new_zeros(found.terms.shard.num_rows).index_copy_(0, rows, of_rows)
        whole.index_add_(0, found.targets.rows, self._of_targets)
        axis = found.terms.tokens.axis
        if dtype is not torch.float16 or axis is None:
            return whole
        return all_reduce(whole, axis, label=found.terms.tokens.label).wait().div_(axis.size)

    def _visit(self, rank: int) -> Tensor:
        """Add what a rank's tokens give the rows here, and return what the rows here give those."""
        found = self._found
        of_rank = found.terms.tokens.of(rank)
        of_hidden = self._factor.new_empty(of_rank.stop - of_rank.start, found.hidden.shape[1])
        for chunk in found.part.chunks(of_rank):
            self._visit_chunk(chunk, of_hidden[chunk.start - of_rank.start : chunk.stop - of_rank.start])
        targets = found.targets
        first, last = torch.searchsorted(
            targets.tokens, targets.tokens.new_tensor([of_rank.start, of_rank.stop])
        ).tolist()
        of_rows = found.candidates.table.index_select(0, targets.places[first:last])
        of_targets = self._of_targets[first:last].unsqueeze(1) * of_rows
        of_hidden.index_add_(0, targets.tokens[first:last] - of_rank.start, of_targets)
        if self._sum_of_rows is not None:
            of_hidden.addr_(self._of_all[of_rank], self._sum_of_rows)
        return of_hidden

    def _visit_chunk(self, chunk: slice, of_hidden: Tensor) -> None:
        found = self._found
        factor = self._factor[chunk].unsqueeze(1)
        exponentials = found.part.exponentials(chunk, found.hidden[chunk], found.peak[chunk])
        torch.mul(product(exponentials, found.part.table), factor, out=of_hidden)
        for total, of_token in ((self._of_rows, found.hidden[chunk]), (self._of_logits, torch.ones_like(factor))):
            if total is not None:
                add_product(total.view(len(total), -1), exponentials.T, (factor * of_token).to(exponentials.dtype))
