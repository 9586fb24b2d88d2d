"""What users of other libraries reported of sparse gradients, each as a test: here it works, and stays so.

`benchmarks/user-reports` shows which of these plain DistributedDataParallel still fails.
"""

from collections.abc import Callable, Sequence
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer, SparseAdam

import models
import tulle
from models import Tied, Words, build, worst_difference
from ranks import on_ranks
from tulle import RowSparse
from tulle.comm import traffic
from tulle.cost import Network
from tulle.engine import engine_of
from tulle.sync import SCHEMES

ROWS, WIDTH = 20, 3
TOLERANCE = 1e-12
STEPS = 3
EVERY_SCHEME = [*SCHEMES, "auto"]

Loss = Callable[[nn.Module, int, int], Tensor]
"""Of a model, a rank and a step."""


def rows(indices: list[int], value: float = 1.0, dtype: torch.dtype = torch.float64) -> RowSparse:
    return RowSparse(torch.tensor(indices, dtype=torch.int64), torch.full((len(indices), WIDTH), value).to(dtype), ROWS)


def check_training(
    kind: Callable[[], nn.Module],
    loss: Loss,
    mesh: tulle.Mesh,
    *,
    plan: str = "auto",
    optimizers: Callable[[nn.Module], Sequence[Optimizer]] = models.momentum,
    dtype: torch.dtype = torch.float64,
    tolerance: float = TOLERANCE,
) -> nn.Module:
    """Train beside one process that takes the mean of all ranks' losses; parameters must be equal. The model."""
    reference, model = build(kind, 0).to(dtype), build(kind, mesh.rank).to(dtype)
    model, mine = tulle.distribute(model, optimizers(model), mesh, plan=plan)
    theirs = optimizers(reference)
    for step in range(STEPS):
        loss(model, mesh.rank, step).backward()
        (sum(loss(reference, rank, step) for rank in range(mesh.size)) / mesh.size).backward()
        for optimizer in (*mine, *theirs):
            optimizer.step()
            optimizer.zero_grad()
    difference, name = worst_difference(model, reference)
    assert difference < tolerance, f"{plan}: {name} differs by {difference:.1e}"
    return model


class Table(nn.Module):
    """One table and one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, WIDTH, sparse=True, padding_idx=0)
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, ids: Tensor) -> Tensor:
        """A loss of `[samples]` row numbers."""
        return torch.tanh(self.out(self.words(ids))).sum() + self.out.weight.pow(2).sum()


def ids_of(rank: int, step: int, count: int = 6) -> Tensor:
    return torch.randint(1, ROWS, (count,), generator=torch.Generator().manual_seed(10 * rank + step))


def nothing_on_rank_0(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(ids_of(rank, step, count=6 if rank else 0))


def padding_alone_on_rank_0(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(ids_of(rank, step) * (rank > 0))


def padding_alone_everywhere(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(ids_of(rank, step) * 0)


@on_ranks(2, 3)
def test_a_rank_without_rows_does_not_hurt_the_others():
    """pytorch#87497: one rank's empty sparse gradient crashed gloo's sparse all-reduce."""
    mesh = tulle.init(data=-1)
    for scheme in EVERY_SCHEME:
        mine = rows([] if mesh.rank == 0 else [4, 4, mesh.rank])
        total = tulle.sync.all_reduce(mine, mesh["data"], scheme=scheme, op="sum")
        assert total.indices.tolist() == sorted({4, *range(1, mesh.size)}), scheme
        assert total.to_dense()[4].tolist() == [2.0 * (mesh.size - 1)] * WIDTH, scheme
        nobody = tulle.sync.all_reduce(rows([]), mesh["data"], scheme=scheme)
        assert nobody.shape == (ROWS, WIDTH), scheme
        assert len(nobody.indices) == 0, scheme
        check_training(Table, nothing_on_rank_0, mesh, plan=scheme)


class Added(Table):
    """Words and tags, whose rows are added: to both tables autograd gives one and the same gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.tags = (nn.Embedding(ROWS, WIDTH, sparse=True) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        """A loss of `[samples]` row numbers."""
        return torch.tanh(self.out(self.words(ids) + self.tags(ids))).sum()


@on_ranks(2)
def test_tables_whose_rows_are_added_get_a_gradient_each():
    """Where they are of one row, DDP divides the one gradient that both have in place for each of them."""
    mesh = tulle.init(data=-1)
    for plan, count in product(("auto", "densify", "balanced"), (1, 6)):
        check_training(Added, lambda model, rank, step, n=count: model(ids_of(rank, step, n)), mesh, plan=plan)


@on_ranks(2)
def test_a_batch_of_padding_alone_trains_like_any_other():
    """pytorch#87497 again, as it comes about: every id of a rank's batch is `padding_idx`."""
    mesh = tulle.init(data=-1)
    for plan in ("auto", "densify", "balanced"):
        check_training(Table, padding_alone_on_rank_0, mesh, plan=plan)
        check_training(Table, padding_alone_everywhere, mesh, plan=plan)


class Unused(Table):
    """Has a table that no loss depends on, and one that only some do."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.seldom = nn.Embedding(ROWS, WIDTH, sparse=True)

    def forward(self, ids: Tensor, *, is_seldom: bool = False) -> Tensor:
        """As of one table, or two."""
        return super().forward(ids) + (self.seldom(ids).sum() if is_seldom else 0.0)


def seldom_on_the_last_rank(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(ids_of(rank, step), is_seldom=rank == 1 and step > 0)


@on_ranks(2)
def test_a_table_that_is_not_used_needs_no_setting_and_gets_no_gradient():
    """pytorch#80496: `find_unused_parameters=True` broke with a sparse table that was not used."""
    mesh = tulle.init(data=-1)
    for plan in ("auto", "densify", "allgather"):
        model = check_training(Unused, seldom_on_the_last_rank, mesh, plan=plan)
        assert model.never.weight.grad is None


def cancelling(model: nn.Module, rank: int, step: int) -> Tensor:
    """From the second step on row 1's gradient is [1, -1, 0] on all ranks, row 2's cancels out between the ranks."""
    first = torch.tensor([1.0, -1.0, 0.0], dtype=torch.float64)
    if step == 0:
        return (model.words(torch.tensor([1, 2])) * (first + 2.0)).sum()
    sign = 1.0 if rank % 2 else -1.0
    return (model.words(torch.tensor([1])) * first).sum() + sign * model.words(torch.tensor([2])).sum()


def sparse_adam(model: nn.Module) -> list[Optimizer]:
    return [SparseAdam([model.words.weight], lr=0.1), SGD(model.out.parameters(), lr=0.1)]


@on_ranks(2)
def test_a_row_whose_gradient_sums_to_zero_gets_its_update():
    """DeepSpeed PR#8504: rows were found by their sum, so that [1, -1] was taken for untouched and lost its update."""
    mesh = tulle.init(data=-1)
    for scheme in EVERY_SCHEME:
        mine = rows([5], value=1.0 if mesh.rank else -1.0)
        total = tulle.sync.all_reduce(mine, mesh["data"], scheme=scheme)
        assert (total.indices.tolist(), total.values.tolist()) == ([5], [[0.0] * WIDTH]), scheme
        model = check_training(Table, cancelling, mesh, plan=scheme, optimizers=sparse_adam)
        untouched = build(Table, 0).words.weight
        assert (model.words.weight[1:3] != untouched[1:3]).all(), scheme


@on_ranks(2, 3)
def test_half_precision_gradients_are_reduced_in_their_dtype():
    """horovod#1481: compression to fp16 was not for sparse gradients. Sums are of float32, then rounded once."""
    axis = tulle.init(data=-1)["data"]
    for dtype, bits in ((torch.float16, 11), (torch.bfloat16, 8)):
        parts = [
            RowSparse(
                ids_of(rank, 0), torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(rank)).to(dtype), ROWS
            )
            for rank in range(axis.size)
        ]
        expected = sum(part.to_dense().double() for part in parts)
        for scheme in EVERY_SCHEME:
            traffic.take_labels()
            total = tulle.sync.all_reduce(parts[axis.rank], axis, scheme=scheme, op="sum")
            assert total.values.dtype == dtype, scheme
            error = (total.to_dense().double() - expected).abs().max().item()
            assert error <= axis.size * 2.0**-bits * expected.abs().max().item(), scheme


@on_ranks(2, 3)
def test_repeated_ids_are_merged_before_they_are_sent():
    """horovod#341 and #3328: every occurrence of an id was sent, and none were merged after the gather."""
    axis = tulle.init(data=-1)["data"]
    for scheme in EVERY_SCHEME:
        sent = []
        for mine in (rows([axis.rank, 9]), rows([axis.rank, 9] * 500)):
            traffic.take_labels()
            total = tulle.sync.all_reduce(mine, axis, scheme=scheme, op="sum")
            sent.append(traffic.take_labels()["gradient"].bytes_sent)
            assert total.is_coalesced, scheme
            assert total.indices.tolist() == [*range(axis.size), 9], scheme
        assert sent[0] == sent[1], f"{scheme}: 1,000 lookups of two rows are two rows"
        assert total.to_dense()[9].tolist() == [500.0 * axis.size] * WIDTH


@on_ranks(2, 3)
def test_the_result_is_reduced_and_the_argument_is_left_as_it_is():
    """pytorch#31413: all_reduce of sparse tensors returned the input unchanged, in silence."""
    axis = tulle.init(data=-1)["data"]
    for scheme in EVERY_SCHEME:
        mine = rows([3, 3, axis.rank + 5]).to_sparse_coo()
        before = mine.clone()
        total = tulle.sync.all_reduce(mine, axis, scheme=scheme, op="sum")
        assert total.to_dense()[3].tolist() == [2.0 * axis.size] * WIDTH, scheme
        assert total.to_dense()[5 : 5 + axis.size].tolist() == [[1.0] * WIDTH] * axis.size, scheme
        assert not mine.is_coalesced(), scheme
        assert torch.equal(mine._indices(), before._indices()), scheme
        assert torch.equal(mine._values(), before._values()), scheme


@on_ranks(3)
def test_mean_and_sum_are_what_they_are_called_on_three_ranks():
    """Parallax summed by default, Horovod and DDP take means; and 3 is no power of two."""
    axis = tulle.init(data=-1)["data"]
    for scheme in EVERY_SCHEME:
        mine = rows([0, axis.rank + 1], value=3.0)
        mean = tulle.sync.all_reduce(mine, axis, scheme=scheme)
        total = tulle.sync.all_reduce(mine, axis, scheme=scheme, op="sum")
        assert mean.values[:, 0].tolist() == [3.0, 1.0, 1.0, 1.0], scheme
        assert total.values[:, 0].tolist() == [9.0, 3.0, 3.0, 3.0], scheme


def next_words(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(ids_of(rank, step, count=30).view(6, 5))


@on_ranks(2, 3)
def test_a_table_tied_to_an_output_layer_is_reduced_and_not_gathered():
    """horovod#554, OpenSeq2Seq#204, *Densifying Assumed-sparse Tensors*: a sparse and a dense gradient of one table."""
    mesh = tulle.init(data=-1)
    for plan in ("auto", "allgather", "balanced"):
        model = check_training(Tied, next_words, mesh, plan=plan, optimizers=models.sgd)
        traffic.take_labels()
        model(ids_of(mesh.rank, 9, count=30).view(6, 5)).backward()
        assert model.words.weight.grad.layout == torch.strided
        sent = sum(count.bytes_sent for count in traffic.take_labels().values())
        dense = 2 * (mesh.size - 1) / mesh.size * model.words.weight.nbytes
        assert sent < 1.05 * dense + 100, "no rank's rows travel beside the table"


@on_ranks(2)
def test_micro_batches_add_up_to_one_sparse_gradient():
    """horovod `backward_passes_per_step` raised on sparse gradients."""
    mesh = tulle.init(data=-1)
    for plan in EVERY_SCHEME:
        reference = build(Table, 0)
        model, [optimizer] = tulle.distribute(model := build(Table, 0), models.sgd(model), mesh, plan=plan)
        [theirs] = models.sgd(reference)
        for step in range(STEPS):
            *first, last = ids_of(mesh.rank, step, count=8).chunk(4)
            with model.no_sync():
                for part in first:
                    model(part).backward()
            model(last).backward()
            assert model.words.weight.grad.layout == torch.sparse_coo
            for rank in range(mesh.size):
                for part in ids_of(rank, step, count=8).chunk(4):
                    (reference(part) / mesh.size).backward()
            for one in (optimizer, theirs):
                one.step()
                one.zero_grad()
        assert worst_difference(model, reference)[0] < TOLERANCE, plan


@on_ranks(2)
def test_a_large_table_with_a_small_batch_sends_its_rows_alone():
    """horovod#228: tables of [400001, 256] and batches of 4,096 were very slow."""
    axis = tulle.init(data=-1)["data"]
    ids = torch.randint(400_001, (4096,), generator=torch.Generator().manual_seed(axis.rank))
    distinct = len(ids.unique())
    grad = RowSparse(ids, torch.ones(4096, 256), 400_001)
    traffic.take_labels()
    total = tulle.sync.all_reduce(grad, axis, op="sum")
    sent = traffic.take_labels()["gradient"].bytes_sent
    assert sent <= 1.1 * distinct * (256 * 4 + 4), f"{sent} of the table's {400_001 * 256 * 4} bytes"
    both = torch.cat([torch.randint(400_001, (4096,), generator=torch.Generator().manual_seed(r)) for r in range(2)])
    numbers, counts = both.unique(return_counts=True)
    assert torch.equal(total.indices, numbers)
    assert torch.equal(total.values, counts.float().unsqueeze(1).expand(-1, 256))


@on_ranks(3)
def test_a_gradient_that_is_sparse_by_type_alone_costs_no_more_than_a_dense_one():
    """horovod#433, #2906: what is a "dense" sparse gradient? Gathered, it costs n / 2 times what it need."""
    axis = tulle.init(data=-1)["data"]
    axis.measured.append(Network(latency_s=3e-4, bandwidth_bytes_per_s=1.2e8))  # where bytes rule: 1 Gbit/s
    grad = RowSparse(torch.arange(4000), torch.ones(4000, 64), 4000)
    dense = 2 * (axis.size - 1) / axis.size * 4000 * 64 * 4
    traffic.take_labels()
    tulle.sync.all_reduce(grad, axis)
    assert traffic.take_labels()["gradient"].bytes_sent < 1.01 * dense


class Mixed(nn.Module):
    """Tables of several kinds and dimensions, looked up under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.bags = nn.EmbeddingBag(ROWS, WIDTH, sparse=True, mode="mean")
        self.wide = nn.Embedding(ROWS, 4 * WIDTH, sparse=True)
        self.out = nn.Linear(4 * WIDTH, 1)
        self.inner = nn.Linear(WIDTH, 4 * WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        """A loss of `[samples, length, 1]` row numbers."""
        narrow = self.inner(self.words(ids).mean((1, 2)) + self.bags(ids.squeeze(2)))
        return torch.tanh(self.out(narrow + self.wide(ids).sum((1, 2)))).float().pow(2).mean()


def under_autocast(model: nn.Module, rank: int, step: int) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(ids_of(rank, step, count=24).view(6, 4, 1))


@on_ranks(2)
def test_sparse_tables_of_any_shape_train_under_autocast():
    """apex#243: mixed precision and sparse gradients did not go together."""
    mesh = tulle.init(data=-1)
    check_training(Mixed, under_autocast, mesh, optimizers=models.sgd, dtype=torch.float32, tolerance=1e-5)


def words_and_tags_in_turn(model: nn.Module, rank: int, step: int) -> Tensor:
    ids = ids_of(rank, step, count=20).view(4, 5)
    return model(ids) + (model.tags(ids).sum() if (rank + step) % 2 else model.words(ids).sum())


@on_ranks(2, 3)
def test_ranks_whose_gradients_come_in_different_orders_do_not_hang():
    """horovod#2961: sparse all-reduces hung where ranks submitted them in different orders."""
    mesh = tulle.init(data=-1)
    for plan in ("auto", "allgather", "balanced"):
        check_training(Words, words_and_tags_in_turn, mesh, plan=plan)


def other_ids_where_distributed(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(ids_of(rank, step + (engine_of(model) is not None)))


@on_ranks(2)
def test_the_comparison_can_fail_where_ranks_train_on_something_else():
    with pytest.raises(AssertionError, match="differs by"):
        check_training(Table, other_ids_where_distributed, tulle.init(data=-1))
