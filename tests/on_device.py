"""Bodies of warm teams on a GPU over nccl, in place of CPUs over gloo: `TULLE_TEST_DEVICE=cuda pytest tests/engine`.

Ranks share the GPU: each says that it is on a host of its own, so that nccl, which refuses two ranks of a host on one
GPU, goes by sockets. What a body makes is on the GPU if it does not say where; what the library makes is not, so that a
device that it forgot is found. Bodies that say that they are on the CPU, or count what only a CPU does, fail.

`TULLE_TEST_DEVICE=emulated`, with `TULLE_EMULATED_GUARD`, goes by `emulated_cuda`.
"""

import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

DEVICE = os.environ.get("TULLE_TEST_DEVICE", "")
HERE, TORCH = str(Path(__file__).parent), str(Path(torch.__file__).parent)
_CONSTRUCTORS = _device_constructors()


class _OfBodies(TorchFunctionMode):
    """Tensors that tests make, or modules of torch for them, are on the GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _CONSTRUCTORS and kwargs.get("device") is None and _called_by_a_test(2):
            kwargs["device"] = torch.device("cuda", torch.cuda.current_device())
        return func(*args, **kwargs)


class _Generator(torch.Generator):
    """One that tests make is the GPU's."""

    def __new__(cls, device: Any = None) -> torch.Generator:
        return torch._C.Generator(device or ("cuda" if _called_by_a_test(2) else "cpu"))


def _called_by_a_test(depth: int) -> bool:
    frame = sys._getframe(depth)
    while frame is not None and (frame.f_code.co_filename.startswith((TORCH, "<")) or _is_passed_by(frame)):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(HERE)


def _is_passed_by(frame: FrameType) -> bool:
    """Who moves a model to the GPU moves the library's layers in it, too; and what watches a call does not make it."""
    name, owner = frame.f_code.co_name, frame.f_locals.get("self")
    return name == "__torch_function__" or (name == "__init__" and isinstance(owner, torch.nn.Module))


def begin() -> None:
    """Call once in a process of ranks, before its first body."""
    os.environ |= {"NCCL_HOSTID": str(os.getpid()), "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    if DEVICE == "emulated":
        import emulated_cuda

        emulated_cuda.install(1)
    torch.cuda.set_device(0)
    torch.Generator = _Generator
    _OfBodies().__enter__()
