"""`cross_entropy` of scores that are split over the vocabulary: two sums travel instead of all scores.

Source: Shoeybi et al., *Megatron-LM* (2019), section 3: "fusing the parallel output with the cross entropy loss".
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from tulle.comm import all_reduce, leave
from tulle.errors import ModelError
from tulle.mesh import Axis
from tulle.tensor_parallel.placement import length_on

_LABEL = "cross entropy"
_HALF = (torch.bfloat16, torch.float16)


def cross_entropy(
    scores: Tensor,
    targets: Tensor,
    axis: Axis,
    *,
    words: int,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """`torch.nn.functional.cross_entropy` of split scores, the same on every rank. Every rank of the axis must call it.

    Args:
        scores: `[samples, this rank's words]`, as an output layer that does not gather gives them.
        targets: `[samples]`, numbers of words in the whole vocabulary, the same on every rank.
        axis: Whose ranks hold the scores.
        words: Of the whole vocabulary.
        ignore_index: The target of samples that do not count.
        reduction: `"mean"` over the samples that count, `"sum"`, or `"none"`.
        label_smoothing: The share of each target that is spread evenly over all words.

    Returns:
        A number, or `[samples]` with reduction "none"; float32 if the scores are of half precision.

    Raises:
        ModelError: If the scores are not this rank's part of so many words, or shapes do not fit.

    Example:
        >>> import torch, tulle
        >>> axis = tulle.init(data=-1)["data"]
        >>> scores = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
        >>> round(cross_entropy(scores, torch.tensor([1, 0]), axis, words=2).item(), 4)
        0.2201
    """
    rows = length_on(axis.rank, words, axis.size)
    if scores.shape != (targets.numel(), rows):
        raise ModelError(
            f"tensor_parallel.cross_entropy was given scores {list(scores.shape)} for {targets.numel()} targets, "
            f"expected {[targets.numel(), rows]}: this rank's part of {words} words, as an output layer split by "
            '"vocabulary" gives them'
        )
    if scores.dtype in _HALF:
        scores = scores.float()
    largest = all_reduce(scores.detach().amax(1) if rows else _lowest(scores), axis, label=_LABEL, op="max").wait()
    shifted = scores - largest.unsqueeze(1)
    is_word = ((targets >= 0) & (targets < words)) | (targets == ignore_index)
    first = sum(length_on(rank, words, axis.size) for rank in range(axis.rank))
    parts = [shifted.exp().sum(1), _picked(shifted, targets - first, is_word)]
    if label_smoothing:
        parts.append(shifted.sum(1))
    normalizer, target, *rest = leave(torch.stack(parts), axis, label=_LABEL).unbind()
    losses = normalizer.log() - target
    if label_smoothing:
        losses = (1 - label_smoothing) * losses + label_smoothing * (normalizer.log() - rest[0] / words)
    counts = targets != ignore_index
    losses = losses.masked_fill(~counts, 0)
    if reduction == "none":
        return losses
    return losses.sum() / counts.sum() if reduction == "mean" else losses.sum()


class CausalLoss:
    """The loss of causal language models of `transformers`, with split scores: takes the place of `loss_function`.

    Args:
        axis: Whose ranks hold the scores.
    """

    def __init__(self, axis: Axis) -> None:
        self._axis = axis

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """The loss of predicting each next word of `labels` `[samples, length]`."""
        if shift_labels is None:
            shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = cross_entropy(
            logits.flatten(0, -2),
            shift_labels.reshape(-1),
            self._axis,
            words=vocab_size,
            ignore_index=ignore_index,
            reduction=reduction,
        )
        return loss if num_items_in_batch is None else loss / num_items_in_batch

    def __deepcopy__(self, memo: object) -> CausalLoss:
        """A copied model's scores are split over the same ranks."""
        return self


def _picked(scores: Tensor, places: Tensor, is_word: Tensor) -> Tensor:
    """Each sample's score at a place, or 0 where that is another rank's; gather refuses what is no word, on all."""
    rows = scores.shape[1]
    is_here = (places >= 0) & (places < rows)
    if not rows:
        return scores.new_zeros(len(scores))
    picked = scores.gather(1, places.masked_fill(is_word & ~is_here, 0).unsqueeze(1)).squeeze(1)
    return picked.masked_fill(~is_here, 0)


def _lowest(scores: Tensor) -> Tensor:
    return scores.new_full((scores.shape[0],), torch.finfo(scores.dtype).min)
