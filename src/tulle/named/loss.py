"""Cross entropy over a named vocabulary, which may be split: the logits stay where they are, sums travel."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tulle.errors import ModelError
from tulle.named.dims import Dim
from tulle.named.lookup import check_indices, gather
from tulle.named.placed import shared_scope
from tulle.named.reduction import logsumexp, mean
from tulle.named.tensor import Tensor


def cross_entropy(
    logits: Tensor, targets: Tensor, over: Dim, *, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> Tensor:
    """Minus the log probability of each target, by the logits' softmax over a dimension: `targets.dims`.

    Args:
        logits: Has the dimension `over`.
        targets: Integers from 0 to below its size, of the logits' other dimensions.
        over: The vocabulary.
        label_smoothing: Probability that is spread evenly over all words.
        z_loss: Weight of the square of the log of the softmax' denominator, which keeps it near 0.

    Raises:
        ModelError: If targets are no integers or have the dimension, the smoothing is no share, or a target is beyond
            the vocabulary, as torch's -100 is: leave such out with `tn.where`.

    Source: Shazeer et al., *Mesh-TensorFlow* (2018), layers.softmax_cross_entropy_with_logits; Shoeybi et al.,
    *Megatron-LM* (2019), section 3.
    """
    scope = shared_scope([logits, targets], "cross_entropy")
    place = logits.place(over, "cross_entropy")
    if targets.dtype.is_floating_point or over in targets.dims or not 0 <= label_smoothing <= 1:
        raise ModelError(
            f"cross_entropy over {over!r} was given the targets {targets!r} and label_smoothing={label_smoothing!r}, "
            "expected integers without that dimension and a share from 0 to 1"
        )
    check_indices(targets.local, over, "cross_entropy")
    others = tuple(dim for dim in logits.dims if dim != over)
    if scope.is_whole(over) and not z_loss and targets.dims == others:
        local = logits.local.movedim(place, -1)
        flat = F.cross_entropy(
            local.reshape(-1, over.size),
            targets.local.flatten().to(torch.int64),
            reduction="none",
            label_smoothing=label_smoothing,
        )
        return Tensor(flat.view(local.shape[:-1]), others)
    denominator = logsumexp(logits, over)
    loss = denominator - gather(logits, targets, over, label="cross_entropy") * (1 - label_smoothing)
    if label_smoothing:
        loss = loss - mean(logits, over) * label_smoothing
    return loss + denominator.map(torch.square) * z_loss if z_loss else loss
