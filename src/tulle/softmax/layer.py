"""`SoftmaxLayer`: what the output layers here have in common: exact cross entropy, probabilities, likeliest classes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Literal

import torch
from torch import Tensor, nn

from tulle.errors import ModelError
from tulle.parts import whole_of
from tulle.softmax.candidates import Candidates
from tulle.softmax.cross_entropy import cross_entropy
from tulle.softmax.ranking import Ranking
from tulle.softmax.scoring import Terms
from tulle.softmax.shard import Shard
from tulle.softmax.tokens import Tokens
from tulle.tables import split_of

LOGITS_BYTES = 512 * 1024 * 1024
Reduction = Literal["mean", "sum", "none"]


class SoftmaxLayer(nn.Module, ABC):
    """An output layer with its cross entropy, over a table `[num_rows, width]` that may be split by rows.

    Args:
        label_smoothing: Share of the target's probability that is spread over all classes.
        ignore_index: A target that does not count.
        reduction: `"mean"` over this rank's targets that count, `"sum"`, or `"none"`.

    Attributes:
        logits_bytes: How much memory logits may take on this rank. They are computed for some tokens at a time; those
            that fit are kept for backward, which computes the others once more.
    """

    trains_all_rows = True
    """Whether every row gets a gradient in training; else rows are looked up, and only those get one."""

    def __init__(self, *, label_smoothing: float, ignore_index: int, reduction: Reduction) -> None:
        super().__init__()
        if reduction not in ("mean", "sum", "none") or not 0 <= label_smoothing <= 1:
            raise ModelError(
                f"{type(self).__name__} was given reduction={reduction!r} and label_smoothing={label_smoothing}, "
                "expected 'mean', 'sum' or 'none', and a number from 0 to 1"
            )
        self.label_smoothing = label_smoothing
        self.ignore_index = ignore_index
        self.reduction: Reduction = reduction
        self.logits_bytes = LOGITS_BYTES

    @abstractmethod
    def table_and_bias(self) -> tuple[Tensor, Tensor | None]:
        """`[num_rows, width]`, or what this rank has of it, and `[num_rows]` or None."""

    def exact_loss(self, hidden: Tensor, target: Tensor) -> Tensor:
        """The cross entropy over all classes. Every rank that shares the table must call it, and its backward.

        Args:
            hidden: `[..., width]`, this rank's own.
            target: `[...]` class numbers, or `ignore_index`, of any integers.

        Returns:
            A number, or `[...]` with reduction "none"; float32 if the products are of half precision.

        Raises:
            ModelError: On all ranks, if on any shapes or dtypes do not fit or a target is out of range.
        """
        weight, bias, shard = self._here("exact_loss")
        is_counted, rows = self._counted(target)
        error = self._check_hidden(hidden) or self._check_shapes(hidden, target) or self._check_target(target, rows)
        tokens = Tokens.agree(len(rows), error, shard.axis(), label=shard.label, are_trained=hidden.requires_grad)
        terms = Terms(
            shard,
            tokens,
            dtype=self._dtype(hidden),
            logits_bytes=self.logits_bytes,
            label_smoothing=self.label_smoothing,
            is_trained=torch.is_grad_enabled(),
        )
        states = hidden.reshape(-1, hidden.shape[-1])
        losses = cross_entropy(states if is_counted is None else states[is_counted], weight, bias, rows.long(), terms)
        return self._reduced(losses, is_counted, target)

    def log_prob(self, hidden: Tensor) -> Tensor:
        """The logarithm of each class's probability, `[..., width]` to `[..., num_rows]`, without a gradient.

        Every rank that shares the table must call it. Of many classes `top_k` has far less to send.
        """
        ranking, states = self._ranking(hidden)
        found = ranking.log_prob(states)
        return found.view(*hidden.shape[:-1], found.shape[1])

    def top_k(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k likeliest classes, likeliest first, without a gradient. Every rank that shares the table must call it.

        Args:
            hidden: `[..., width]`.
            k: How many, at most `num_rows`; the same on all ranks.

        Returns:
            The logarithms of their probabilities and their numbers: `[..., k]` each.

        Raises:
            ModelError: On all ranks, if on any the hidden states do not fit or there are fewer classes.
        """
        ranking, states = self._ranking(hidden, self._check_k(k))
        values, rows = ranking.top_k(states, k)
        return values.view(*hidden.shape[:-1], k), rows.view(*hidden.shape[:-1], k)

    def predict(self, hidden: Tensor) -> Tensor:
        """The likeliest class: `[..., width]` to `[...]`. Every rank that shares the table must call it."""
        return self.top_k(hidden, 1)[1].squeeze(-1)

    def _counted(self, target: Tensor) -> tuple[Tensor | None, Tensor]:
        """Which targets count, None if all do, and those that do: `[tokens]` and `[counted]`."""
        flat = target.flatten()
        is_counted = flat != self.ignore_index
        return (None, flat) if bool(is_counted.all()) else (is_counted, flat[is_counted])

    def _reduced(self, losses: Tensor, is_counted: Tensor | None, target: Tensor) -> Tensor:
        """`[counted]` losses as asked for."""
        if self.reduction == "mean":
            return losses.sum() / (len(losses) or math.nan)
        if self.reduction == "sum":
            return losses.sum()
        if is_counted is not None:
            losses = losses.new_zeros(target.numel()).masked_scatter(is_counted, losses)
        return losses.view(target.shape)

    def _here(self, asked: str) -> tuple[Tensor, Tensor | None, Shard]:
        """The table and the bias, of which a rank may have the rows that it owns, and no other part.

        Raises:
            ModelError: If `full_shard` shares one of them out, whose whole is here within `forward` alone.
        """
        weight, bias = self.table_and_bias()
        taker = f"{type(self).__name__}.{asked}"
        for one in (weight, bias):
            if one is not None and split_of(one) is None and (whole := whole_of(one)) is not None:
                raise ModelError(f"{whole.refusal(taker)}; a table that the plan splits by rows it takes at any time")
        return weight, bias, Shard.of(weight)

    def _ranking(self, hidden: Tensor, error: ModelError | None = None) -> tuple[Ranking, Tensor]:
        weight, bias, shard = self._here("top_k")
        states = hidden.detach().reshape(-1, hidden.shape[-1])
        tokens = Tokens.agree(len(states), error or self._check_hidden(hidden), shard.axis(), label=shard.label)
        return Ranking(Candidates(weight, bias, shard, self._dtype(hidden)), tokens, self.logits_bytes), states

    def _dtype(self, hidden: Tensor) -> torch.dtype:
        """In which hidden states and rows are multiplied: as `nn.Linear` would."""
        device = hidden.device.type
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype

    def _check_k(self, k: int) -> ModelError | None:
        num_rows = Shard.of(self.table_and_bias()[0]).num_rows
        if isinstance(k, int) and 0 <= k <= num_rows:
            return None
        return ModelError(f"{type(self).__name__}.top_k was given k={k!r}, expected a number of its {num_rows} classes")

    def _check_hidden(self, hidden: Tensor) -> ModelError | None:
        weight, _ = self.table_and_bias()
        is_autocast = torch.is_autocast_enabled(hidden.device.type)
        if hidden.shape[-1] == weight.shape[1] and (is_autocast or hidden.dtype == weight.dtype):
            return None
        return ModelError(
            f"{type(self).__name__} was given hidden states of width {hidden.shape[-1]} in {hidden.dtype}, expected "
            f"width {weight.shape[1]} in {weight.dtype}: cast them, or use torch.autocast"
        )

    def _check_shapes(self, hidden: Tensor, target: Tensor) -> ModelError | None:
        if hidden.shape[:-1] == target.shape:
            return None
        return ModelError(
            f"{type(self).__name__} was given hidden states of shape {list(hidden.shape)} and targets of shape "
            f"{list(target.shape)}, expected [..., width] and [...]: one target for each state"
        )

    def _check_target(self, target: Tensor, rows: Tensor) -> ModelError | None:
        if target.is_floating_point() or target.is_complex():
            return ModelError(
                f"{type(self).__name__} was given targets in {target.dtype}, expected class numbers in int64"
            )
        num_rows = Shard.of(self.table_and_bias()[0]).num_rows
        is_outside = (rows < 0) | (rows >= num_rows)
        if not bool(is_outside.any()):
            return None
        return ModelError(
            f"{type(self).__name__} was given the target {int(rows[is_outside][0])}, expected 0..{num_rows - 1} or "
            f"ignore_index={self.ignore_index}: check the vocabulary that made it, or make the table larger"
        )
