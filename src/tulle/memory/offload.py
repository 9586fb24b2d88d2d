"""Activations that wait in the host's memory between forward and backward, and come back ahead of their use.

    forward      layer 0 | layer 1 | layer 2 | layer 3 |
    copies out             0 ------>  1 ------>  2 ------>
    backward                                             layer 3 | layer 2 | layer 1 | layer 0
    copies back (horizon 2)                              2, 1 -->  0 -->

On CUDA both directions run on a stream of their own, from and to pinned memory. Parameters, buffers and small tensors
stay. Source: Rhu et al., *vDNN* (2016); the horizon is SageMaker's `activation_loading_horizon`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from tulle.derived import put_before
from tulle.errors import ModelError
from tulle.memory.notes import Saved, naming
from tulle.names import as_names
from tulle.parts import local_of

HORIZON = 4
SMALLEST_BYTES = 1024 * 1024
_OFFLOADING = "_tulle_offloading"


@dataclass(slots=True, eq=False)
class _Parked:
    """One tensor that was saved for backward: on the device, on the host, or both for a while."""

    device: torch.device
    host: Tensor
    back: Tensor | None = None
    returned: torch.Event | None = None


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Call:
    """What one call of an offloaded module saved, and the call before it. Autograd's graph keeps both alive."""

    before: ref[_Call] | None
    parked: list[_Parked] = field(default_factory=list)
    is_loading: bool = False


class Offloading:
    """Moves what offloaded modules save; one for all of a model's modules.

    Args:
        device: Of the activations.
        horizon: How many calls ahead activations come back.
        smallest_bytes: Tensors below this size stay.
    """

    def __init__(self, device: torch.device, horizon: int, smallest_bytes: int) -> None:
        self._horizon = horizon
        self._smallest_bytes = smallest_bytes
        self._last: ref[_Call] | None = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.moved_bytes = 0
        """To the host, since the beginning."""

    def saving(self, module: nn.Module) -> torch.autograd.graph.saved_tensors_hooks:
        """The context in which one call of a module saves."""
        call = _Call(self._last)
        self._last = ref(call)
        own = [
            one for one in (*module.parameters(), *module.buffers()) if one.layout == torch.strided
        ]  # now: their memory may have been another one before
        inputs = _Inputs(call, {tensor.untyped_storage()._cdata for tensor in own})
        return torch.autograd.graph.saved_tensors_hooks(lambda tensor: self._pack(tensor, inputs), self._unpack)

    def _pack(self, tensor: Tensor, inputs: _Inputs) -> Any:
        if tensor.layout != torch.strided:  # a graph's edges say
            return Saved.of(tensor)
        storage = tensor.untyped_storage()
        is_small = tensor.nbytes < self._smallest_bytes or storage.nbytes() > 2 * tensor.nbytes
        is_there = self._stream is not None and tensor.device.type == "cpu"  # torch's checkpoint saves an empty one
        if is_there or is_small or storage._cdata in inputs.kept or not tensor.is_floating_point():
            return Saved.of(tensor)
        place = tensor.storage_offset(), tensor.shape, tensor.stride()
        key = storage._cdata, tensor._version, *place, tensor.dtype, tensor.is_neg()
        whose, parked = inputs.parked.get(key, (None, None))
        if parked is None or whose is None or whose() is None:  # memory of a tensor that is gone is used again
            parked = self._park(tensor)
            inputs.parked[key] = ref(storage), parked
            inputs.call.parked.append(parked)
        return inputs.call, parked

    def _park(self, tensor: Tensor) -> _Parked:
        self.moved_bytes += tensor.nbytes
        host = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, pin_memory=self._stream is not None
        )
        if self._stream is None:
            host.copy_(tensor)
            return _Parked(tensor.device, host)
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            host.copy_(local_of(tensor), non_blocking=True)
        tensor.record_stream(self._stream)
        return _Parked(tensor.device, host)

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Saved):
            return packed.read()
        call, parked = packed
        self._load_ahead(call)
        if parked.returned is not None:
            torch.cuda.current_stream(parked.device).wait_event(parked.returned)
        back = parked.back
        assert back is not None, "a call's tensors come back before they are read"
        return back

    def _load_ahead(self, call: _Call) -> None:
        """Begin to bring back what this call saved, and those of the `horizon` calls before it."""
        due: _Call | None = call
        for _ in range(self._horizon + 1):
            if due is None:
                return
            if not due.is_loading:
                due.is_loading = True
                for parked in due.parked:
                    self._bring_back(parked)
            due = due.before() if due.before is not None else None

    def _bring_back(self, parked: _Parked) -> None:
        if self._stream is None:
            parked.back = parked.host
            return
        parked.back = torch.empty_strided(
            parked.host.shape, parked.host.stride(), dtype=parked.host.dtype, device=parked.device
        )
        self._stream.wait_stream(torch.cuda.current_stream(parked.device))
        with torch.cuda.stream(self._stream):
            parked.back.copy_(parked.host, non_blocking=True)
            parked.returned = self._stream.record_event()
        parked.back.record_stream(self._stream)

    def __deepcopy__(self, memo: object) -> Offloading:
        """A copied model's modules save to the same place."""
        return self


@dataclass(slots=True, eq=False)
class _Inputs:
    """What one call has parked, by storage and view: what is saved twice moves once; storages in `kept` stay."""

    call: _Call
    kept: set[int]
    parked: dict[tuple[Any, ...], tuple[ref[torch.UntypedStorage], _Parked]] = field(default_factory=dict)


class _Offloaded(nn.Module):
    """What a module's class gains: what its forward saves waits on the host."""

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Compute what the module's own forward does, and park what that saves."""
        if not torch.is_grad_enabled():
            return super().forward(*arguments, **keywords)
        with naming("offload", self), self.__dict__[_OFFLOADING].saving(self):
            return super().forward(*arguments, **keywords)


def offload(
    model: nn.Module, names: Sequence[str], *, horizon: int = HORIZON, smallest_bytes: int = SMALLEST_BYTES
) -> Offloading:
    """Have what some modules save for backward wait in the host's memory, in place; the numbers stay the same.

    With `recompute`, call that first: of a module that recomputes, the inputs move, not what lies between.

    Args:
        model: The model, on its device.
        names: Of the modules, in the order in which they run.
        horizon: How many modules ahead activations come back in backward.
        smallest_bytes: Tensors below this size stay on the device.

    Raises:
        ModelError: If the model has no such module.
    """
    names, modules = as_names(names), dict(model.named_modules())
    if missing := [name for name in names if name not in modules]:
        raise ModelError(
            f"memory.offload was given {missing[0]!r}, but the {type(model).__name__} has no module of that name"
        )
    device = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    offloading = Offloading(device, horizon, smallest_bytes)
    for name in names:
        modules[name].__dict__[_OFFLOADING] = offloading
        put_before(_Offloaded, modules[name], f"Offloaded{type(modules[name]).__name__}")
    return offloading
