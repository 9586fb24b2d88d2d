"""Forward: each rank scores the tokens of all ranks with its own rows, and tells each what it found about its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tulle.softmax.candidates import Candidates, Targets
from tulle.softmax.part import Part
from tulle.softmax.shard import Shard
from tulle.softmax.tokens import Tokens


@dataclass(frozen=True, slots=True, eq=False)
class Terms:
    """What a cross entropy is of, beside its tensors.

    Args:
        shard: The rows that lie here.
        tokens: Those of all ranks.
        dtype: In which hidden states and rows are multiplied.
        logits_bytes: Memory for logits.
        label_smoothing: Share of the target's probability that is spread over all rows.
        is_trained: Whether there may be a backward.
    """

    shard: Shard
    tokens: Tokens
    dtype: torch.dtype
    logits_bytes: int
    label_smoothing: float = 0.0
    is_trained: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """What forward leaves for backward.

    Args:
        hidden: `[all tokens, width]`.
        peak: `[all tokens]` the largest logit here.
        log_sum: `[own tokens]` the logarithm of the sum of the exponentials of all candidates' logits.
        candidates: The rows that were scored.
        part: What scored them.
        targets: Those that lie here.
        terms: What the cross entropy is of.
    """

    hidden: Tensor
    peak: Tensor
    log_sum: Tensor
    candidates: Candidates
    part: Part
    targets: Targets
    terms: Terms


def score(hidden: Tensor, rows: Tensor, candidates: Candidates, terms: Terms) -> tuple[Tensor, Found]:
    """The loss of each token of this rank, `[tokens]`. Every rank must call it.

    Args:
        hidden: `[tokens, width]`.
        rows: `[tokens]` the target of each.
        candidates: The rows that it may be, as far as they lie here.
        terms: What else the cross entropy is of.
    """
    tokens = terms.tokens
    part = candidates.part(terms.logits_bytes)
    peak = hidden.new_empty(tokens.total, dtype=candidates.wide)
    log_sum = torch.empty_like(peak)

    def look(source: int, theirs: Tensor) -> None:
        of_source = tokens.of(source)
        for chunk in part.chunks(of_source):
            some = theirs[chunk.start - of_source.start : chunk.stop - of_source.start]
            peak[chunk], log_sum[chunk] = part.look(chunk, some, is_kept=terms.is_trained)

    rows_under_way = tokens.gather(rows)  # first, lest the few bytes wait behind the many
    every = tokens.gather(hidden.to(terms.dtype), look).wait()
    targets = candidates.find(rows_under_way.wait(), every)
    statistics = [log_sum, torch.zeros_like(log_sum).index_copy_(0, targets.tokens, targets.logits)]
    if terms.label_smoothing:
        statistics.append(candidates.sum_of_logits(every))
    by_rank = tokens.give_back(torch.stack(statistics, 1))
    own_log_sum, own = by_rank[..., 0].logsumexp(0), by_rank[..., 1:].sum(0)
    losses = own_log_sum - (1 - terms.label_smoothing) * own[:, 0]
    if terms.label_smoothing:
        losses -= terms.label_smoothing / terms.shard.num_rows * own[:, 1]
    return losses, Found(every, peak, own_log_sum, candidates, part, targets, terms)
