"""`lines`: each way of saving memory by itself, with what it would save on a rank and what it would cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from tulle.memory.estimate import Estimate, Loss, estimate
from tulle.memory.options import Memory
from tulle.memory.recompute import repeated
from tulle.names import as_names


@dataclass(frozen=True, slots=True)
class Line:
    """What one option alone saves and costs, against a step without any.

    Args:
        option: Its name in `Memory`.
        options: The same as `estimate` takes it.
        estimate: With it alone.
        saving_bytes: Of the peak.
        sent_bytes: What each rank sends more, in a step, than data parallelism without it.
        price: The rest of its price, in words.
    """

    option: str
    options: Memory
    estimate: Estimate
    saving_bytes: int
    sent_bytes: int
    price: str

    def __str__(self) -> str:
        """The line as a plan shows it."""
        more = "more" if self.sent_bytes > 0 else "less"
        sent = f", sends {abs(self.sent_bytes) / 2**20:,.1f} MiB {more}" if self.sent_bytes else ""
        return f"{self.option:<16}saves {self.saving_bytes / 2**20:,.1f} MiB of the peak{sent}: {self.price}"


def lines(
    model: nn.Module,
    optimizer: Optimizer,
    sample: object,
    *,
    ranks: int = 1,
    recompute: Sequence[str] | None = None,
    loss: Loss | None = None,
) -> list[Line]:
    """What each option would save on a rank by itself, and at what price; the largest saving first.

    Args:
        model: As for `estimate`.
        optimizer: As for `estimate`.
        sample: One rank's batch.
        ranks: Of the data axis.
        recompute: Names of modules that could recompute; None for those that repeat.
        loss: As for `estimate`.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> best = lines(model, optimizer, torch.ones(2, 64), ranks=4)[0]
        >>> best.option, best.saving_bytes > 0
        ('precision', True)
    """
    plain = estimate(model, optimizer, sample, ranks=ranks, loss=loss)
    names = tuple(repeated(model)) if recompute is None else as_names(recompute)
    parameters_bytes = sum(p.nbytes for p in model.parameters())
    trained_bytes = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    gathered_bytes, stepped_bytes = (size * (ranks - 1) // ranks for size in (parameters_bytes, trained_bytes))
    narrowed_bytes = stepped_bytes * torch.bfloat16.itemsize // next(model.parameters()).itemsize
    narrow = Memory(shard_optimizer=True, precision="bf16")
    offers = [
        ("shard_optimizer", Memory(shard_optimizer=True), stepped_bytes, "exact"),
        ("full_shard", Memory(full_shard=True), gathered_bytes, "exact; layers wait for their parameters"),
        ("recompute", Memory(recompute=names), 0, f"exact; forward of {len(names)} modules runs twice"),
        ("precision", narrow, narrowed_bytes - stepped_bytes, "bfloat16 where float32 was"),
    ]
    found: list[Line] = []
    for option, options, sent_bytes, price in offers:
        with_it = estimate(model, optimizer, sample, ranks=ranks, options=options, loss=loss)
        saving_bytes = plain.peak_bytes - with_it.peak_bytes
        found.append(Line(option, options, with_it, saving_bytes, sent_bytes, price))
    return sorted(found, key=lambda line: -line.saving_bytes)
