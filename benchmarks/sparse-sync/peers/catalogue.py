"""What the comparison runs beside tulle: which environments, which ways in each, and how a rank of one is started."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[2]
DEFAULT_FOLDER = REPOSITORY / ".peers"


@dataclass(frozen=True, slots=True)
class Peer:
    """A library in an environment of its own.

    Args:
        name: Of the environment's folder, and of the worker, `<name>_worker.py`.
        requirements: What pip installs, in this order; each entry is one call of pip with these arguments.
        proof: A program that succeeds if the environment works.
    """

    name: str
    requirements: tuple[tuple[str, ...], ...]
    proof: str

    @property
    def worker(self) -> Path:
        """The program that is one rank."""
        return HERE / f"{self.name}_worker.py"

    def python(self, folder: Path = DEFAULT_FOLDER) -> Path:
        """The environment's interpreter."""
        return folder / self.name / "bin" / "python"


@dataclass(frozen=True, slots=True)
class Way:
    """One way in which a peer trains the job.

    Args:
        name: As the worker's `--way` takes it.
        peer: Whose environment and worker.
        sharded: Whether each table is split over the ranks: that saves memory and sends less, but is another
            promise than a replicated table.
        about: What moves.
    """

    name: str
    peer: str
    sharded: bool
    about: str


TORCH = ("torch==2.13.0", "numpy==2.4.6")
BUILD = ("setuptools==80.10.2", "wheel==0.48.0", "packaging==26.3")

PEERS = {
    peer.name: peer
    for peer in (
        Peer("torch", (TORCH,), "import torch.nn.parallel"),
        Peer(
            "deepspeed",
            ((*TORCH, *BUILD), ("--no-build-isolation", "deepspeed==0.19.8")),
            "import deepspeed",
        ),
        Peer(
            "torchrec",
            # TorchRec asks for fbgemm-gpu, which would lay its CUDA libraries over those of fbgemm-gpu-cpu.
            (
                (*TORCH, "tensordict==0.15.3", "torchmetrics==1.0.3", "tqdm==4.70.1", "pyre-extensions==0.0.32"),
                ("--no-deps", "torchrec==1.8.0", "fbgemm-gpu-cpu==1.8.0"),
            ),
            "import torchrec",
        ),
        Peer("jax", ((*TORCH, "jax==0.10.2"),), "import jax"),
        Peer(
            "horovod",
            ((*TORCH, *BUILD, "cloudpickle==3.1.2", "psutil==7.2.2", "pyyaml==6.0.3", "cffi==2.1.1"),),
            "import horovod.torch as hvd; assert hvd.gloo_built()",
        ),
    )
}

WAYS = {
    way.name: way
    for way in (
        Way("ddp-dense", "torch", False, "DistributedDataParallel, dense gradients in buckets, all-reduced"),
        Way("ddp-sparse", "torch", False, "DistributedDataParallel, Embedding(sparse=True): gloo's sparse all-reduce"),
        Way("horovod-allgather", "horovod", False, "indices and values of all tokens, duplicates too, all-gathered"),
        Way("horovod-sparse-as-dense", "horovod", False, "the gradient made dense and all-reduced, then sparse again"),
        Way("deepspeed-sparse", "deepspeed", False, "coalesced rows padded to the longest rank's and all-gathered"),
        Way("deepspeed-dense", "deepspeed", False, "dense gradients in buckets, all-reduced"),
        Way(
            "torchrec-data-parallel",
            "torchrec",
            False,
            "EmbeddingBagCollection replicated: dense gradients through DDP",
        ),
        Way(
            "torchrec-row-wise", "torchrec", True, "EmbeddingCollection split by rows: ids out, rows in, gradients out"
        ),
        Way("jax-allgather", "jax", False, "indices and values of all tokens, duplicates too, all-gathered"),
    )
}


def command(way: str, requests: Path, output: Path, folder: Path = DEFAULT_FOLDER) -> list[str]:
    """The command of one rank of `way`; to be run with `environment()` on top of torchrun's variables."""
    peer = PEERS[WAYS[way].peer]
    arguments = ["--way", way, "--requests", str(requests), "--output", str(output)]
    return [str(peer.python(folder)), str(peer.worker), *arguments]


def environment() -> dict[str, str]:
    """What a worker needs besides torchrun's variables: the common job, and its libraries' programs."""
    return {"PYTHONPATH": str(HERE.parent), "PYTHONUNBUFFERED": "1", "PATH": os.environ.get("PATH", "")}


def installed(folder: Path = DEFAULT_FOLDER) -> list[str]:
    """The ways whose environment is there."""
    return [way.name for way in WAYS.values() if (folder / way.peer / "installed").exists()]
