"""The paths of CUDA and nccl on a device that is emulated: devices, threads, streams and waits, not kernels."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: pytest -m gpu"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="there is no compiler"),
]


def compile_guard(folder: Path) -> Path:
    """What C++ holds for CUDA, as a library."""
    built, torch_folder = folder / "guard.so", Path(torch.__file__).parent
    library = str(torch_folder / "lib")
    source = str(HERE / "emulated_cuda_guard.cpp")
    options = ["-shared", "-fPIC", "-std=c++20", "-I", str(torch_folder / "include"), "-L", library]
    subprocess.run(
        ["g++", *options, source, "-o", str(built), "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{library}"], check=True
    )
    return built


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What two ranks saw."""
    return told_by("emulated_rank.py", 2, tmp_path_factory.mktemp("emulated"))


def told_by(program: str, ranks: int, folder: Path) -> list[dict]:
    """What each rank of a program beside this file wrote last."""
    shared = {
        "TULLE_EMULATED_GUARD": str(compile_guard(folder)),
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent / "src")]),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["--redirects=3", f"--log-dir={folder}", str(HERE / program)]
    ended = subprocess.run(command, env={**os.environ, **shared}, timeout=240, check=False)
    logs = sorted(folder.rglob("stderr.log"))
    assert ended.returncode == 0, "\n".join(path.read_text()[-3000:] for path in logs)
    return [json.loads(path.read_text().splitlines()[-1]) for path in sorted(folder.rglob("stdout.log"))]


def test_each_rank_has_a_device_of_its_own(told):
    assert [one["device"] for one in told] == ["cuda:0", "cuda:1"]
    assert {one["backend"] for one in told} == {"nccl"}


def test_the_emulation_refuses_and_finds_what_cuda_and_nccl_would_not_do(told):
    for one in told:
        assert one["checks"]["refused"] == ["Expected", '"aten.mm.default"', "Input", "Tensors", "No"]
        assert one["checks"]["races"] == ["aten::add.Tensor", "memory"]
        assert one["checks"]["own thread"]


@pytest.mark.parametrize("plan", ["replicas", "rows", "columns", "late", "delayed"])
def test_training_is_that_of_the_cpu(told, plan):
    assert max(one[plan]["difference"] for one in told) < 1e-12


def test_no_stream_reads_what_it_did_not_wait_for(told):
    assert [one["races"] for one in told] == [[], []]


def test_ranks_call_the_collectives_of_a_communicator_in_one_order(told):
    first, other = (one["calls"] for one in told)
    assert first == other


def test_ranks_begin_the_collectives_of_all_communicators_in_one_order(told):
    """Else a kernel of one could wait for another rank, which waits for one of another communicator."""
    first, other = (one["order"] for one in told)
    assert first == other


@pytest.mark.parametrize(("plan", "in_front", "beside"), [("replicas", 2, 14), ("rows", 6, 11), ("columns", 7, 9)])
def test_the_host_waits_for_the_device_no_more_than_it_must(told, plan, in_front, beside):
    """In front of what is computed: see docs/design/overlap.md; beside it, in the background thread, for sizes."""
    for one in told:
        assert one[plan]["waits"].get("in front", 0) <= in_front, one[plan]
        assert one[plan]["waits"].get("beside", 0) <= beside, one[plan]


def test_ranks_that_save_memory_have_one_loss(told):
    assert told[0]["memory"] == told[1]["memory"]


def test_replicas_of_stages_with_tables_wait_for_nobody_for_ever(tmp_path):
    told = told_by("emulated_stages_rank.py", 4, tmp_path)
    assert len(told) == 4
    for one in told:
        assert max(one["replicas"], one["rows"]) < 1e-12
        assert not one["races"]
    # Each way between stages is a communicator on which one rank sends, and the other receives all of that in order.
    ways = {name for one in told for name in one["messages"] if ", tensors from " in name}
    assert len(ways) == 4
    for way in ways:
        sent, received = sorted((one["messages"][way] for one in told if way in one["messages"]), reverse=True)
        assert {kind for kind, _ in sent} == {"send"}
        assert [["recv_", size] for _, size in sent] == received


def test_through_the_hosts_each_tensor_comes_to_the_device_and_stream_that_read_it(tmp_path, monkeypatch):
    monkeypatch.setenv("TULLE_SHARED_MEMORY", "0")
    monkeypatch.setenv("TULLE_PIPELINE_NCCL", "0")
    for one in told_by("emulated_kinds_rank.py", 2, tmp_path):
        assert one["difference"] < 1e-12
        assert one["device"] == ["cpu"]
        assert not one["races"]
