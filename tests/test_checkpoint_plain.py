"""A distributed model leaves as plain PyTorch: as a state dict, and as a safetensors file."""

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import tulle
from models import WIDTH, WORDS, Words, build
from ranks import on_ranks, run_on_ranks
from test_checkpoint_reshards import Reader, put, small_blocks, trained
from tulle.checkpoint import full_state_dict, save_safetensors
from tulle.comm import gather_values
from tulle.engine import engine_of
from tulle.errors import CheckpointError
from tulle.plan import Memory


def whole_on_ranks(plan: str, *, everywhere: bool) -> dict[str, Tensor]:
    model, _ = put(plan, *trained(0))
    with small_blocks():
        return full_state_dict(model, everywhere=everywhere)


@pytest.mark.parametrize("everywhere", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(
    ("ranks", "plan"),
    [
        (1, "whole"),
        (3, "rows"),
        (2, "columns"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [(2, "whole"), (4, "mixed")]),
    ],
)
def test_the_full_state_is_that_of_one_process_and_loads_without_tulle(ranks, plan, everywhere):
    expected, _ = trained(0)
    for rank, state in enumerate(run_on_ranks(ranks, whole_on_ranks, plan=plan, everywhere=everywhere)):
        if rank > 0 and not everywhere:
            assert state == {}
            continue
        assert list(state) == list(expected.state_dict())
        plain = Reader().double()
        plain.load_state_dict(state)
        for name, value in expected.state_dict().items():
            assert torch.equal(plain.state_dict()[name], value), name
        assert state["again.weight"] is state["words.weight"]


@pytest.mark.parametrize("kind", ["rows", "full_shard"])
@on_ranks(2)
def test_a_module_of_a_distributed_model_leaves_and_is_saved_as_the_model_does(kind, tmp_path):
    mesh = tulle.init(data=-1)
    model = nn.ModuleDict({"inner": build(Words, 0), "out": nn.Linear(6, 6).double()})
    plan = tulle.Plan(mesh.shape, memory=Memory(full_shard=kind == "full_shard"))
    if kind == "rows":
        plan = plan.with_rows_split({"inner.words.weight": (WORDS, WIDTH)}, "a test")
    expected = {name: value.clone() for name, value in model["inner"].state_dict().items()}
    tulle.distribute(model, SGD(model.parameters(), lr=0.1), mesh, plan=plan)
    state = full_state_dict(model["inner"])
    save_safetensors(tmp_path / "inner.safetensors", model["inner"])
    tulle.save(tmp_path / "checkpoint", model["inner"])
    plain = build(Words, 1)
    tulle.load(tmp_path / "checkpoint", plain)
    assert list(state) == ([] if mesh.rank else list(expected))
    exported = pytest.importorskip("safetensors.torch").load_file(tmp_path / "inner.safetensors")
    for found in (plain.state_dict(), exported, state or expected):
        assert all(torch.equal(found[name], value) for name, value in expected.items())


@on_ranks(2)
def test_the_full_state_is_a_copy():
    model, _ = put("mixed", *trained(0))
    state = full_state_dict(model, everywhere=True)
    before = {name: value.clone() for name, value in state.items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert all(torch.equal(value, before[name]) for name, value in state.items())


def test_a_sparse_buffer_is_in_the_full_state():
    model = nn.Linear(2, 2)
    model.register_buffer("edges", torch.eye(3).to_sparse())
    state = full_state_dict(model)
    assert torch.equal(state["edges"].to_dense(), torch.eye(3))
    assert state["edges"] is not model.edges


def export(path: Path, plan: str) -> None:
    model, _ = put(plan, *trained(0))
    with small_blocks():
        save_safetensors(path, model, metadata={"step": "2"})


@pytest.mark.parametrize(("ranks", "plan"), [(1, "whole"), (2, "whole"), (3, "rows"), (2, "columns"), (3, "mixed")])
def test_safetensors_reads_what_was_exported(ranks, plan, tmp_path):
    path = tmp_path / "new" / "model.safetensors"
    run_on_ranks(ranks, export, path=path, plan=plan)
    expected, _ = trained(0)
    plain = Reader().double()
    pytest.importorskip("safetensors.torch").load_model(plain, path)
    for name, value in expected.state_dict().items():
        assert torch.equal(plain.state_dict()[name], value), name
    with pytest.importorskip("safetensors").safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "step": "2", "again.weight": "words.weight"}
    assert os.listdir(path.parent) == [path.name]


def test_every_dtype_and_shape_is_exported(tmp_path):
    model = nn.Module()
    dtypes = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16]
    dtypes += [torch.int8, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2]
    dtypes += [torch.uint16, torch.uint32, torch.uint64]
    for dtype in dtypes:
        model.register_buffer(str(dtype).replace(".", "_"), torch.arange(3).to(dtype))
    model.register_buffer("scalar", torch.tensor(1.5))
    model.register_buffer("empty", torch.empty(0, 3))
    model.register_buffer("strided", torch.arange(6.0).view(2, 3).T)
    save_safetensors(tmp_path / "a", model)
    loaded = pytest.importorskip("safetensors.torch").load_file(tmp_path / "a")
    assert loaded.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert (loaded[name].dtype, loaded[name].shape) == (value.dtype, value.shape)
        assert torch.equal(
            loaded[name].double() if "float8" in name else loaded[name], value.double() if "float8" in name else value
        )


class WithExtra(nn.Linear):
    def get_extra_state(self) -> dict:
        return {"seen": 3}

    def set_extra_state(self, state: dict) -> None:
        pass


def test_what_safetensors_cannot_hold_is_refused(tmp_path):
    text = "the model's state has '_extra_state', dict, expected dense tensors"
    with pytest.raises(CheckpointError, match=text):
        save_safetensors(tmp_path / "a", WithExtra(1, 1))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "metadata", "text"),
    [
        ("a", {"step": 100}, r"metadata={'step': 100} was given, expected texts by name: str\(100\), say"),
        ("a", {1: "one"}, "metadata={1: 'one'} was given, expected texts by name"),
        ("a", ["step"], "a list was given as metadata, expected texts by name"),
        ("/", None, "'/' was given for the file, expected one with a name"),
    ],
)
def test_a_file_that_nobody_could_read_is_refused(name, metadata, text, tmp_path):
    with pytest.raises(CheckpointError, match=text):
        save_safetensors(tmp_path / name, nn.Linear(1, 1), metadata=metadata)
    assert os.listdir(tmp_path) == []


@on_ranks(3)
def test_an_export_that_fails_fails_on_all_and_nobody_waits(tmp_path):
    model, _ = put("rows", *trained(0))
    rank = engine_of(model).axis.rank
    save_safetensors(tmp_path / "a", model)
    before = (tmp_path / "a").read_bytes()
    with small_blocks(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(CheckpointError, match=r"cannot write '.*a': .*No space left on device; an older file of"):
            save_safetensors(tmp_path / "a", model)
    assert gather_values(rank, engine_of(model).axis, label="after it") == [0, 1, 2]
    assert (tmp_path / "a").read_bytes() == before
    assert os.listdir(tmp_path) == ["a"]


class Observing(nn.Linear):
    """Gives its buffer a number for each input, in place, as observers of quantization do in their first forward."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("least", torch.tensor([]))

    def forward(self, x: Tensor) -> Tensor:
        self.least.resize_(x.shape[1]).copy_(x.detach().amin(0))
        return super().forward(x)


@on_ranks(2)
def test_a_buffer_that_one_stage_has_resized_is_saved_as_it_is(tmp_path):
    mesh = tulle.init(pipe=-1)
    model, optimizer = stages_that_observe(mesh)
    model(torch.ones(3, 2))
    state = full_state_dict(model, everywhere=True)
    assert [tuple(state[f"{name}.least"].shape) for name in "01"] == [(2,), (2,)]
    assert state["0.least"].tolist() == [1.0, 1.0]
    tulle.save(tmp_path / "saved", model, optimizer)
    wanted = {name: value.clone() for name, value in state.items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    tulle.load(tmp_path / "saved", model, optimizer)
    state = full_state_dict(model, everywhere=True)
    assert all(torch.equal(state[name], value) for name, value in wanted.items())


def stages_that_observe(mesh: tulle.Mesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(Observing(), Observing())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return tulle.distribute(model, optimizer, mesh, plan=tulle.Plan({"pipe": 2}, stages={"0": 0, "1": 1}))
