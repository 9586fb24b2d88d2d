"""`LiveBytes`: counts the bytes of all tensors that are alive while operations run, and their peak.

`LiveBytes` sees every operation that the dispatcher sees, of tensors with memory or of fake ones without, so that a
step can be counted before anything is allocated. `measure_peak_bytes` asks the allocator itself, to hold the count
against; `looking_at_saved` shows what autograd keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def looking_at_saved(look: Callable[[Tensor], object]) -> torch.autograd.graph.saved_tensors_hooks:
    """A context in which `look` is called with each tensor that autograd keeps, but sparse and nested ones.

    Example:
        >>> weight = torch.ones(2, requires_grad=True)
        >>> with looking_at_saved(lambda tensor: print(list(tensor.shape))):
        ...     _ = weight.exp()
        [2]
    """

    def pack(tensor: Tensor) -> Tensor:
        if tensor.layout == torch.strided and not tensor.is_nested:
            look(tensor)
        return tensor.detach()  # an operation that keeps its own result would be kept by it, for good

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)


class LiveBytes(TorchDispatchMode):
    """Within this context, what operations give is counted for as long as it lives.

    Args:
        device_type: Tensors elsewhere, those that were offloaded say, do not count.

    Example:
        >>> import torch
        >>> with LiveBytes("cpu") as live:
        ...     first = torch.ones(100)
        ...     second = first * 2
        ...     del first
        >>> live.now_bytes, live.peak_bytes
        (400, 800)
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.now_bytes = 0
        self.peak_bytes = 0
        self._device_type = device_type
        self._alive: dict[int, ref[torch.UntypedStorage]] = {}

    def add(self, tensors: Iterable[Tensor | None]) -> None:
        """Count tensors that were there before."""
        for tensor in tensors:
            if tensor is not None and tensor.device.type == self._device_type and tensor.layout == torch.strided:
                self._count(tensor.untyped_storage())

    def restart_peak(self) -> None:
        """Let the peak be that from here on."""
        self.peak_bytes = self.now_bytes

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, and count what it gives."""
        result = func(*args, **(kwargs or {}))
        self.add(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        known = self._alive.get(key)
        size_bytes = storage.nbytes()
        if not size_bytes or (known is not None and known() is not None):
            return

        def gone(_: object) -> None:
            self.now_bytes -= size_bytes

        self._alive[key] = ref(storage, gone)
        self.now_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)


def measure_peak_bytes(step: Callable[[], object], device: torch.device) -> int:
    """Run a step, and give the most bytes that the allocator had handed out in it beyond what it had before.

    Args:
        step: What to run: a forward, backward and step of the optimizer, say.
        device: Whose allocator; of a CPU, torch's profiler counts, which sees what this thread and backward
            allocate: not what `full_shard`, say, gathers and sends in a thread beside them.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        return torch.cuda.max_memory_allocated(device) - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    # One cycle, of which torch 2.11 warns that others would be forgotten.
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
        step()
    profiler = profile.profiler
    assert profiler is not None, "the profiler has run"
    results = profiler.kineto_results
    assert results is not None, "the profiler has run"
    events: list[Any] = [event for event in results.events() if event.name() == "[memory]"]
    changes = sorted((event.start_ns(), event.nbytes()) for event in events)
    now = peak = 0
    for _, change in changes:
        now += change
        peak = max(peak, now)
    return peak
