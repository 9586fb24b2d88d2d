"""What some ranks saved other ranks load, however many, and however each has its tables split; plain PyTorch too."""

import contextlib
import io
import math
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.optim import SGD, Adam, Optimizer, SparseAdam

import tulle
from models import batches, build
from ranks import on_ranks, run_on_ranks
from tulle.checkpoint import full_optimizer_state_dict
from tulle.comm import gather_values
from tulle.engine import engine_of
from tulle.errors import CheckpointError
from tulle.tables import Split, natural, split_of
from tulle.tables.natural import RowOrder, natural_order

WORDS, WIDTH = 53, 6
PLANS: dict[str, dict[str, str]] = {
    "whole": {},
    "rows": {"words.weight": "rows", "tags.weight": "rows"},
    "columns": {"words.weight": "columns", "tags.weight": "columns"},
    "mixed": {"words.weight": "rows", "tags.weight": "columns"},
}


class Reader(nn.Module):
    """A model with a sparse and a dense table, both known by two names."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, sparse=True)
        self.tags = nn.Embedding(WORDS, WIDTH)
        self.again = nn.Embedding(WORDS, WIDTH, sparse=True)
        self.again.weight = self.words.weight
        self.norm = nn.BatchNorm1d(WIDTH)
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, ids: Tensor) -> Tensor:
        mixed = self.words(ids).mean(1) + self.tags(ids % 7).sum(1) + self.again(ids % 5).sum(1)
        return self.out(self.norm(mixed)).pow(2).mean()


def optimizers_of(model: Reader) -> list[Optimizer]:
    rest = [p for name, p in model.named_parameters() if name != "words.weight"]
    return [SparseAdam([model.words.weight], lr=0.1), Adam(rest, lr=0.1)]


def trained(seed: int, steps: int = 2) -> tuple[Reader, list[Optimizer]]:
    """In one process, alike everywhere."""
    model = build(Reader, seed)
    optimizers = optimizers_of(model)
    for ids in batches(steps, 8):
        model(ids).backward()
        for one in optimizers:
            one.step()
            one.zero_grad()
    return model, optimizers


def put(plan: str, model: nn.Module, optimizers: list[Optimizer]) -> tuple[nn.Module, list[Optimizer]]:
    """On all ranks."""
    mesh = tulle.init(data=-1)
    return tulle.distribute(model, optimizers, mesh, plan=PLANS[plan] if mesh.size > 1 else "auto")


def part(value: Tensor, split: Split | None) -> Tensor:
    return value if split is None or value.shape != split.shape else split.take(value)


def assert_has(model: nn.Module, optimizers: list[Optimizer], expected: nn.Module, theirs: list[Optimizer]) -> None:
    """To the last bit, of parameters and optimizer states what belongs to this rank."""
    splits = {name: split_of(p) for name, p in model.named_parameters(remove_duplicate=False)}
    for name, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], part(value, splits.get(name))), name
    for one, other in zip(optimizers, theirs, strict=True):
        parameters = [p for group in one.param_groups for p in group["params"]]
        states = one.state_dict()["state"]
        assert states.keys() == other.state_dict()["state"].keys()
        for number, state in other.state_dict()["state"].items():
            for key, value in state.items():
                expected_value = part(torch.as_tensor(value), split_of(parameters[number]))
                assert torch.equal(torch.as_tensor(states[number][key]), expected_value), (number, key)


@contextlib.contextmanager
def small_blocks() -> Iterator[None]:
    """Of two rows, so that a table has several, and some ranks have more of them than others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(natural, "BLOCK_BYTES", 2 * WIDTH * 8)
        yield


def save_on_ranks(path: Path, plan: str, *, asynchronous: bool) -> None:
    model, optimizers = put(plan, *trained(0))
    with small_blocks():
        saving = tulle.save(path, model, optimizers, asynchronous=asynchronous, step=2)
    if saving is not None:
        with torch.no_grad():  # training goes on
            for parameter in model.parameters():
                parameter.zero_()
    finish(saving)


def load_on_ranks(path: Path, plan: str) -> None:
    model = build(Reader, 1)
    model, optimizers = put(plan, model, optimizers_of(model))
    with small_blocks():
        assert tulle.load(path, model, optimizers) == {"step": 2}
    assert_has(model, optimizers, *trained(0))


WAYS = [
    (2, "rows", 3, "columns"),
    (3, "columns", 2, "rows"),
    (4, "rows", 3, "rows"),
    (3, "rows", 4, "mixed"),
    (2, "rows", 1, "whole"),
    (1, "whole", 3, "mixed"),
    (2, "whole", 2, "rows"),
    (2, "rows", 2, "whole"),
]
QUICK = WAYS[:2]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["at once", "behind"])
@pytest.mark.parametrize(
    ("saved_by", "saved_as", "loaded_by", "loaded_as"),
    [way if way in QUICK else pytest.param(*way, marks=pytest.mark.slow) for way in WAYS],
)
def test_any_ranks_load_what_any_ranks_saved(saved_by, saved_as, loaded_by, loaded_as, asynchronous, tmp_path):
    run_on_ranks(saved_by, save_on_ranks, path=tmp_path / "a", plan=saved_as, asynchronous=asynchronous)
    run_on_ranks(loaded_by, load_on_ranks, path=tmp_path / "a", plan=loaded_as)


def save_as_owners_have_it(path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            RowOrder,
            "collect",
            lambda order, part, wanted: part[: len(wanted[order.split.axis.rank])],
        )
        tulle.save(path, *put("rows", *trained(0)), step=2)


def test_rows_in_another_order_would_be_noticed(tmp_path):
    run_on_ranks(2, save_as_owners_have_it, path=tmp_path / "a")
    with pytest.raises(pytest.fail.Exception, match="AssertionError"):
        run_on_ranks(2, load_on_ranks, path=tmp_path / "a", plan="rows")


@pytest.mark.parametrize(("ranks", "plan"), [(1, "whole"), (3, "whole"), (3, "mixed")])
def test_plain_pytorch_reads_it_and_every_tensor_is_written_once(ranks, plan, tmp_path):
    run_on_ranks(ranks, save_on_ranks, path=tmp_path / "a", plan=plan, asynchronous=False)
    dcp_to_torch_save(tmp_path / "a", tmp_path / "one.pt")
    loaded = torch.load(tmp_path / "one.pt")
    model, optimizers = trained(0)
    assert loaded["model"].keys() == model.state_dict().keys()
    assert all(torch.equal(loaded["model"][name], value) for name, value in model.state_dict().items())
    assert torch.equal(
        loaded["optimizers"][1]["state"]["0"]["exp_avg_sq"], optimizers[1].state_dict()["state"][0]["exp_avg_sq"]
    )
    metadata = FileSystemReader(tmp_path / "a").read_metadata()
    places = [(info.relative_path, info.offset) for info in metadata.storage_data.values()]
    elements = sum(math.prod(chunk.sizes) for one in metadata.state_dict_metadata.values() for chunk in one.chunks)
    names = sum(math.prod(one.size) for one in metadata.state_dict_metadata.values())
    assert elements == names
    aliased = len(metadata.state_dict_metadata["model.again.weight"].chunks)
    assert len(set(places)) == len(places) - aliased, "of two names of one tensor one is written"


class Momentum(nn.Module):
    """Sparse gradients whose momentum is sparse, in one process."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, sparse=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.words(ids).pow(2).mean()


def with_momentum(plan: str, path: Path, *, is_saving: bool) -> Tensor:
    mesh = tulle.init(data=-1)
    model = build(Momentum, 0 if is_saving else 1)
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
    model, optimizer = tulle.distribute(model, optimizer, mesh, plan=PLANS[plan] and {"words.weight": plan})
    if not is_saving:
        tulle.load(path, model, optimizer)
    for ids in batches(3, 8)[slice(2) if is_saving else slice(2, 3)]:
        model(ids).backward()
        optimizer.step()
        optimizer.zero_grad()
    if is_saving:
        tulle.save(path, model, optimizer)
    split = split_of(model.words.weight)
    weight = model.words.weight.detach()
    return weight if split is None else natural_order(split).collect(weight, [range(WORDS)] * mesh.size)


def momentum_in_one_process() -> Tensor:
    model = build(Momentum, 0)
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
    for ids in batches(3, 8):
        model(ids).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.words.weight.detach()


@pytest.mark.parametrize(("saved_as", "loaded_as"), [("rows", "columns"), ("whole", "rows"), ("columns", "whole")])
def test_the_momentum_of_sparse_gradients_goes_along(saved_as, loaded_as, tmp_path):
    run_on_ranks(2, with_momentum, plan=saved_as, path=tmp_path / "a", is_saving=True)
    expected = momentum_in_one_process()
    for weight in run_on_ranks(3, with_momentum, plan=loaded_as, path=tmp_path / "a", is_saving=False):
        torch.testing.assert_close(weight, expected, rtol=1e-12, atol=1e-14)


def finish(saving: Future[None] | None) -> None:
    if saving is not None:
        saving.result()


@on_ranks(3)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["at once", "behind"])
def test_a_rank_that_cannot_write_fails_all_and_nobody_waits_for_its_rows(asynchronous, tmp_path):
    model, optimizers = put("rows", *trained(0))
    rank = engine_of(model).axis.rank
    tulle.save(tmp_path / "a", model, optimizers, step=1)
    complete = torch.save

    def full(state: object, file: io.IOBase, **options: bool) -> None:
        if rank == 1 and not isinstance(file, io.BytesIO):
            raise OSError(28, "No space left on device")
        complete(state, file, **options)

    with small_blocks(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "save", full)
        text = r"cannot write the checkpoint '.*a': \[Errno 28\] No space left on device; an older one of that name"
        with pytest.raises(CheckpointError, match=text):
            finish(tulle.save(tmp_path / "a", model, optimizers, asynchronous=asynchronous, step=2))
    assert gather_values(rank, engine_of(model).axis, label="after it") == [0, 1, 2]
    assert tulle.load(tmp_path / "a", model, optimizers) == {"step": 1}
    assert os.listdir(tmp_path) == ["a"]


@on_ranks(2)
def test_a_rank_that_cannot_read_fails_all(tmp_path):
    model, optimizers = put("rows", *trained(0))
    rank = engine_of(model).axis.rank
    tulle.save(tmp_path / "a", model, optimizers, step=1)
    complete = torch.load

    def unreadable(file: object, **options: object) -> object:
        if rank == 1 and not isinstance(file, Path):
            raise OSError(5, "Input/output error")
        return complete(file, **options)

    with small_blocks(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "load", unreadable)
        with pytest.raises(CheckpointError, match=r"Input/output error; model and optimizers are partly overwritten"):
            tulle.load(tmp_path / "a", model, optimizers)
    assert tulle.load(tmp_path / "a", model, optimizers) == {"step": 1}


@on_ranks(2)
def test_a_save_waits_for_the_one_before_and_a_load_sees_it(tmp_path):
    model, optimizers = put("rows", *trained(0))
    begun = [tulle.save(tmp_path / "a", model, optimizers, asynchronous=True, step=step) for step in range(3)]
    assert tulle.load(tmp_path / "a", model, optimizers) == {"step": 2}
    assert [one.done() for one in begun] == [True] * 3


@on_ranks(2)
def test_training_goes_on_while_files_are_written(tmp_path):
    """The writer is held up until a step is done."""
    model, optimizers = put("rows", *trained(0))
    stepped = threading.Event()
    complete = torch.save

    def held_up(state: object, file: object, **options: bool) -> None:
        if not isinstance(file, io.BytesIO):
            assert stepped.wait(20)
        complete(state, file, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "save", held_up)
        saving = tulle.save(tmp_path / "a", model, optimizers, asynchronous=True, step=2)
        for ids in batches(1, 8):
            model(ids).backward()
            for one in optimizers:
                one.step()
                one.zero_grad()
        stepped.set()
        saving.result()
    assert tulle.load(tmp_path / "a", model, optimizers) == {"step": 2}
    assert_has(model, optimizers, *trained(0))


class RowWise(Optimizer):
    """Adagrad with one sum for each row, as recommenders have."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            squares = self.state[parameter].setdefault("sum", torch.zeros_like(parameter[..., 0]))
            squares += parameter.grad.pow(2).mean(-1)
            parameter -= parameter.grad / (squares + 1).sqrt().unsqueeze(-1)


@on_ranks(3)
def test_what_an_optimizer_keeps_of_each_row_is_dealt_like_the_rows(tmp_path):
    mesh = tulle.init(data=-1)
    plain, model = (nn.Embedding(WORDS, WIDTH, _weight=torch.ones(WORDS, WIDTH)) for _ in range(2))
    theirs, ours = RowWise(plain.parameters()), RowWise(model.parameters())

    def train(one: nn.Module, optimizer: Optimizer) -> None:
        one(torch.arange(WORDS)).mul(torch.arange(WORDS)[:, None]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    train(plain, theirs)
    train(model, ours)
    tulle.distribute(model, ours, mesh, plan={"weight": "rows"})
    train(plain, theirs)
    train(model, ours)
    tulle.save(tmp_path / "checkpoint", model, ours)
    whole = full_optimizer_state_dict(model, ours)
    assert not whole or torch.equal(whole["state"][0]["sum"], theirs.state[plain.weight]["sum"])
    other = nn.Embedding(WORDS, WIDTH)
    again = RowWise(other.parameters())
    tulle.load(tmp_path / "checkpoint", other, again)
    assert torch.equal(again.state[other.weight]["sum"], theirs.state[plain.weight]["sum"])
    kept = ours.state[model.weight]["sum"].clone()
    for load in (
        partial(tulle.load, tmp_path / "checkpoint", model, ours),
        partial(ours.load_state_dict, again.state_dict()),
    ):
        ours.state[model.weight]["sum"].zero_()
        load()
        assert torch.equal(ours.state[model.weight]["sum"], kept)


def is_vector(parameter: Tensor) -> bool:
    return parameter.dim() == 1


class Filtered(SGD):
    """As LARS of VICReg and DINO: a function in its groups says which parameters decay."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.1, momentum=0.9)
        self.param_groups[0]["filter"] = is_vector


@on_ranks(2)
def test_functions_in_an_optimizers_groups_stay_the_programs_own(tmp_path):
    mesh = tulle.init(data=-1)
    model, other = (nn.Linear(3, 2) for _ in range(2))
    _, ours = tulle.distribute(model, Filtered(model), mesh)
    model(torch.ones(1, 3)).sum().backward()
    ours.step()
    tulle.save(tmp_path / "checkpoint", model, ours)
    again = Filtered(other)
    again.param_groups[0]["lr"] = 0.5
    tulle.load(tmp_path / "checkpoint", other, again)
    assert again.state_dict()["param_groups"] == ours.state_dict()["param_groups"]
    assert torch.equal(again.state[other.bias]["momentum_buffer"], ours.state[model.bias]["momentum_buffer"])
