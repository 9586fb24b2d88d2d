"""`ShardedSoftmax`: an output layer and its cross entropy in one module, over a table that may be split by rows."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from tulle.errors import ModelError
from tulle.softmax.layer import Reduction, SoftmaxLayer


class ShardedSoftmax(SoftmaxLayer):
    """`nn.Linear(width, num_rows)` and `nn.CrossEntropyLoss` in one module: the same loss, in bounded memory.

    `tulle.distribute` may split its weight, the table, by rows. Then each rank computes the logits of all ranks' tokens
    for the rows that it owns: hidden states are sent, neither rows nor logits. Before that, and on one process, it
    computes the same without sending anything.

    Args:
        num_rows: How many classes there are, words of a vocabulary say.
        width: Of hidden states.
        weight: A parameter that another module has too (`embedding.weight`), instead of `num_rows` and `width`.
        bias: Whether each class has a bias, or the parameter (`linear.bias`) that it is. It stays whole on all ranks.
        label_smoothing: Share of the target's probability that is spread over all classes.
        ignore_index: The target of tokens that do not count.
        reduction: `"mean"` over this rank's tokens that count, `"sum"`, or `"none"`.

    Attributes:
        weight: `[num_rows, width]`, or what this rank has of it.
        bias: `[num_rows]` or None.
        logits_bytes: How much memory logits may take on this rank. They are computed for some tokens at a time; those
            that fit are kept for backward, which computes the others once more.

    Raises:
        ModelError: If the arguments contradict each other.

    Example:
        >>> import torch, tulle
        >>> words = torch.nn.Embedding(1000, 16)
        >>> softmax = ShardedSoftmax(weight=words.weight)
        >>> hidden, target = torch.randn(2, 5, 16), torch.randint(1000, (2, 5))
        >>> loss = softmax(hidden, target)
        >>> logits = torch.nn.functional.linear(hidden, words.weight).flatten(0, 1)
        >>> torch.allclose(loss, torch.nn.functional.cross_entropy(logits, target.flatten()))
        True

    Source: Shoeybi et al., *Megatron-LM* (2019), section 3, which splits the output layer alike.
    """

    def __init__(
        self,
        num_rows: int | None = None,
        width: int | None = None,
        *,
        weight: Tensor | None = None,
        bias: bool | Tensor | None = False,
        label_smoothing: float = 0.0,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__(label_smoothing=label_smoothing, ignore_index=ignore_index, reduction=reduction)
        is_tied = isinstance(weight, nn.Parameter)
        if {num_rows is None, width is None} != {is_tied} or (weight is not None) != is_tied:
            named = {"num_rows": num_rows, "width": width, "weight": weight}
            shown = [
                f"{name}={type(given).__name__ if isinstance(given, Tensor) else given}"
                for name, given in named.items()
            ]
            raise ModelError(
                f"ShardedSoftmax was given {', '.join(shown[:2])} and {shown[2]}: give it either both numbers, or a "
                "parameter as weight"
            )
        shape = list(weight.shape) if isinstance(weight, nn.Parameter) else [num_rows, width]
        if len(shape) != 2 or not all(isinstance(size, int) and size >= 0 for size in shape):
            raise ModelError(f"ShardedSoftmax was given a table of shape {shape}, expected [num_rows, width]")
        named = {"weight": weight, "bias": bias}
        self._drawn = [name for name, given in named.items() if not isinstance(given, nn.Parameter)]
        self.weight = weight if is_tied else nn.Parameter(torch.empty(num_rows or 0, width or 0))
        self.bias = _bias_of(len(self.weight), given=bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters as `nn.Linear` does; those that were given stay as they are."""
        bound = 1 / math.sqrt(max(1, self.weight.shape[1]))
        for name in self._drawn:
            if (parameter := getattr(self, name)) is not None:
                nn.init.uniform_(parameter, -bound, bound)

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        """The loss: see `exact_loss`. Every rank that shares the table must call it, and its backward."""
        return self.exact_loss(hidden, target)

    def table_and_bias(self) -> tuple[Tensor, Tensor | None]:
        """`[num_rows, width]`, or what this rank has of it, and `[num_rows]` or None."""
        return self.weight, self.bias

    def extra_repr(self) -> str:
        """What `print` shows."""
        return f"{list(self.weight.shape)}, bias={self.bias is not None}, reduction={self.reduction!r}"


def _bias_of(num_rows: int, *, given: bool | Tensor | None) -> nn.Parameter | None:
    """The parameter that was given, a new one, or none."""
    if isinstance(given, Tensor):
        if not isinstance(given, nn.Parameter) or given.shape != (num_rows,):
            kind = f"{type(given).__name__} of shape {list(given.shape)}"
            raise ModelError(f"ShardedSoftmax was given a {kind} as bias, expected a parameter of shape [{num_rows}]")
        return given
    return nn.Parameter(torch.empty(num_rows)) if given else None
