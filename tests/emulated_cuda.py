"""A GPU that is none, for builds of torch without CUDA: tensors that say cuda and compute on the CPU, checked as CUDA.

Import it before torch, in a process of its own, with `TULLE_EMULATED_GUARD` the path of `emulated_cuda_guard.cpp` when
compiled; then call `install`. As on a GPU:

- C++ sees device cuda: autograd runs backward in the device's thread, autocast("cuda") casts, an operation that mixes
  devices raises, new threads begin with device 0.
- `emulated_streams` notes what kernels of each stream read and write: `races` lists what is not waited for, and memory
  that is given back while another stream still uses it; `syncs` lists what makes the host wait for the device.
- A collective must be one that nccl can do, and runs on a stream of its own. It travels by gloo; `calls` lists those of
  each communicator, which must be the same on all its ranks, and `order` the communicators in the order of all.
  `messages` lists what each sends and receives: what one rank sends the other must receive, in one order.

It cannot show: kernels (which exist, how they round, how fast they are), nccl itself (deadlocks between communicators,
failures), waits that C++ does (DistributedDataParallel, the autograd of several streams), CUDA graphs, compiled code,
tensors of tensors (DTensor), a real lack of memory.
"""

# ruff: noqa: I001 - the guard is loaded before torch
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

from emulated_streams import (
    GUARD, Event, Memory, Stream, StreamContext, current, host_reads, host_waits, index_of, launch, launched, lock,
    memory_bytes, over, races, syncs, wait, where,
)  # fmt: skip

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["calls", "install", "messages", "order", "races", "syncs"]

calls: dict[str, list[tuple[str, ...]]] = {}
messages: dict[str, list[tuple[str, int]]] = {}
"""By communicator "send" or "recv_", and how many bytes."""
order: list[str] = []
"""The communicators of all those, in the order in which they were begun."""
_works: dict[Work, tuple[object, int]] = {}
_nccl: set[str] = set()
_random = torch.Generator().manual_seed(1)
_make, _data, _repr = torch.Tensor._make_subclass, torch._C.TensorBase.data, torch.Tensor.__repr__
_backend, _gloo_wait, _storage_device = dist.get_backend, Work.wait, torch.UntypedStorage.device
_LIBRARY = torch.library.Library("aten", "IMPL")

aten = torch.ops.aten
_IN_PLACE_VIEWS = {aten.resize_, aten.set_, aten.t_, aten.transpose_, aten.squeeze_, aten.unsqueeze_, aten.as_strided_}
_WAITING = {
    aten._local_scalar_dense, aten.nonzero, aten._unique2, aten.unique_consecutive, aten.unique_dim, aten.equal,
    aten.masked_select, aten.is_nonzero, aten.bincount, aten.histc, aten._coalesce,
}  # fmt: skip
_INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
_MAY_MIX = _INDEXING | {aten.copy_, aten._to_copy, aten.set_, aten._amp_foreach_non_finite_check_and_unscale_}
_NOT_OF_INTEGERS = {aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.mv, aten.dot, aten.addmv}
_EMPTY = {aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided, aten.new_empty_strided}
_NCCL_DTYPES = {torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool, torch.float16, torch.bfloat16,
                torch.float32, torch.float64}  # fmt: skip


def _is_ours(value: object) -> bool:
    keys = torch._C._dispatch_keys(value) if isinstance(value, torch.Tensor) else None
    return keys is not None and (keys.has(torch._C.DispatchKey.CUDA) or keys.has(torch._C.DispatchKey.SparseCUDA))


def _dense(inner: torch.Tensor) -> list[torch.Tensor]:
    return [inner] if inner.layout == torch.strided else [inner._indices(), inner._values()]


def _wrap(inner: torch.Tensor, device: torch.device, kind: type = torch.Tensor, *, requires_grad: bool = False) -> Any:
    for storage in (part.untyped_storage() for part in _dense(inner)):
        if not hasattr(storage, "emulated"):
            storage.emulated = Memory(device, storage.nbytes())
    made = _make(kind, inner, requires_grad, dispatch_device=True, device_for_backend_keys=device)
    if inner.layout != torch.strided:
        made._inner = inner
    return made


def _inner(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor of the CPU behind one of the device."""
    if "_inner" in vars(tensor):
        return tensor._inner
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        made = torch.empty(0, dtype=tensor.dtype)
        made.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
        made = torch._C._conj(made) if tensor.is_conj() else made
        return torch._neg_view(made) if tensor.is_neg() else made


def _memory(tensor: torch.Tensor) -> Memory:
    with torch._C.DisableTorchFunction():  # a look, of which subclasses are not to know
        return _dense(vars(tensor).get("_inner", tensor))[0].untyped_storage().emulated


def _span(part: torch.Tensor) -> tuple[int, int]:
    """First byte and end in its storage."""
    ends = sum((n - 1) * stride for n, stride in zip(part.shape, part.stride(), strict=True)) + 1 if part.numel() else 0
    return part.storage_offset() * part.element_size(), (part.storage_offset() + ends) * part.element_size()


def _device_of(cls: type, func: object, types: object, args: Any = (), kwargs: object = None) -> torch.device:
    """What C++ asks of a tensor for which Python answers."""
    assert func is torch.ops.prim.device.default, func
    return _memory(args[0]).device


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operation in which the device may take part."""
    if func is torch.ops.prim.device.default:
        return _memory(args[0]).device if _is_ours(args[0]) else torch.device("cpu")
    packet, asked = func.overloadpacket, kwargs.get("device")
    flat = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    ours = [leaf for leaf in flat if _is_ours(leaf)]
    if func.namespace == "c10d":
        return _collective(func, args, kwargs, flat)
    if packet is aten.is_pinned:
        return hasattr(args[0].untyped_storage(), "copied")
    is_pinned = packet is aten._pin_memory or kwargs.pop("pin_memory", False)
    if not ours and (asked is None or torch.device(asked).type != "cuda"):
        for leaf in flat:
            if leaf.layout == torch.strided:
                host_reads(str(func), getattr(leaf.untyped_storage(), "copied", {}))
        made = args[0].clone() if packet is aten._pin_memory else func(*args, **kwargs)
        if is_pinned:
            made.untyped_storage().copied = {}
        return made
    return _on_device(func, args, kwargs, flat, ours)


def _on_device(func: Any, args: Any, kwargs: dict[str, Any], flat: Any, ours: Any) -> Any:
    packet, asked = func.overloadpacket, kwargs.get("device")
    is_to_device = asked is not None and torch.device(asked).type == "cuda"
    device = torch.device("cuda", index_of(asked)) if is_to_device else _memory(ours[0]).device
    _check(func, packet, flat, ours)
    _count_waits(func, packet, args, kwargs, ours, current(_memory(ours[0]).device if ours else device))
    insides = {id(leaf): _inner(leaf) for leaf in ours}
    outsides = {id(insides[id(leaf)]): leaf for leaf in ours}
    given = {**kwargs, "device": torch.device("cpu")} if is_to_device else kwargs
    given_args, given = tree_map_only(torch.Tensor, lambda leaf: insides.get(id(leaf), leaf), (args, given))
    made = _computed(func, given_args, given)
    is_to_host = (packet is aten.copy_ and not _is_ours(args[0])) or (asked is not None and not is_to_device)
    _note(func, args, [] if is_to_host or packet in _EMPTY else made, insides, device)
    if packet in _IN_PLACE_VIEWS:
        _data.__set__(args[0], _wrap(insides[id(args[0])], device))
    if is_to_host:
        if _is_non_blocking(args, kwargs) and (packet is not aten.copy_ or hasattr(made.untyped_storage(), "copied")):
            made.untyped_storage().copied = over(current(device))
        return made
    return tree_map_only(
        torch.Tensor, lambda leaf: outsides.get(id(leaf)) if id(leaf) in outsides else _wrap(leaf, device), made
    )


def _computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if func is getattr(aten.mm, "dtype", None):  # of CUDA alone
        return torch.mm(args[0].to(args[2]), args[1].to(args[2]))
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return func(*args, **kwargs)
    before = torch.get_rng_state()  # the device has random numbers of its own
    torch.set_rng_state(_random.get_state())
    made = func(*args, **kwargs)
    _random.set_state(torch.get_rng_state())
    torch.set_rng_state(before)
    return made


def _check(func: Any, packet: Any, flat: Any, ours: Any) -> None:
    """What CUDA refuses."""
    devices = {str(_memory(leaf).device) for leaf in ours} | {
        "cpu" for leaf in flat if not _is_ours(leaf) and leaf.dim()
    }
    if len(devices) > 1 and packet not in _MAY_MIX and "_foreach" not in func.name():
        raise RuntimeError(f"Expected all tensors to be on the same device, but {func} was given {sorted(devices)}")
    if packet in _NOT_OF_INTEGERS and not ours[0].is_floating_point() and not ours[0].is_complex():
        raise RuntimeError(f'"{func}" not implemented on CUDA for {ours[0].dtype}')


def _is_non_blocking(args: Any, kwargs: dict[str, Any]) -> bool:
    return bool(kwargs.get("non_blocking") or (len(args) > 2 and args[2] is True))


def _count_waits(func: Any, packet: Any, args: Any, kwargs: dict[str, Any], ours: Any, stream: Any) -> None:
    if packet in (aten._to_copy, aten.copy_):
        source, target = args[0], kwargs.get("device")
        is_there = target is None or torch.device(target).type == "cuda"
        if packet is aten.copy_:
            source, is_there = args[1], _is_ours(args[0])
        crosses = _is_ours(source) != is_there and (packet is aten._to_copy or _is_ours(source) or source.dim())
        if crosses and not _is_non_blocking(args, kwargs):
            host_waits("to device" if is_there else "to host", stream)
    elif packet in _INDEXING and any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]):
        host_waits("mask", stream)
    elif packet in _WAITING or (func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None):
        host_waits(str(packet), stream)


def _note(func: Any, args: Any, made: Any, insides: dict[int, torch.Tensor], device: torch.device) -> None:
    """What a kernel reads and writes."""
    if func.is_view:
        return
    schemas = zip(func._schema.arguments, args, strict=False)
    outs = [leaf for schema, value in schemas if schema.is_write for leaf in tree_leaves(value) if id(leaf) in insides]
    written = [leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)] + [insides[id(o)] for o in outs]
    stream, what = current(device), f"{func.name()} at {where()}"
    with lock:
        launch(stream)
        targets = {(part.untyped_storage()._cdata, _span(part)): part for leaf in written for part in _dense(leaf)}
        sources = {
            (part.untyped_storage()._cdata, _span(part)): part for leaf in insides.values() for part in _dense(leaf)
        }
        for key, part in {**sources, **targets}.items():
            storage = part.untyped_storage()
            if not hasattr(storage, "emulated"):
                storage.emulated = Memory(device, storage.nbytes())
            storage.emulated.touch(stream, what, key[1], writes=key in targets)


def _collective(func: Any, args: Any, kwargs: dict[str, Any], flat: Any) -> Any:
    """By gloo, where nccl could do it."""
    objects = [value for value in args if isinstance(value, torch.ScriptObject)]
    group = next(dist.ProcessGroup.unbox(value) for value in objects if "ProcessGroup" in str(value._type()))
    ours, name = [leaf for leaf in flat if _is_ours(leaf)], func.name().removeprefix("c10d::")
    backend = _get_backend(group)
    if any(_is_ours(leaf) != (backend == "nccl") for leaf in flat):
        raise RuntimeError(f"No backend type associated with these devices: {name} of {backend}")
    if not ours:
        return func(*args, **kwargs)
    for leaf in ours:
        if leaf.dtype not in _NCCL_DTYPES:
            raise RuntimeError(f"Input tensor data type is not supported for NCCL process group: {leaf.dtype}")
        if not leaf.is_contiguous():
            raise ValueError(f"Tensors must be contiguous: {name} at {where()}")
    is_message = name in ("send", "recv_")
    assert not is_message or args[2] != dist.get_rank(group), "nccl sends nothing to itself"
    if is_message:
        messages.setdefault(group.group_name, []).append((name, ours[0].nbytes))
    else:
        sizes = [] if "alltoall" in name else [f"{leaf.dtype} {leaf.numel()}" for leaf in ours]
        calls.setdefault(group.group_name, []).append((name, *sizes))
        order.append(group.group_name)
    device, insides = _memory(ours[0]).device, {id(leaf): _inner(leaf) for leaf in ours}
    stream, outsides = (device.index, f"nccl {group.group_name}"), {id(insides[id(leaf)]): leaf for leaf in ours}
    schemas = zip(func._schema.arguments, args, strict=False)
    written = {
        id(leaf) for schema, value in schemas if schema.is_write and name != "send" for leaf in tree_leaves(value)
    }
    with lock:
        wait(stream, over(current(device)))
        launch(stream)
        for leaf in ours:
            span, what = _span(insides[id(leaf)]), f"{name} at {where()}"
            _memory(leaf).touch(stream, what, span, writes=id(leaf) in written)
            _memory(leaf).kept_for.add(stream)  # the work holds its tensors
    made = func(*tree_map_only(torch.Tensor, lambda leaf: insides[id(leaf)], args), **kwargs)
    for leaf in tree_leaves(made):
        if isinstance(leaf, torch.ScriptObject) and "Work" in str(leaf._type()):
            _works[Work.unbox(leaf)] = stream, launched[stream]
    return tree_map_only(torch.Tensor, lambda leaf: outsides[id(leaf)], made)


def _wait_for(work: Work, *timeout: object) -> bool:
    is_done = _gloo_wait(work, *timeout)
    if work in _works:
        stream, number = _works.pop(work)
        wait(current(stream[0]), {stream: number})
    return is_done


class _Mode(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the compiler would be imported

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(getattr(kind.__torch_dispatch__, "__func__", None) is not _device_of for kind in types):
            return NotImplemented  # a tensor of tensors, which comes back with those
        return _run(func, args, dict(kwargs or {}))


def _past_modes(func: Any, *args: Any, **kwargs: Any) -> Any:
    return _run(func, args, kwargs)


def _made_of(cls: type[Any], data: torch.Tensor, requires_grad: bool = False, **kwargs: Any) -> Any:  # noqa: FBT001 - torch's
    if _is_ours(data) and not kwargs:
        return _wrap(_inner(data.detach()), _memory(data).device, cls, requires_grad=requires_grad)
    return _make(cls, data, requires_grad, **kwargs)


def _set_data(tensor: torch.Tensor, values: torch.Tensor) -> None:
    if _is_ours(values) == _is_ours(tensor):
        _data.__set__(tensor, values)
        if "_inner" in vars(values):
            tensor._inner = values._inner
    else:  # from one device to the other
        torch._C._swap_tensor_impl(tensor, _made_of(type(tensor), values.detach(), tensor.requires_grad))


def _record_stream(tensor: torch.Tensor, stream: Stream) -> None:
    if tensor.layout != torch.strided:
        raise NotImplementedError("Could not run 'aten::record_stream' with arguments from the 'SparseCUDA' backend")
    _memory(tensor).kept_for.add(stream.key)


def _get_backend(group: Any = None) -> str:
    group = group or dist.group.WORLD
    return "nccl" if getattr(group, "group_name", None) in _nccl else _backend(group)


def _grouped(original: Any, place: int, *args: Any, **kwargs: Any) -> Any:
    """A process group of nccl is one of gloo that is known to be none."""
    named = kwargs.pop("backend", args[place] if len(args) > place else None)
    named = named or (_get_backend() if dist.is_initialized() else "nccl")
    args = (*args[:place], "gloo" if named == "nccl" else named, *args[place + 1 :]) if len(args) > place else args
    kwargs |= {} if len(args) > place else {"backend": "gloo" if named == "nccl" else named}
    group = original(*args, **{key: value for key, value in kwargs.items() if key != "device_id"})
    if named == "nccl":
        _nccl.add((group if isinstance(group, dist.ProcessGroup) else dist.group.WORLD).group_name)
    return group


def install(devices: int) -> None:
    """Give this process its GPUs; they stay until it ends."""
    properties = SimpleNamespace(name="emulated", total_memory=2**33, major=9, minor=0, multi_processor_count=1)
    cuda: dict[str, Any] = {
        "_lazy_init": lambda: None, "is_available": lambda: True, "is_initialized": lambda: True,
        "device_count": lambda: devices, "current_device": lambda: GUARD.emulated_device(),
        "set_device": lambda device: GUARD.emulated_set_device(index_of(device)),
        "Stream": Stream, "Event": Event, "stream": StreamContext,
        "current_stream": lambda device=None: Stream(key=current(device)),
        "default_stream": lambda device=None: Stream(key=(index_of(device), 0)),
        "synchronize": lambda device=None: host_waits("synchronize", *launched),
        "memory_allocated": lambda device=None: memory_bytes["now"],
        "max_memory_allocated": lambda device=None: memory_bytes["peak"],
        "reset_peak_memory_stats": lambda device=None: memory_bytes.update(peak=memory_bytes["now"]),
        "get_device_properties": lambda device=None: properties, "get_device_name": lambda device=None: "emulated",
        "get_rng_state": lambda device=None: _random.get_state(),
        "set_rng_state": lambda state, device=None: _random.set_state(state) and None,
        "manual_seed": _random.manual_seed, "manual_seed_all": _random.manual_seed,
        "default_generators": (_random,) * devices, "is_current_stream_capturing": lambda: False,
        "is_bf16_supported": lambda including_emulation=True: True,
    }  # fmt: skip
    for name, value in cuda.items():
        setattr(torch.cuda, name, value)
        if hasattr(torch.cuda.random, name):
            setattr(torch.cuda.random, name, value)
    torch.cuda.nccl.version = lambda: (2, 27, 3)
    _install_tensors()
    Work.wait = _wait_for
    dist.init_process_group = partial(_grouped, dist.init_process_group, 0)
    dist.new_group = partial(_grouped, dist.new_group, 2)
    dist.get_backend = dist.distributed_c10d.get_backend = _get_backend
    dist.is_backend_available = lambda backend: backend in ("gloo", "nccl")
    dist.distributed_c10d._get_object_coll_device = lambda group=None: (
        "cuda" if _get_backend(group) == "nccl" else "cpu"
    )
    torch.utils._foreach_utils._get_foreach_kernels_supported_devices = lambda: ["cuda"]


def _install_tensors() -> None:
    tensor, storage, as_subclass = torch.Tensor, torch.UntypedStorage, torch.Tensor.as_subclass
    tensor._make_subclass = staticmethod(_made_of)
    tensor.as_subclass = lambda self, cls: _made_of(cls, self) if _is_ours(self) else as_subclass(self, cls)
    tensor.data = property(_data.__get__, _set_data)
    tensor.record_stream = _record_stream
    tensor.__repr__ = lambda self, **_: _repr(self.detach().cpu() if _is_ours(self) else self)
    tensor.__torch_dispatch__ = classmethod(_device_of)
    storage.device = property(lambda s: s.emulated.device if hasattr(s, "emulated") else _storage_device.__get__(s))
    for op in (aten.empty_strided.default, aten.empty.memory_format, aten.copy_.default):  # lists go past all modes
        _LIBRARY.impl(op, partial(_past_modes, op), "CUDA")
    mode, bootstrap = _Mode(), threading.Thread._bootstrap_inner

    def with_mode(thread: threading.Thread) -> None:
        with mode:
            bootstrap(thread)

    threading.Thread._bootstrap_inner = with_mode
    mode.__enter__()
