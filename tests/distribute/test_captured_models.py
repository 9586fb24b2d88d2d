"""Distributed models that are traced, scripted or exported, to run without tulle."""

import copy
import io
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

import tulle
from ranks import on_ranks
from tulle.errors import ModelError

ROWS, WIDTH, BATCH = 23, 6, 12


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """torch says that its own `torch.jit` is old."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Pairs(nn.Module):
    """Scores of pairs of rows."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.rows, self.out = nn.Embedding(ROWS, WIDTH, sparse=sparse), nn.Linear(WIDTH, 1)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return self.out(self.rows(first) * self.rows(second)).squeeze(-1)


def batches(number: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(ROWS, (2, BATCH), generator=generator).unbind() for _ in range(number)]


def train(called: Callable[..., Tensor], optimizer: SGD, rank: int = 0, ranks: int = 1) -> None:
    for first, second in batches(3):
        F.softplus(called(first.chunk(ranks)[rank], second.chunk(ranks)[rank])).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def trained(plan: object = "auto", *, sparse: bool = False) -> tuple[nn.Module, SGD, tulle.Mesh]:
    mesh = tulle.init(data=-1)
    torch.manual_seed(0)
    model = Pairs(sparse=sparse).double()
    model, optimizer = tulle.distribute(model, SGD(model.parameters(), lr=0.5), mesh, plan=plan)
    train(model, optimizer, mesh.rank, mesh.size)
    return model, optimizer, mesh


CAPTURES = {
    "trace": lambda model: torch.jit.trace(model, batches(1)[0], check_trace=False),
    "script": torch.jit.script,
    "export": lambda model: torch.export.export(model, batches(1)[0]).module(),
    "trace of a copy": lambda model: torch.jit.trace(copy.deepcopy(model), batches(1)[0]),
    "script of a copy": lambda model: torch.jit.script(copy.deepcopy(model)),
}


@on_ranks(2)
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("how", CAPTURES)
def test_replicas_are_captured_as_plain_models_are(how, sparse):
    model, _, _ = trained(sparse=sparse)
    captured = CAPTURES[how](model)
    assert torch.equal(captured(*batches(2)[1]), model(*batches(2)[1]))


@on_ranks(2)
@pytest.mark.parametrize("sparse", [False, True])
def test_a_scripted_model_trains_the_parameters_that_are_kept_in_step(sparse):
    model, optimizer, mesh = trained(sparse=sparse)
    scripted = torch.jit.script(model)
    train(scripted, optimizer, mesh.rank, mesh.size)
    torch.manual_seed(0)
    reference = Pairs(sparse=sparse).double()
    for _ in range(2):
        train(reference, SGD(reference.parameters(), lr=0.5))
    for ours, saved, theirs in zip(model.parameters(), scripted.parameters(), reference.parameters(), strict=True):
        assert saved is ours
        assert torch.allclose(ours, theirs, atol=1e-14)
    torch.jit.save(scripted, io.BytesIO())


@on_ranks(2)
@pytest.mark.parametrize("how", ["trace", "script", "export"])
@pytest.mark.parametrize("plan", ["rows", "columns"])
def test_a_model_with_split_tables_is_refused_by_its_name_for_it(plan, how):
    model, _, _ = trained(plan)
    with pytest.raises(ModelError, match=r"load tulle.full_state_dict\(model, everywhere=True\) into a plain model"):
        CAPTURES[how](model)
    if how != "export":  # which takes a module for what it calls
        with pytest.raises(ModelError, match=r"a model with split tables was to be traced, scripted or exported"):
            torch.jit.script(model.rows) if how == "script" else torch.jit.trace(model.rows, torch.arange(3))


@on_ranks(2)
@pytest.mark.parametrize("plan", ["shards", "late"])
def test_what_torch_would_read_past_python_is_not_scripted(plan):
    size = tulle.init(data=-1).size
    plans = {
        "shards": tulle.Plan({"data": size}, memory=tulle.Memory(full_shard=True)),
        "late": tulle.Plan({"data": size}, schedule="read"),
    }
    model, _, _ = trained(plans[plan])
    with pytest.raises(ModelError, match=r"a Pairs was to be scripted of which a rank may have parts, or updates that"):
        torch.jit.script(model)
