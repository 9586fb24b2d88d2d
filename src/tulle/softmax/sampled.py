"""`SampledSoftmax`: an output layer that is trained against a few rows that stand for all."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tulle.errors import ModelError
from tulle.softmax.layer import Reduction, SoftmaxLayer
from tulle.softmax.negatives import LogUniform
from tulle.tables import has_own_forward

_NOT_RUNNING = -1
"""In place of a backward's number, where there is none."""


class SampledSoftmax(SoftmaxLayer):
    """In training the cross entropy over the target and rows drawn anew each time; in evaluation the exact one.

    Rows are drawn log-uniformly, so number classes by falling frequency. All tokens of all ranks have the same
    negatives, and these are looked up in an `nn.Embedding` like a batch's words: its gradient has the rows that were
    drawn, and however `tulle.distribute` keeps that table, replicated or split, only those travel.

    Args:
        table: `[num_rows, width]`, of its own or the model's input table; `sparse=True` suits it. Its lookups are plain
            ones: the row of a `padding_idx` is scored, but not trained.
        samples: How often a row is drawn; each is kept once.
        ignore_index: A target that does not count.
        reduction: `"mean"` over this rank's targets that count, `"sum"`, or `"none"`.

    Attributes:
        sampler: What draws.
        draws: How many times rows were drawn in training, from which those of the next follow.

    Raises:
        ModelError: If the table is no `nn.Embedding` with the lookup of torch's own, without `scale_grad_by_freq`, or
            `samples` no number above zero.

    Example:
        >>> import torch, tulle
        >>> softmax = SampledSoftmax(torch.nn.Embedding(1000, 16, sparse=True), samples=100)
        >>> hidden, target = torch.randn(2, 5, 16), torch.randint(1000, (2, 5))
        >>> softmax(hidden, target).backward()
        >>> bool(softmax.table.weight.grad.coalesce().indices().shape[1] < 100)
        True
        >>> exact = softmax.eval()(hidden, target)

    Source: Bengio and Senécal, *Adaptive Importance Sampling to Accelerate Training of a Neural Probabilistic Language
    Model* (2008); Jean et al., *On Using Very Large Target Vocabulary* (ACL 2015), section 3.
    """

    trains_all_rows = False
    draws: Tensor

    def __init__(
        self,
        table: nn.Embedding,
        *,
        samples: int,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__(label_smoothing=0.0, ignore_index=ignore_index, reduction=reduction)
        if not isinstance(table, nn.Embedding) or not isinstance(samples, int) or samples < 1:
            raise ModelError(
                f"SampledSoftmax was given a {type(table).__name__} as table and samples={samples!r}, expected an "
                "nn.Embedding, which looks up the rows that are drawn, and how many to draw, 1 at least"
            )
        if has_own_forward(table) or table.scale_grad_by_freq:
            raise ModelError(
                f"SampledSoftmax was given as table {table}, which looks up in a way of its own, or scales gradients "
                "by how often rows are looked up: training would not be for what evaluation scores. "
                "Give it a plain nn.Embedding of the same shape whose weight is that of this one"
            )
        self.table = table
        self.sampler = LogUniform(table.num_embeddings, samples)
        self.register_buffer("draws", torch.zeros((), dtype=torch.int64))

    def forward(self, hidden: Tensor, target: Tensor, drawn: Tensor | None = None) -> Tensor:
        """The loss. Every rank must call it, and in training its backward.

        Args:
            hidden: `[..., width]`, this rank's own.
            target: `[...]` int64 class numbers, or `ignore_index`.
            drawn: `[negatives]` distinct rows, ascending, the same on all ranks; None draws them in training. If they
                are part of the batch, `softmax.sampler.draw(step)` say, `tulle.lookahead` tells them ahead.

        Returns:
            A number, or `[...]` with reduction "none"; float32 if the products are of half precision.

        Raises:
            ModelError: If shapes do not fit, or it is to draw in backward, where forward is computed again.
        """
        if drawn is None and not self.training:
            return self.exact_loss(hidden, target)
        if (error := self._check_shapes(hidden, target)) is not None:
            raise error  # else one state would be taken for those of all targets
        is_counted, rows = self._counted(target)
        states = hidden.reshape(-1, hidden.shape[-1])
        states = states if is_counted is None else states[is_counted]
        if drawn is None:
            drawn = self._draw().to(hidden.device)
            found = self.table(torch.cat([drawn, rows]))  # one lookup, so that they travel together
            of_drawn, of_targets = found[: len(drawn)], found[len(drawn) :]
        else:
            of_drawn, of_targets = self.table(drawn), self.table(target if is_counted is None else rows).flatten(0, -2)
        return self._reduced(self._losses(states, rows, drawn, of_drawn, of_targets), is_counted, target)

    def table_and_bias(self) -> tuple[Tensor, Tensor | None]:
        """`[num_rows, width]`, or what this rank has of it, and None."""
        return self.table.weight, None

    def extra_repr(self) -> str:
        """What `print` shows."""
        return f"samples={self.sampler.times}, reduction={self.reduction!r}"

    @torch.no_grad()
    def _draw(self) -> Tensor:
        if torch._C._current_graph_task_id() != _NOT_RUNNING:
            raise ModelError(
                "SampledSoftmax was called again in backward, as torch.utils.checkpoint and recomputation do, where it "
                "would draw other rows than in forward: leave it out of what is computed again, or give it "
                "drawn=softmax.sampler.draw(step)"
            )
        number = int(self.draws)
        self.draws += 1
        return self.sampler.draw(number)

    def _losses(self, states: Tensor, rows: Tensor, drawn: Tensor, of_drawn: Tensor, of_targets: Tensor) -> Tensor:
        """`[tokens]` of hidden states and the rows of negatives and targets.

        A logit less the logarithm of the chance that its row is drawn makes the sum of exponentials right on average.
        A token whose target was drawn has that once, not twice.
        """
        drawn_logits = F.linear(states, of_drawn)
        wide = torch.promote_types(drawn_logits.dtype, torch.float32)
        drawn_logits = drawn_logits.to(wide) - self.sampler.log_chance(drawn).to(wide)
        target_logits = (states * of_targets).sum(1).to(wide) - self.sampler.log_chance(rows).to(wide)
        others = target_logits.masked_fill(torch.isin(rows, drawn), -torch.inf)
        return torch.logaddexp(drawn_logits.logsumexp(1), others) - target_logits
