"""Classes that derive from torch's embeddings and look up in a way of their own, on tables that are split."""

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from split_networks import step, worst
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

import tulle
from crossing import crossed
from models import batches
from ranks import on_ranks
from tulle.errors import ModelError
from tulle.parts import Part
from tulle.placing import placements_of
from tulle.profiling.tables import looked_up

ROWS, WIDTH, OFFSET = 42, 6, 2


class Scaled(nn.Embedding):
    """As in BART, M2M100, Marian and Gemma 3."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.weight.shape[1] ** 0.5


class Hashed(nn.Embedding):
    """It goes by how many rows there are."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(7 * input % len(self.weight)) / self.weight.numel()


class Shifted(nn.Embedding):
    """As the learned positions of BART and OPT; the ids are computed."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input + OFFSET)


class Called(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return nn.Embedding.forward(self, input).tanh()


class Functional(nn.Embedding):
    """Options are what it passes, whatever the module has been made with."""

    def forward(self, input: Tensor) -> Tensor:
        return F.embedding(input, self.weight, padding_idx=-1, sparse=self.sparse)


class Bounded(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return F.embedding(input, self.weight, max_norm=0.5)


class Counted(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return F.embedding(input, self.weight, scale_grad_by_freq=True)


class Weighted(nn.EmbeddingBag):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(
            input, per_sample_weights=torch.linspace(-1, 1, input.shape[1]).double().expand_as(input)
        )


class Pooled(nn.EmbeddingBag):
    def forward(self, input: Tensor) -> Tensor:
        offsets = torch.arange(0, input.numel() + 1, input.shape[1])
        return F.embedding_bag(input.flatten(), self.weight, offsets, mode="mean", include_last_offset=True)


class Indexed(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        first, last = self.weight.index_select(0, input[:, 0]), torch.index_select(self.weight, -2, index=input[:, -1])
        return self.weight[input] + (first * last)[:, None]


class Row(nn.Embedding):
    """A row that stands for something, as a mask does."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) - self.weight[0] * self.weight[-1]


class Taken(nn.Embedding):
    """Of rows by their numbers it takes some columns."""

    def forward(self, input: Tensor) -> Tensor:
        last = torch.tensor(ROWS - 1)
        rows = self.weight[input, :] * self.weight[input, 1:2] - self.weight[input, ..., -1][..., None]
        return rows + self.weight[[1, -2]].sum(0) * self.weight[last] + self.weight[last, 2:3] * self.weight[-3, ...]


class Patched(nn.Embedding):
    """Its forward is set on the object, as tools do that wrap it."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        own = self.forward
        self.forward = lambda ids: own(ids).sin()


KINDS = {
    "scaled": lambda: Scaled(ROWS, WIDTH, padding_idx=1),
    "scaled sparse": lambda: Scaled(ROWS, WIDTH, sparse=True),
    "hashed": lambda: Hashed(ROWS, WIDTH),
    "shifted": lambda: Shifted(ROWS, WIDTH),
    "called": lambda: Called(ROWS, WIDTH),
    "functional": lambda: Functional(ROWS, WIDTH),
    "functional sparse": lambda: Functional(ROWS, WIDTH, sparse=True),
    "bounded": lambda: Bounded(ROWS, WIDTH),
    "counted": lambda: Counted(ROWS, WIDTH),
    "weighted": lambda: Weighted(ROWS, WIDTH, mode="sum", sparse=True),
    "pooled": lambda: Pooled(ROWS, WIDTH),
    "indexed": lambda: Indexed(ROWS, WIDTH),
    "row": lambda: Row(ROWS, WIDTH),
    "taken": lambda: Taken(ROWS, WIDTH),
    "patched": lambda: Patched(ROWS, WIDTH),
}


class Reader(nn.Module):
    """A lookup and a layer above."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table, self.out = table, nn.Linear(WIDTH, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.table(ids)).tanh().pow(2).flatten(1).mean()


class Asks(Reader):
    """It goes by how many rows there are, too, and has a penalty of their mean square."""

    def forward(self, ids: Tensor) -> Tensor:
        weight = self.table.weight
        return super().forward(3 * ids % weight.shape[0]) + weight.pow(2).sum() / weight.numel() / weight.size(-1)


class Beside(Reader):
    """It looks up past its module, too."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + F.embedding(ids[:, :1], self.table.weight).pow(2).mean()


class Again(Reader):
    """Its lookup is done again in backward."""

    def forward(self, ids: Tensor) -> Tensor:
        return checkpoint(super().forward, ids, use_reentrant=False)


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build().double()


def trained(build: Callable[[], nn.Module], placement: str, *, is_ahead: bool = False) -> float:
    """How far a model is from one process after five steps."""
    mesh = tulle.init(data=-1)
    reference, model = (seeded(build) for _ in range(2))
    theirs, ours = SGD(reference.parameters(), lr=0.5), SGD(model.parameters(), lr=0.5)
    model, ours = tulle.distribute(model, ours, mesh, plan={"table.weight": placement})
    whole = batches(5, 4 * mesh.size)
    mine = [ids.chunk(mesh.size)[mesh.rank] for ids in whole]
    for ids, part in zip(whole, tulle.lookahead(mine) if is_ahead else mine, strict=True):
        step(reference, [theirs], [reference(ids)])
        step(model, [ours], [model(part)])
    return worst(model, reference)


@on_ranks(2, 3)
@pytest.mark.parametrize(
    ("kind", "placement", "is_ahead"),
    crossed(
        KINDS,
        ("rows", "columns"),
        (False, True),
        without=lambda kind, placement, _: (kind, placement) == ("bounded", "columns"),
    ),
)
def test_lookups_of_every_way_give_the_numbers_of_one_process(kind, placement, is_ahead):
    assert trained(lambda: Reader(KINDS[kind]()), placement, is_ahead=is_ahead) < 1e-12


@on_ranks(2)
@pytest.mark.parametrize("kind", [Asks, Beside, Again])
@pytest.mark.parametrize("table", [nn.Embedding, Scaled])
def test_what_is_asked_past_the_module_and_again_in_backward_does_too(kind, table):
    assert trained(lambda: kind(table(ROWS, WIDTH)), "rows") < 1e-12


@on_ranks(2)
def test_a_compiled_model_does_too():
    def build() -> nn.Module:
        model = Reader(Scaled(ROWS, WIDTH))
        model.compile(backend="eager")
        return model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        assert trained(build, "rows") < 1e-12
    torch.compiler.reset()


class Product(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return F.one_hot(input, ROWS).to(self.weight.dtype) @ self.weight


class Paired(nn.Embedding):
    """A column of its own for each id."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + self.weight[input, input % WIDTH].unsqueeze(-1)


class Changed(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return F.embedding(input, 2 * self.weight)


@on_ranks(2)
@pytest.mark.parametrize("table", [Product, Changed, Paired])
def test_a_forward_that_reads_all_rows_is_refused(table):
    with pytest.raises(ModelError, match=r"was given the table 'table.weight' as if all of it were here"):
        trained(lambda: Reader(table(ROWS, WIDTH)), "rows")


@on_ranks(2)
def test_a_gradient_that_would_be_sparse_and_dense_is_refused():
    with pytest.raises(ModelError, match=r"embedding was asked for rows of 'table.weight' with sparse=False"):
        trained(lambda: Beside(nn.Embedding(ROWS, WIDTH, sparse=True)), "rows")


@on_ranks(2)
def test_norms_of_whole_rows_are_refused_where_only_columns_lie():
    with pytest.raises(ModelError, match=r"rows of 'table.weight' with max_norm=0.5, which needs norms of whole rows"):
        trained(lambda: Reader(Bounded(ROWS, WIDTH)), "columns")


@pytest.mark.parametrize(
    ("table", "is_read"),
    [
        (Scaled, False),
        (Functional, False),
        (Bounded, True),
        (Indexed, False),
        (Product, True),
        (Changed, True),
        (Row, False),
        (Taken, False),
        (Paired, True),
    ],
)
def test_a_run_tells_whether_a_forward_reads_all_rows(table, is_read):
    model = Reader(table(ROWS, WIDTH))
    assert looked_up(model, batches(1, 4)[0])["table.weight"].is_read is is_read


def test_a_table_is_split_by_itself_only_if_a_run_has_told():
    model = Reader(Scaled(ROWS, WIDTH))
    assert placements_of(model, [], ranks=2) == {"table.weight": ()}
    assert placements_of(model, [], ranks=2, is_seen=True) == {"table.weight": ("rows", "columns")}


def test_a_forward_that_did_not_run_may_read_all_rows():
    model = nn.ModuleDict({"table": Reader(Scaled(ROWS, WIDTH)), "other": Reader(Scaled(ROWS, WIDTH))})
    model.forward = lambda ids: model["table"](ids)
    found = looked_up(model, batches(1, 4)[0])
    assert {name: one.is_read for name, one in found.items()} == {
        "table.table.weight": False,
        "other.table.weight": True,
    }


@on_ranks(2)
@pytest.mark.parametrize("kind", [Scaled, Product])
def test_what_was_built_without_memory_is_split_if_nothing_says_that_its_forward_reads_all_rows(kind):
    """A forward of its own may: then it is kept whole."""
    mesh = tulle.init(data=-1)
    with tulle.deferred_init():
        model = nn.ModuleDict({"plain": nn.Embedding(ROWS, WIDTH), "own": kind(ROWS, WIDTH)})
    tulle.distribute(model, SGD(model.parameters(), lr=0.5), mesh)
    assert [isinstance(one.weight, Part) for one in model.values()] == [True, False]
