"""Bodies of warm teams on GPUs over nccl, in place of CPUs over gloo: `TULLE_TEST_DEVICE=cuda pytest`, where one has some.

Ranks share GPUs if there are fewer of them: each says that it is on a host of its own, and nccl, which refuses two ranks of
a host on one GPU, goes by sockets. What a body makes is on the GPU if it does not say where; what the library makes is not,
so that a device that it forgot is found. `TULLE_TEST_DEVICE=emulated` goes by `emulated_cuda`.
"""

import os
import sys
from pathlib import Path
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
    while frame is not None and frame.f_code.co_filename.startswith((TORCH, "<")):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(HERE)


def begin() -> None:
    """Call once in a process of ranks, before its first body."""
    os.environ |= {"NCCL_HOSTID": str(os.getpid()), "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    if DEVICE == "emulated":
        import emulated_cuda

        emulated_cuda.install(1)
    torch.cuda.set_device(0)
    torch.Generator = _Generator
    _OfBodies().__enter__()
