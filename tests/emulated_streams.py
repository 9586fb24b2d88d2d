"""Streams of a GPU that is none: vector clocks say which kernels are over when another begins, and find races.

A kernel is over for another if it came before on the same stream, or if that stream, or the host, waited since. Every
stream counts its kernels; what it has waited for is a count of each other stream.
"""

import ctypes
import os
import sys
import threading

assert "torch" not in sys.modules, "what C++ holds for CUDA is looked up when torch is imported"
GUARD = ctypes.CDLL(os.environ["TULLE_EMULATED_GUARD"])
GUARD.emulated_stream.restype = ctypes.c_int64

import torch  # noqa: E402

Key = tuple[int, object]
"""A device and a stream of it."""
State = dict[Key, int]
"""Kernels of each stream that are over."""

races: list[str] = []
syncs: list[tuple[str, str, bool]] = []
"""What made the host wait for the device: the operation, the line of tulle, and whether the thread was tulle's own."""
lock = threading.RLock()
launched: State = {}
_waited: dict[Key, State] = {}
_host: State = {}
memory_bytes = {"now": 0, "peak": 0}


def where() -> str:
    """The line of tulle that is running."""
    frame = sys._getframe(1)
    while frame is not None:
        if "/tulle/" in frame.f_code.co_filename:
            return f"{frame.f_code.co_filename.rpartition('/tulle/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


def index_of(device: object) -> int:
    """The number of a device; of the current one if it says none."""
    index = device if isinstance(device, int) or device is None else torch.device(device).index
    return GUARD.emulated_device() if index is None else index


def current(device: object = None) -> Key:
    """The current stream."""
    index = index_of(device)
    return index, GUARD.emulated_stream(index)


def over(stream: Key) -> State:
    """What is over before the next kernel of a stream begins."""
    return merged(_waited.get(stream, {}), {stream: launched.get(stream, 0)}, _host)


def merged(*states: State) -> State:
    """What is over in any."""
    return {stream: max(state.get(stream, 0) for state in states) for state in states for stream in state}


def wait(stream: Key, state: State) -> None:
    """Have a stream wait."""
    with lock:
        _waited[stream] = merged(_waited.get(stream, {}), state)


def launch(stream: Key) -> int:
    """Count one more kernel."""
    with lock:
        wait(stream, _host)
        launched[stream] = launched.get(stream, 0) + 1
        return launched[stream]


def host_waits(operation: str, *streams: Key) -> None:
    """The host waits for all that some streams were given."""
    with lock:
        syncs.append((operation, where(), threading.current_thread().name.startswith("tulle")))
        _host.update(merged(_host, *map(over, streams)))


def host_reads(what: str, copied: State) -> None:
    """The host reads memory into which copies go."""
    if any(_host.get(stream, 0) < number for stream, number in copied.items()):
        races.append(f"{what} at {where()} reads on the host what a copy still writes")


class Memory:
    """What lies behind the tensors that share it: on which stream it was allocated, who reads and writes it."""

    def __init__(self, device: torch.device, size_bytes: int) -> None:
        self.device, self.size_bytes, self.home = device, size_bytes, current(device)
        self.uses: list[tuple[Key, int, str, tuple[int, int], bool]] = []
        self.kept_for: set[Key] = set()
        """Streams of which `record_stream` told the allocator."""
        memory_bytes["now"] += size_bytes
        memory_bytes["peak"] = max(memory_bytes.values())

    def touch(self, stream: Key, what: str, span: tuple[int, int], *, writes: bool) -> None:
        """The latest kernel of a stream reads or writes these bytes."""
        known, uses = over(stream), []
        for use in self.uses:
            other, number, before, (begin, end), wrote = use
            meets = begin < span[1] and span[0] < end
            if other != stream and (writes or wrote) and meets and known.get(other, 0) < number:
                races.append(f"{what} on {stream} does not wait for {before} on {other}")
            is_past = span[0] <= begin and end <= span[1] and (writes or (other == stream and not wrote))
            if not is_past:
                uses.append(use)
        self.uses = [*uses, (stream, launched[stream], what, span, writes)]

    def __del__(self) -> None:
        memory_bytes["now"] -= self.size_bytes
        known = over(self.home)
        for stream, number, what, *_ in self.uses:
            if stream != self.home and stream not in self.kept_for and known.get(stream, 0) < number:
                races.append(f"memory of {self.home} is given back while {what} on {stream} uses it")


class Stream:
    """A stand-in for torch.cuda.Stream."""

    _count = 0

    def __init__(self, device: object = None, priority: int = 0, *, key: Key | None = None) -> None:
        Stream._count += key is None
        self.key = key or (index_of(device), Stream._count)
        self.device = torch.device("cuda", self.key[0])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.key == self.key

    def __hash__(self) -> int:
        return hash(self.key)

    def wait_stream(self, other: "Stream") -> None:
        wait(self.key, over(other.key))

    def wait_event(self, event: "Event") -> None:
        wait(self.key, event.state)

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        host_waits("synchronize", self.key)


class Event:
    """A stand-in for torch.cuda.Event."""

    def __init__(self, **_: bool) -> None:
        self.state: State = {}

    def record(self, stream: Stream | None = None) -> None:
        self.state = over(stream.key if stream else current())

    def wait(self, stream: Stream | None = None) -> None:
        wait(stream.key if stream else current(), self.state)


class StreamContext:
    """A stand-in for `torch.cuda.stream`."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.before = GUARD.emulated_device(), current(self.stream.device)
            GUARD.emulated_set_device(self.stream.key[0])
            GUARD.emulated_set_stream(*self.stream.key)

    def __exit__(self, *_: object) -> None:
        if self.stream is not None:
            GUARD.emulated_set_stream(*self.before[1])
            GUARD.emulated_set_device(self.before[0])
