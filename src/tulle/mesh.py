"""`Mesh`: the processes of a run, arranged along named axes."""

from __future__ import annotations

import atexit
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any, TypeVar, cast
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from tulle.board import attend, is_failing, watch
from tulle.cost import Network
from tulle.environment import Launch, check_alone, detect, unmet
from tulle.errors import CommunicationError, MeshError
from tulle.kept_memory import keep_memory
from tulle.process_groups import backend_of
from tulle.shared_memory import meet

T = TypeVar("T")
DEFAULT_TIMEOUT_S = 600.0
_SETTLING_S = 0.05
_WAKING_S = 1.0
_NEVER_SENT = 2**30
"""The tag of a message that nobody sends."""
_joined = count()
"""Process groups that this process has joined with those of its run, as often as all others."""
_waiting: WeakSet[threading.Thread] = WeakSet()


@dataclass(frozen=True, slots=True)
class Axis:
    """One named axis of a mesh, seen from this process.

    Args:
        name: The axis' name.
        rank: This process's place along the axis, from 0.
        size: Number of processes along the axis.
        ranks: Global rank of each process along the axis, in order; `ranks[rank]` is this process.
        group: The `torch.distributed` process group of those processes.
        device: Where tensors of this axis' collectives live.
        timeout_s: Seconds after which a collective on this axis gives up.
        hosts: Number of the host of each process along the axis; empty means that each has its own.
    """

    name: str
    rank: int
    size: int
    ranks: tuple[int, ...]
    group: dist.ProcessGroup
    device: torch.device
    timeout_s: float
    hosts: tuple[int, ...] = ()
    lanes: dict[str, Axis] = field(default_factory=dict, compare=False, repr=False)
    """The same axis on further process groups, by purpose: see `tulle.comm.lane`."""
    measured: list[Network] = field(default_factory=list, compare=False, repr=False)
    """The network, once `tulle.comm.probe` has measured it."""
    kept: dict[object, Any] = field(default_factory=dict, compare=False, repr=False)
    """What floors above keep with the axis, by key. Lanes, networks and what is kept are made by collectives, so they
    must not hang on when a rank's garbage collector runs, but stay as long as the mesh."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """The processes of a run along named axes; `mesh["data"]` is one `Axis`. Made by `tulle.init`.

    Args:
        axes: The axes, the slowest-varying first.
        rank: This process among all, from 0.
        size: Number of processes.
        device: This process's device.

    Raises:
        MeshError: From `mesh[name]`, if there is no such axis.

    Example:
        >>> import tulle
        >>> mesh = tulle.init(data=-1, model=1)
        >>> mesh.shape, "pipe" in mesh, mesh["model"].size
        ({'data': 1, 'model': 1}, False, 1)
    """

    axes: tuple[Axis, ...]
    rank: int
    size: int
    device: torch.device

    def __getitem__(self, name: str) -> Axis:
        for axis in self.axes:
            if axis.name == name:
                return axis
        raise MeshError(
            f"the mesh has no axis {name!r}, it has {self!r}: use one of these names, or add the axis to tulle.init"
        )

    def __contains__(self, name: str) -> bool:
        return any(axis.name == name for axis in self.axes)

    def __iter__(self) -> Iterator[str]:
        return (axis.name for axis in self.axes)

    @property
    def shape(self) -> dict[str, int]:
        """Size of each axis by name."""
        return {axis.name: axis.size for axis in self.axes}

    def device_mesh(self) -> DeviceMesh:
        """The same mesh for `torch.distributed`'s own interfaces (`fully_shard`, `DTensor`)."""
        groups = [axis.group for axis in self.axes]
        grid = torch.arange(self.size).view(*self.shape.values())
        return DeviceMesh.from_group(groups, self.device.type, grid, mesh_dim_names=tuple(self.shape))

    def __repr__(self) -> str:
        return "Mesh(" + ", ".join(f"{axis.name}={axis.size}" for axis in self.axes) + ")"


def init(*, timeout: float | timedelta | None = None, backend: str | None = None, **axes: int) -> Mesh:
    """Arrange the processes of this run along named axes. Every process must call it, with the same axes.

    Joins the processes first if `torch.distributed` is not initialized yet: under torchrun, `tulle run` or Slurm
    by their environment variables; alone as a mesh of one process, where everything works too.

    Call it once a run: what is trained on a mesh makes process groups (sockets and threads), which further models on
    the same mesh use again, and which stay until `torch.distributed.destroy_process_group()`.

    On CPUs it has the C library keep memory that a step has freed for the next step, which is faster than to ask the
    system for it again. A variable of that library in the environment, such as `MALLOC_TRIM_THRESHOLD_`, prevents it.

    Args:
        timeout: Seconds after which a collective gives up (default 600). A process group that the caller
            initialized before keeps its own.
        backend: `torch.distributed` backend; default nccl where there is a GPU for each process, else gloo. A process
            group that was initialized before keeps its own.
        **axes: Size of each axis, `data=2, model=2` say; ranks next to each other differ in the last. One size may be
            -1, for as many as are left. Default `data=-1`.

    Raises:
        MeshError: If the product of the sizes is not the number of processes, a size is not a positive number,
            processes name different axes, or the backend is not there.
        CommunicationError: If one has ended meanwhile, or those that Slurm tells of do not come within the timeout.

    Example:
        >>> import tulle
        >>> mesh = tulle.init(data=-1)
        >>> mesh, mesh["data"].rank, mesh["data"].size
        (Mesh(data=1), 0, 1)
    """
    launch = detect()
    size = dist.get_world_size() if dist.is_initialized() else launch.size
    shape, error = _resolve(axes or {"data": -1}, size)
    if error is not None and size == 1:
        raise error
    timeout_s = _seconds(timeout)
    if backend is not None:
        _check_backend(backend)
    device = _device(launch, backend)
    if device.type == "cpu":
        keep_memory()
    if not dist.is_initialized():
        _join(launch, backend or ("nccl" if device.type == "cuda" else "gloo"), timeout_s, device)
    rank = dist.get_rank()
    hosts = _check_agreement(shape, error, launch.host_of(rank))
    meet(_gather)
    watch()
    attend(outlives=launch.launcher == "torchrun")
    return Mesh(_axes(shape, rank, device, timeout_s, hosts), rank, size, device)


def resolve(axes: Mapping[str, int], size: int) -> dict[str, int]:
    """Fill in the axis that is -1 and check that the sizes multiply to `size` processes.

    Example:
        >>> resolve({"data": -1, "pipe": 2}, 8)
        {'data': 4, 'pipe': 2}
    """
    given = " x ".join(f"{name}={length}" for name, length in axes.items())
    for name, length in axes.items():
        if not isinstance(length, int) or isinstance(length, bool) or (length < 1 and length != -1):
            raise MeshError(
                f"tulle.init was given {name}={length!r}, expected a positive number of processes or -1 for the rest"
            )
    open_axes = [name for name, length in axes.items() if length == -1]
    if len(open_axes) > 1:
        raise MeshError(f"tulle.init was given {given}: at most one axis can be -1, set the others")
    known = math.prod(length for length in axes.values() if length != -1)
    if open_axes and size % known == 0:
        return {name: size // known if length == -1 else length for name, length in axes.items()}
    if open_axes or known != size:
        raise MeshError(
            f"tulle.init was given {given}, which needs {'a multiple of ' if open_axes else ''}{known} processes, "
            f"but {size} run{'s' if size == 1 else ''}: change the sizes (-1 means the rest), "
            f"or start it with `tulle run --processes {known}`"
        )
    return dict(axes)


def check_axis(given: object, *, by: str) -> None:
    """Raise if somebody was given something else than an axis.

    Raises:
        MeshError: Naming it.
    """
    if not isinstance(given, Axis):
        raise MeshError(f"{by} was given a {type(given).__name__} as axis, expected one of a mesh: mesh['data'], say")


def axis_of(group: dist.ProcessGroup | None = None, *, name: str = "data") -> Axis:
    """A process group that the caller made (all processes, if None), as an axis. Costs no communication.

    Its hosts are not known: each process counts as one on a host of its own.
    """
    group = group or dist.group.WORLD
    if group is None:
        raise MeshError("torch.distributed is not initialized: call tulle.init or torch.distributed.init_process_group")
    ranks = tuple(dist.get_process_group_ranks(group))
    device = _device_of(group)
    timeout_s = _in_force(group, device, DEFAULT_TIMEOUT_S)
    return Axis(name, dist.get_rank(group), len(ranks), ranks, group, device, timeout_s)


def _device(launch: Launch, backend: str | None) -> torch.device:
    if (world := dist.group.WORLD) is not None:
        return _device_of(world)
    one_each = torch.cuda.is_available() and torch.cuda.device_count() >= launch.local_size
    if backend != "nccl" and not (backend is None and one_each):
        return torch.device("cpu")
    device = torch.device("cuda", launch.local_rank % max(1, torch.cuda.device_count()))
    torch.cuda.set_device(device)
    return device


def _device_of(group: dist.ProcessGroup) -> torch.device:
    """What a group that the caller made computes on; which GPU, the caller has set."""
    is_on_gpu = torch.cuda.is_available() and backend_of(group, "cuda") == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if is_on_gpu else torch.device("cpu")


def _check_backend(backend: str) -> None:
    if backend != "fake" and not (isinstance(backend, str) and dist.is_backend_available(backend)):
        raise MeshError(f"the backend {backend!r} is not in this build of PyTorch: use gloo, or install one with it")


def _join(launch: Launch, backend: str, timeout_s: float, device: torch.device) -> None:
    _check_backend(backend)
    timeout = timedelta(seconds=timeout_s)
    bound = device if device.type == "cuda" else None
    store, rank, size = _store(launch, timeout), launch.rank, launch.size
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout, device_id=bound)
    atexit.register(_leave)


def _store(launch: Launch, timeout: timedelta) -> Store:
    """What the processes meet at."""
    if launch.launcher == "alone":
        check_alone()
        return cast("Store", vars(dist)["HashStore"]())  # TCPStore would open a port, for nobody to talk to
    if launch.launcher == "slurm":
        url = f"tcp://{launch.address}:{launch.port}"
        try:
            return next(rendezvous(url, launch.rank, launch.size, timeout=timeout))[0]
        except dist.DistError as error:
            raise CommunicationError(unmet(launch, str(error))) from error
    # The launcher's outlives process groups: those before, of this attempt or another, have left addresses there at
    # which nobody is.
    name = f"attempt {launch.attempt}, process group {next(_joined)}"
    return PrefixStore(name, next(rendezvous("env://", timeout=timeout))[0])


def _seconds(timeout: float | timedelta | None) -> float:
    if timeout is None:
        return DEFAULT_TIMEOUT_S
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_number or not 0 < seconds <= threading.TIMEOUT_MAX:  # what is no number is neither
        raise MeshError(f"tulle.init was given timeout={timeout!r}, expected a positive number of seconds")
    return float(seconds)


def _in_force(group: dist.ProcessGroup, device: torch.device, timeout_s: float) -> float:
    """The time-out of a group: ours, or that with which the caller initialized it."""
    with suppress(RuntimeError, AttributeError):  # not every backend tells
        return group._get_backend(device).options._timeout.total_seconds()
    return timeout_s


def will_wait(thread: threading.Thread) -> threading.Thread:
    """Note a daemon thread that waits for other ranks, so that it is woken before the process ends."""
    _waiting.add(thread)
    return thread


def _leave() -> None:
    if dist.is_initialized():
        if is_failing() or any(thread.is_alive() for thread in _waiting):
            _wake()
        dist.destroy_process_group()
        # gloo's threads still let go of the last collective's tensors. One that waits for the interpreter when that
        # ends is unwound by it and aborts the process; in a sleep it gets its turn.
        time.sleep(_SETTLING_S)


os.register_at_fork(after_in_child=partial(atexit.unregister, _leave))


def _wake() -> None:
    """Have all that still waits for other ranks fail now: a thread that wakes when the interpreter ends aborts it.

    A wait that times out closes all connections of its group of gloo, and nothing else does.
    """
    message = torch.empty(1)
    for group in [*dist.distributed_c10d._world.pg_names]:
        is_gloo = backend_of(group, "cpu") == "gloo"
        for rank in dist.get_process_group_ranks(group) if is_gloo else ():
            with suppress(RuntimeError, ValueError):  # of a rank that is gone nothing is waited for; nor of this one
                work = dist.irecv(message, rank, group, tag=_NEVER_SENT)
                assert work is not None, "this rank is one of the group's"
                work.wait(timedelta(milliseconds=1))
    deadline_s = time.monotonic() + _WAKING_S
    for thread in [*_waiting]:
        thread.join(max(0.0, deadline_s - time.monotonic()))


def _resolve(axes: Mapping[str, int], size: int) -> tuple[dict[str, int], MeshError | None]:
    try:
        return resolve(axes, size), None
    except MeshError as error:
        return {}, error


def _check_agreement(shape: dict[str, int], error: MeshError | None, host: int) -> list[int]:
    """Raise on every rank if any rank's axes do not fit, or if ranks were given different ones; give each one's host.

    A host goes by the number of its first process where launchers number those of one host through.
    """
    heard = _gather((shape, error, host))
    if error is not None:
        raise error
    for rank, (_, theirs, _) in enumerate(heard):
        if theirs is not None:
            raise MeshError(f"rank {rank}: {theirs}")
    shapes = [other for other, _, _ in heard]
    for rank, other in enumerate(shapes):
        if list(other.items()) != list(shapes[0].items()):
            raise MeshError(
                f"rank {rank} called tulle.init with {other}, rank 0 with {shapes[0]}: "
                "every process must give the same axes in the same order"
            )
    return [other for _, _, other in heard]


def _gather(value: T) -> list[T]:
    """The values of all ranks."""
    heard = [value] * dist.get_world_size()
    try:
        dist.all_gather_object(heard, value)
    except RuntimeError as error:  # of any backend
        raise CommunicationError(f"tulle.init did not meet all processes: see the log of each rank. {error}") from error
    return heard


def _axes(
    shape: dict[str, int], rank: int, device: torch.device, timeout_s: float, hosts: list[int]
) -> tuple[Axis, ...]:
    grid = torch.arange(math.prod(shape.values())).view(*shape.values())
    axes: list[Axis] = []
    for dimension, (name, size) in enumerate(shape.items()):
        mine: tuple[int, ...] = ()
        group: dist.ProcessGroup | None = None
        for line in grid.movedim(dimension, -1).reshape(-1, size).tolist():
            made = _group(line, timeout_s)
            if rank in line:
                mine, group = tuple(line), made
        assert group is not None, "every rank lies on one line of each axis"
        in_force_s = _in_force(group, device, timeout_s)
        on_hosts = tuple(hosts[other] for other in mine)
        axes.append(Axis(name, mine.index(rank), size, mine, group, device, in_force_s, on_hosts))
    return tuple(axes)


def _group(ranks: list[int], timeout_s: float) -> dist.ProcessGroup:
    if len(ranks) == dist.get_world_size():
        world = dist.group.WORLD
        assert world is not None, "the process group was just initialized"
        return world
    made = dist.new_group(ranks, timeout=timedelta(seconds=timeout_s))
    # On a rank outside the group this is a placeholder, which nobody uses.
    return cast("dist.ProcessGroup", made)
