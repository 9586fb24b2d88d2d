"""The profile finds the tables of a model and the rows that a batch touches, and leaves no trace."""

import random

import pytest
import torch
from torch import Tensor, nn

from tulle.profiling import call, measure, rows_touched, sparse_tables
from tulle.profiling.table_profiles import table_profiles
from tulle.profiling.tables import looked_up

ROWS, WIDTH = 20, 3


def counted(touched: dict[str, torch.Tensor]) -> dict[str, int]:
    assert all(torch.equal(rows, rows.unique()) for rows in touched.values())
    return {name: len(rows) for name, rows in touched.items()}


def table(**options) -> nn.Embedding:
    return nn.Embedding(ROWS, WIDTH, sparse=True, **options)


class Pair(nn.Module):
    """Two tables that may be one, called by position or by keyword."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        return self.first(one).sum() + self.second(input=two).sum()


def test_trained_tables_with_sparse_gradients_are_found_by_their_parameters_name():
    model = nn.ModuleDict(
        {
            "words": table(),
            "bag": nn.EmbeddingBag(ROWS, WIDTH, sparse=True),
            "dense": nn.Embedding(ROWS, WIDTH),
            "frozen": table().requires_grad_(requires_grad=False),
            "layer": nn.Linear(2, 2),
        }
    )
    found = sparse_tables(model)
    assert list(found) == ["words.weight", "bag.weight"]
    assert found["words.weight"] is model["words"]


def test_a_shared_table_is_found_once():
    model = Pair(table(), table())
    model.second.weight = model.first.weight
    assert list(sparse_tables(model)) == ["first.weight"]
    assert list(sparse_tables(Pair(model.first, model.first))) == ["first.weight"]


def test_distinct_rows_are_counted():
    assert counted(rows_touched(table(), torch.tensor([[3, 1, 3], [1, 1, 19]]))) == {"weight": 3}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_may_be_of_either_dtype(dtype):
    assert counted(rows_touched(table(), torch.tensor([3, 1, 3], dtype=dtype))) == {"weight": 2}


def test_padding_is_no_row():
    assert counted(rows_touched(table(padding_idx=0), torch.tensor([0, 5, 0, 6]))) == {"weight": 2}
    assert counted(rows_touched(table(padding_idx=-1), torch.tensor([ROWS - 1, 5]))) == {"weight": 1}
    assert counted(rows_touched(table(padding_idx=0), torch.tensor([0, 0]))) == {"weight": 0}


def test_padding_of_a_bag_is_no_row():
    bag = nn.EmbeddingBag(ROWS, WIDTH, sparse=True, mode="sum", padding_idx=2)
    assert counted(rows_touched(bag, torch.tensor([[1, 2], [2, 3]]))) == {"weight": 2}


def test_a_bag_with_offsets_counts_its_ids_only():
    bag = nn.EmbeddingBag(ROWS, WIDTH, sparse=True, mode="sum")
    assert counted(rows_touched(bag, (torch.tensor([7, 7, 8]), torch.tensor([0, 2])))) == {"weight": 2}
    assert counted(rows_touched(bag, {"input": torch.tensor([7, 9, 8]), "offsets": torch.tensor([0])})) == {"weight": 3}


def test_lookups_of_a_shared_table_are_united():
    model = Pair(table(), table())
    model.second.weight = model.first.weight
    assert counted(rows_touched(model, (torch.tensor([1, 2]), torch.tensor([2, 3])))) == {"first.weight": 3}
    model = Pair(model.first, model.first)
    assert counted(rows_touched(model, (torch.tensor([1, 2]), torch.tensor([2, 3])))) == {"first.weight": 3}


def test_each_table_has_its_own_count():
    model = Pair(table(padding_idx=1), table())
    sample = {"one": torch.tensor([1, 2]), "two": torch.tensor([1, 2])}
    assert counted(rows_touched(model, sample)) == {"first.weight": 1, "second.weight": 2}


def test_a_table_that_the_batch_does_not_reach_touches_no_row():
    model = nn.Sequential(table())
    model.append(nn.Identity())
    model[1].spare = table()
    assert counted(rows_touched(model, torch.tensor([4]))) == {"0.weight": 1, "1.spare.weight": 0}


def test_a_sample_is_passed_as_the_model_is_called():
    class Recorder(nn.Module):
        def forward(self, *positional, **keywords):
            return positional, keywords

    assert call(Recorder(), {"x": 1, "y": 2}) == ((), {"x": 1, "y": 2})
    assert call(Recorder(), (1, 2)) == ((1, 2), {})
    assert call(Recorder(), [1, 2]) == (([1, 2],), {})


class Restless(nn.Module):
    """Draws random numbers, counts its calls in place and anew, and bounds its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.words = table(max_norm=0.5)
        self.dropout = nn.Dropout()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, ids: Tensor) -> Tensor:
        self.calls += 1
        return self.norm(self.dropout(self.words(ids))) * random.random()


def test_weights_buffers_gradients_and_random_states_are_as_before():
    torch.manual_seed(0)
    model = Restless()
    model.words.weight.data.mul_(10)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    rows_touched(model, torch.arange(10))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(p.grad is None for p in model.parameters())
    assert model.words.max_norm == 0.5
    assert model.training


def test_pythons_random_state_is_as_before():
    state = random.getstate()
    rows_touched(Restless(), torch.arange(10))
    assert random.getstate() == state


def test_a_buffer_that_forward_replaces_is_as_before():
    class Replacing(Restless):
        def forward(self, ids: Tensor) -> Tensor:
            self.calls = self.calls + 1
            return self.words(ids)

    model = Replacing()
    rows_touched(model, torch.arange(10))
    assert model.calls.item() == 0


def test_the_same_forward_without_the_profile_does_leave_traces():
    torch.manual_seed(0)
    model = Restless()
    model.words.weight.data.mul_(10)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    with torch.no_grad():
        model(torch.arange(10))
    changed = [name for name, value in model.state_dict().items() if not torch.equal(value, before[name])]
    assert {"words.weight", "calls", "norm.running_mean"} <= set(changed)
    assert not torch.equal(torch.get_rng_state(), random_state)


def test_no_hook_stays_behind_even_if_the_forward_fails():
    model = Restless()
    with pytest.raises(IndexError):
        rows_touched(model, torch.tensor([ROWS]))
    assert not model.words._forward_pre_hooks
    assert model.words.max_norm == 0.5
    assert model.calls.item() == 0


class Positions(nn.Embedding):
    """A table whose own `forward` takes a shape, as BART's positions do."""

    def forward(self, shape: torch.Size) -> torch.Tensor:
        return super().forward(torch.arange(shape[-1]) + 2)


class Positioned(nn.Module):
    """Calls such a table, and reads the other one past its module."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = table(), Positions(ROWS, WIDTH, sparse=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(ids, self.words.weight) + self.positions(ids.shape)


def test_lookups_are_seen_where_they_are_made():
    touched = rows_touched(Positioned(), torch.tensor([[7, 7, 9]]))
    assert {name: rows.tolist() for name, rows in touched.items()} == {
        "words.weight": [7, 9],
        "positions.weight": [2, 3, 4],
    }


def test_what_a_forward_writes_in_a_parameter_is_undone():
    model = Pair(table(), table())
    model.register_forward_pre_hook(lambda pair, _: setattr(pair, "seen", pair.first.weight.data.mul_(2)))
    before = model.first.weight.detach().clone()
    rows_touched(model, (torch.tensor([1, 2]), torch.tensor([2, 3])))
    assert torch.equal(model.first.weight, before)


class Output(nn.Module):
    """Reads its table for its output, too: all rows of it, or a row past the module."""

    def __init__(self, output, *, is_sparse: bool) -> None:
        super().__init__()
        self.table, self.other = nn.Embedding(10, 4, sparse=is_sparse), nn.Embedding(10, 4)
        self.output = output

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found = self.table(ids) + self.other(ids)
        assert self.table.weight.shape[1] == 4
        return self.output(found, self.table.weight)


@pytest.mark.parametrize(
    ("output", "is_sparse", "is_read"),
    [
        (lambda found, weight: found @ weight.T, False, True),
        (nn.functional.linear, False, True),
        (lambda found, weight: found + nn.functional.embedding(torch.tensor([3]), weight), False, False),
        (lambda found, weight: found + nn.functional.embedding(torch.tensor([3]), weight), True, True),
        (lambda found, weight: found.to(weight.dtype), False, False),
    ],
    ids=["product", "linear", "lookup", "dense-lookup", "dtype"],
)
def test_a_table_that_is_read_past_its_modules_is_known(output, is_sparse, is_read):
    model = Output(output, is_sparse=is_sparse)
    found = looked_up(model, torch.tensor([1, 2]))
    assert [found[f"{name}.weight"].is_read for name in ("table", "other")] == [is_read, False]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    axis = measure._alone()
    looks = [{name: one for name, one in found.items()}]
    tables = table_profiles(model, [optimizer], looks, dict.fromkeys(found, ""), axis)
    assert {one.name: bool(one.placements) for one in tables} == {"table.weight": not is_read, "other.weight": True}
