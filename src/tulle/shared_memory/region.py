"""`Region`: memory that other processes of this host map too. It has no name, so nothing of it outlives them."""

from __future__ import annotations

import mmap
import os

import torch
from torch import Tensor

_PAGES_BYTES = 1 << 20
_LINE_BYTES = 64


class Region(mmap.mmap):
    """Some memory of the system's (`memfd_create`), which stays as long as a tensor lies in it.

    Args:
        descriptor: The file descriptor of the memory; it is this region's from now on.
    """

    descriptor: int
    address: int

    def __new__(cls, descriptor: int) -> Region:
        """Map it, or close the descriptor."""
        try:
            made = super().__new__(cls, descriptor, os.fstat(descriptor).st_size)
        except BaseException:
            os.close(descriptor)
            raise
        made.descriptor = descriptor
        made.address = made.bytes().data_ptr()
        return made

    @classmethod
    def new(cls, size_bytes: int) -> Region:
        """A region of at least so many bytes, all zero; what nobody writes takes no memory.

        Raises:
            OSError: If the system gives none.
        """
        descriptor = os.memfd_create("tulle", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, max(1, -(-size_bytes // _PAGES_BYTES)) * _PAGES_BYTES)
        except OSError:
            os.close(descriptor)
            raise
        return cls(descriptor)

    def bytes(self) -> Tensor:
        """All of it, as a flat tensor."""
        return torch.frombuffer(self, dtype=torch.uint8)

    def __del__(self) -> None:
        os.close(self.descriptor)


def mapped(descriptor: int) -> Tensor:
    """Another process' memory, as a flat tensor. Its file descriptor is closed: a process may have few, and needs none.

    Raises:
        RuntimeError: If it cannot be mapped.
    """
    size_bytes = os.fstat(descriptor).st_size
    try:
        return torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=size_bytes, dtype=torch.uint8)
    finally:
        os.close(descriptor)


def aligned(offset_bytes: int) -> int:
    """The next offset at which numbers of any type may begin, and no other's line of the cache ends."""
    return -(-offset_bytes // _LINE_BYTES) * _LINE_BYTES


def flat_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor's memory, as bytes that autograd knows nothing of, in whatever thread they are written.

    The stride of a single number, or of none, may be anything, but to view it as bytes.
    """
    with unseen():
        flat = tensor.detach().reshape(-1).as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        return torch.from_numpy(flat.numpy()).as_strided((tensor.nbytes,), (1,))


class unseen:  # noqa: N801 - as torch.no_grad
    """A context whose operations no mode sees, such as one that counts the bytes of tensors: they make none.

    Nor are they in inference mode, whatever this thread is in: what came to be there no other thread may write.
    """

    __slots__ = ("_guards",)

    def __enter__(self) -> None:
        self._guards = torch._C._DisableTorchDispatch(), torch._C._InferenceMode(False)
        for guard in self._guards:
            guard.__enter__()

    def __exit__(self, *told: object) -> None:
        for guard in reversed(self._guards):
            guard.__exit__(*told)
