"""The cases that users reported of sparse gradients: a model, what a rank's loss is in a step, and who reported it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer, SparseAdam

ROWS, WIDTH = 64, 8
Loss = Callable[[nn.Module, Tensor, int, int], Tensor]
"""Of a model, this rank's ids `[samples, length]`, the rank and the step."""


class Words(nn.Module):
    """A table with padding, one that is for some steps only, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, WIDTH, sparse=True, padding_idx=0)
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, ids: Tensor) -> Tensor:
        """A loss of row numbers."""
        return torch.tanh(self.out(self.words(ids))).pow(2).sum() + self.out.bias.sum()


class Added(Words):
    """Words and positions, whose rows are added: to both tables autograd gives one and the same gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = (nn.Embedding(ROWS, WIDTH, sparse=True) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        """A loss of row numbers."""
        positions = self.positions(torch.arange(ids.shape[-1]).expand_as(ids))
        return torch.tanh(self.out(self.words(ids) + positions)).pow(2).sum()


class WithUnused(Words):
    """Has a second table, which not every loss depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Embedding(ROWS, WIDTH, sparse=True)

    def forward(self, ids: Tensor, *, is_used: bool = False) -> Tensor:
        """A loss of row numbers."""
        return super().forward(ids) + (self.more(ids).sum() if is_used else 0.0)


class Tied(nn.Module):
    """One table, looked up and multiplied with."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.out = nn.Linear(WIDTH, ROWS, bias=False)
        self.out.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        """The loss of predicting each next word."""
        return F.cross_entropy(self.out(self.words(ids[:, :-1])).flatten(0, 1), ids[:, 1:].flatten())


class Functional(nn.Module):
    """A table without a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(ROWS, WIDTH))
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, ids: Tensor) -> Tensor:
        """A loss of row numbers."""
        return torch.tanh(self.out(F.embedding(ids, self.rows, sparse=True))).pow(2).sum()


def plain(model: nn.Module, ids: Tensor, rank: int, step: int) -> Tensor:
    """The model's own loss."""
    return model(ids)


def nothing_on_rank_0(model: nn.Module, ids: Tensor, rank: int, step: int) -> Tensor:
    """Rank 0 has no sample."""
    return model(ids if rank else ids[:0])


def one_id(model: nn.Module, ids: Tensor, rank: int, step: int) -> Tensor:
    """A batch of one row number."""
    return model(ids[:1, :1])


def padding_on_rank_0(model: nn.Module, ids: Tensor, rank: int, step: int) -> Tensor:
    """Rank 0 has padding only."""
    return model(ids if rank else torch.zeros_like(ids))


def used_on_rank_1(model: nn.Module, ids: Tensor, rank: int, step: int) -> Tensor:
    """Rank 1 uses the second table."""
    return model(ids, is_used=rank == 1)


def zero_sum(model: nn.Module, ids: Tensor, rank: int, step: int) -> Tensor:
    """From the second step on, every row's gradient is [1, -1, 0, ...], which sums to zero."""
    direction = torch.zeros(WIDTH, dtype=torch.float64)
    direction[:2] = torch.tensor([1.0, -1.0 if step else 1.0])
    # Through the model, so that what wraps it sees the forward.
    return model(ids) * 0.0 + (_inner(model).words(torch.tensor([1, 2])) * direction).sum()


def under_autocast(model: nn.Module, ids: Tensor, rank: int, step: int) -> Tensor:
    """In bfloat16 where autocast says so."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(ids).float()


def sgd(model: nn.Module) -> Sequence[Optimizer]:
    """Plain SGD."""
    return [SGD(model.parameters(), lr=0.1)]


def sparse_adam(model: nn.Module) -> Sequence[Optimizer]:
    """An optimizer that updates a row that was touched even if its gradient is zero."""
    return [SparseAdam([_inner(model).words.weight], lr=0.1), SGD(_inner(model).out.parameters(), lr=0.1)]


def _inner(model: nn.Module) -> Words:
    return cast("Words", getattr(model, "module", model))  # DDP's wrapper holds it


@dataclass(frozen=True)
class Case:
    """One report.

    Args:
        name: What the case is.
        thread: Who reported it.
        model: What is trained.
        loss: Of one rank in one step.
        optimizers: What trains it.
        ddp: What DDP is given.
        dtype: Of the parameters.
        tolerance: By which parameters may differ from one process, relative.
        micro_batches: Backward passes for each step of the optimizer.
        hook: Whether DDP is to compress gradients to float16, which tulle is told by `wire_dtype`.
    """

    name: str
    thread: str
    model: Callable[[], nn.Module] = Words
    loss: Loss = plain
    optimizers: Callable[[nn.Module], Sequence[Optimizer]] = sgd
    ddp: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64
    tolerance: float = 1e-12
    micro_batches: int = 1
    hook: bool = False


CASES = [
    Case("sparse tables at all", "pytorch#17356"),
    Case("tables whose rows are added", "found here", model=Added),
    Case("tables whose rows are added, one id a rank", "found here", Added, one_id),
    Case("a rank without samples", "pytorch#87497", loss=nothing_on_rank_0),
    Case("a rank with padding only", "pytorch#87497", loss=padding_on_rank_0),
    Case("an unused table", "pytorch#80496", model=WithUnused),
    Case("an unused table, find_unused_parameters", "pytorch#80496", WithUnused, ddp={"find_unused_parameters": True}),
    Case(
        "a table that one rank uses, find_unused_parameters",
        "pytorch#80496",
        WithUnused,
        used_on_rank_1,
        ddp={"find_unused_parameters": True},
    ),
    Case("a row whose gradient sums to zero", "DeepSpeed PR#8504", loss=zero_sum, optimizers=sparse_adam),
    Case("float16 gradients", "horovod#1481", dtype=torch.float16, tolerance=2e-2),
    Case("bfloat16 gradients", "horovod#1481", dtype=torch.bfloat16, tolerance=1e-1),
    Case("gradients compressed to float16", "horovod#1481", dtype=torch.float32, tolerance=2e-2, hook=True),
    Case("autocast", "apex#243", loss=under_autocast, dtype=torch.float32, tolerance=1e-5),
    Case("a table tied to the output layer", "horovod#554", model=Tied),
    Case("four micro-batches", "horovod `backward_passes_per_step`", micro_batches=4),
    Case("a table that no module owns", "pytorch#17356", model=Functional),
    Case("gradients as views of buckets", "pytorch#17356", ddp={"gradient_as_bucket_view": True}),
]
