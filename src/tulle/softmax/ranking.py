"""`Ranking`: probabilities of classes and the likeliest ones, for evaluation, over a table that may be split."""

from __future__ import annotations

import torch
from torch import Tensor

from tulle.softmax.candidates import Candidates
from tulle.softmax.tokens import Tokens


class Ranking:
    """The classes of one call, by what each rank's rows say of the tokens of all ranks.

    Args:
        candidates: The rows that lie here.
        tokens: Those of all ranks.
        logits_bytes: Memory for logits.
    """

    def __init__(self, candidates: Candidates, tokens: Tokens, logits_bytes: int) -> None:
        self._candidates = candidates
        self._part = candidates.part(logits_bytes)
        self._tokens = tokens

    @torch.no_grad()
    def log_prob(self, hidden: Tensor) -> Tensor:
        """`[own tokens, width]` to `[own tokens, num_rows]`. Every rank must call it."""
        with torch.autocast(hidden.device.type, enabled=False):
            every = self._tokens.gather(hidden.to(self._candidates.table.dtype)).wait()
            by_rank = self._tokens.give_back(self._part.logits(every))
        shard = self._candidates.shard
        whole = by_rank.new_empty(by_rank.shape[1], shard.num_rows)
        for rank, logits in enumerate(by_rank):
            rows, is_held = (values.to(hidden.device) for values in shard.rows(rank))
            whole[:, rows[is_held]] = logits[:, is_held]
        return whole.log_softmax(1)

    @torch.no_grad()
    def top_k(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Of `[own tokens, width]` the k likeliest, `[own tokens, k]` each. Every rank must call it."""
        with torch.autocast(hidden.device.type, enabled=False):
            every = self._tokens.gather(hidden.to(self._candidates.table.dtype)).wait()
            values, rows, log_sums = self._look(every, min(k, len(self._candidates.rows)))
        log_sum = self._tokens.give_back(log_sums).logsumexp(0)
        best, position = _abreast(self._tokens.give_back(values)).topk(k, dim=1)
        return best - log_sum.unsqueeze(1), _abreast(self._tokens.give_back(rows)).gather(1, position)

    def _look(self, every: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """This rank's k best logits of each token, their rows, and the log-sum of all."""
        values = every.new_empty(len(every), k, dtype=self._candidates.wide)
        rows = torch.empty(values.shape, dtype=torch.int64, device=every.device)
        log_sums = values.new_empty(len(every))
        for chunk in self._part.chunks(slice(0, len(every))):
            logits = self._part.logits(every[chunk])
            values[chunk], places = logits.topk(k, dim=1)
            rows[chunk] = self._candidates.rows[places]
            log_sums[chunk] = logits.logsumexp(1)
        return values, rows, log_sums


def _abreast(by_rank: Tensor) -> Tensor:
    """`[ranks, tokens, k]` to `[tokens, ranks k]`."""
    return by_rank.movedim(0, 1).flatten(1)
