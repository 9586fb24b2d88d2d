"""Cross entropy over a table of which each rank has some rows: activations travel, logits never do.

    forward    hidden states, targets           to all ranks: each scores all tokens with its own rows
               log-sum, target's logit          back to the token's rank, which makes the loss of them
    backward   gradient of the loss, log-sum    to all ranks
               gradient of the hidden state     back in parts, sent while the next ones are computed

Per rank that is about `2 (ranks - 1) tokens width` numbers, whatever the number of rows. The gradient of a rank's own
rows needs no message at all.

Source: Shoeybi et al., *Megatron-LM* (2019), section 3, whose ranks share their tokens; here each has its own.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from tulle.errors import ModelError
from tulle.softmax.candidates import Candidates
from tulle.softmax.gradients import Gradients
from tulle.softmax.scoring import Found, Terms, score


def cross_entropy(hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor, terms: Terms) -> Tensor:
    """The loss of each token of this rank. Every rank that shares the table must call it, and its backward.

    Args:
        hidden: `[tokens, width]`.
        weight: `[places, width]`, the rows that lie here.
        bias: `[num_rows]`, of the whole table, or None.
        rows: `[tokens]` the target of each.
        terms: What else it is of.

    Returns:
        `[tokens]`, in float32 if the products are of half precision. The gradient of `weight` is, for the rows here,
        the mean over ranks of the gradients of their losses. The mean over ranks of the gradient of `bias` is that
        mean too: it is zero but for the rows here, or, in float16, the mean already.
    """
    return cast("Tensor", _CrossEntropy.apply(hidden, weight, bias, rows, terms))


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor, terms: Terms) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            candidates = Candidates(weight, bias, terms.shard, terms.dtype)
            losses, found = score(hidden.detach(), rows, candidates, terms)
        # What is large is saved, so that it goes with the end of backward and not with the loss.
        ctx.save_for_backward(weight, bias, found.hidden, *found.part.kept.values())
        ctx.about = found.peak, found.log_sum, found.targets, tuple(found.part.kept), terms
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        return losses

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise ModelError(
                "a gradient was asked for with create_graph=True, but that of a sharded softmax has no gradient of its "
                "own: take torch.nn.Linear and cross_entropy for a model that needs second derivatives"
            )
        weight, bias, every, *kept = ctx.saved_tensors
        peak, log_sum, targets, starts, terms = ctx.about
        _, of_weight, of_bias = ctx.needs_input_grad[:3]
        with torch.autocast(weight.device.type, enabled=False):
            candidates = Candidates(weight, bias, terms.shard, terms.dtype)
            part = candidates.part(terms.logits_bytes, dict(zip(starts, kept, strict=True)))
            found = Found(every, peak, log_sum, candidates, part, targets, terms)
            told = terms.tokens.gather(torch.stack([upstream[0], log_sum], 1)).wait()
            gradients = Gradients(found, *told.unbind(1), of_weight=of_weight, of_bias=of_bias)
            given = (
                gradients.hidden() if terms.tokens.are_trained else gradients.visit_all(),
                gradients.weight() if of_weight else None,
                gradients.bias(bias.dtype) if of_bias else None,
            )
        cast_to = zip(given, ctx.dtypes, strict=True)
        return *(None if gradient is None else gradient.to(dtype) for gradient, dtype in cast_to), None, None
