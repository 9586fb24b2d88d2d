"""`BackgroundThread`: does exchanges of several steps, one after the other, while forward and backward compute."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from queue import SimpleQueue
from typing import Generic, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor

from tulle.comm.traffic import now_s, traffic
from tulle.mesh import Axis, will_wait

T = TypeVar("T")
_LEAVING_S = 1.0
_threads: WeakSet[BackgroundThread] = WeakSet()
_own = threading.local()
"""On a thread of jobs that takes turns: these."""


class BackgroundThread:
    """Does jobs in the order in which they were submitted, in a thread of its own.

    Each job's collectives must be on process groups that nobody else uses, and all ranks must submit the same jobs
    in the same order.

    On CUDA nccl's kernels wait for the other ranks on the GPU, so that all ranks must begin those of all their process
    groups in one order, and what two threads do beside each other has none. So they take turns there: `submit` returns
    when the thread has done the job or is to `pause` in it, and it goes on at the next `submit` or `result`.

    Jobs run on a stream of their own there. A job waits for what the submitting stream had been given before, and the
    stream that calls `result` waits for the job; the host waits for neither. A result may be dropped while a stream has
    still to read it. Tensors that a job is given, and that nobody holds until its result is there, the job must pass to
    `used_here`.

    Args:
        name: What its thread is called in a debugger.
        device: Of the tensors.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self._name = name
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        is_on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if is_on_gpu else None
        self._turns = _Turns() if is_on_gpu else None
        _threads.add(self)

    @property
    def takes_turns(self) -> bool:
        """Whether jobs go on only in `submit` and in `result`, as on CUDA."""
        return self._turns is not None

    def submit(
        self, work: Callable[[], T], *, meanwhile: Callable[[], None] | None = None, after_s: float = 1.0
    ) -> Job[T]:
        """Have some work done after all that was submitted before; call it from one thread at a time.

        Args:
            work: It.
            meanwhile: On CUDA, called each time the thread has not come back for so many seconds; what it raises ends
                the wait.
            after_s: These.
        """
        if self._thread is None:
            self._thread = will_wait(
                threading.Thread(target=_deliver, args=(self._jobs, self._turns), name=self._name, daemon=True)
            )
            self._thread.start()
            atexit.unregister(_close_all)
            atexit.register(_close_all)  # runs before what ends the process groups, which was registered earlier
        job = Job(work, self._stream, self._turns)
        self._jobs.put(job.run)
        while self._turns is not None and not job.is_begun:  # those before it are done first
            self._turns.give(meanwhile, after_s)
        return job

    def close(self) -> None:
        """Let the thread end once it has done what it was given; wait a moment for that."""
        if self._thread is not None:
            self._end()
            self._thread.join(_LEAVING_S)
            self._thread = None

    def __del__(self) -> None:
        self._end()

    def _end(self) -> None:
        self._jobs.put(None)
        if self._turns is not None:
            self._turns.give_up()


class _Turns:
    """Those of two threads of which one runs at a time: the one that does jobs, and whoever has them done."""

    def __init__(self) -> None:
        self._of_jobs, self._of_others = threading.Semaphore(0), threading.Semaphore(0)
        self._is_given = False

    def give(self, meanwhile: Callable[[], None] | None = None, after_s: float | None = None) -> None:
        """Have the thread of jobs go on until it takes a pause or has nothing to do.

        Args:
            meanwhile: Called each time so many seconds have passed; what it raises ends the wait, not the turn.
            after_s: These.
        """
        if not self._is_given:
            self._is_given = True
            self._of_jobs.release()
        while not self._of_others.acquire(timeout=after_s if meanwhile else None):
            assert meanwhile is not None, "else it is waited for without end"
            meanwhile()
        self._is_given = False

    def give_up(self) -> None:
        """Have the thread of jobs go on, and do not come back."""
        self._of_jobs.release()

    def take(self) -> None:
        """What the thread of jobs begins with."""
        self._of_jobs.acquire()

    def give_back(self) -> None:
        """What the thread of jobs does at a pause, and when there is nothing to do."""
        self._of_others.release()
        self._of_jobs.acquire()


class Job(Generic[T]):
    """Some work that a background thread does, as a `concurrent.futures.Future`; `result` waits for it.

    Whoever submits work must call `result`: what the work raises is raised there, and nowhere else.
    """

    def __init__(
        self, work: Callable[[], T], stream: torch.cuda.Stream | None = None, turns: _Turns | None = None
    ) -> None:
        self.is_begun = False
        self._turns = turns
        self._work: Callable[[], T] | None = work
        self._future: Future[T] = Future()
        self._stream = stream
        self._given = torch.cuda.current_stream(stream.device).record_event() if stream is not None else None

    def run(self) -> None:
        """Do the work; what it raises is raised by `result`."""
        assert self._work is not None, "a job is run once"
        self.is_begun = True
        try:
            if self._stream is None or self._given is None:
                result = self._work()
            else:
                with torch.cuda.stream(self._stream):
                    self._stream.wait_event(self._given)
                    result = self._work()
        except BaseException as error:
            self._future.set_exception(error)
        else:
            self._future.set_result(result)
        finally:
            self._work = None  # what it holds can go

    def result(self, *, meanwhile: Callable[[], None] | None = None, after_s: float = 1.0) -> T:
        """Wait, and give the result, or raise what the work raised.

        Args:
            meanwhile: Called each time so many seconds have passed; what it raises ends the wait.
            after_s: These.
        """
        begin_s = now_s()
        try:
            while self._turns is not None and not self._future.done():
                self._turns.give(meanwhile, after_s)
            while meanwhile is not None and not self._is_done(after_s):
                meanwhile()
            result = self._future.result()
        finally:
            traffic.waited(now_s() - begin_s)
            traffic.span("waiting", "wait: tables", begin_s, now_s())
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
            used_here(*_tensors_in(result))
        return result

    @property
    def is_over(self) -> bool:
        """Whether it is done, or has failed."""
        return self._future.done()

    def _is_done(self, within_s: float) -> bool:
        try:
            self._future.exception(within_s)
        except TimeoutError:
            return False
        return True


def pause() -> None:
    """In a job, before the host reads what other ranks send: on CUDA whoever submitted it goes on meanwhile.

    All ranks must call it at the same places. Elsewhere it does nothing.
    """
    turns: _Turns | None = getattr(_own, "turns", None)
    if turns is not None:
        turns.give_back()


@contextmanager
def beside(axis: Axis) -> Iterator[None]:
    """On CUDA, exchanges within do not wait for what the current stream was given.

    For numbers of the host, which it reads again within: it then waits for the other ranks only. All tensors must be
    made within, and none used afterwards.
    """
    if axis.device.type != "cuda":
        yield
        return
    if beside not in axis.kept:
        axis.kept[beside] = torch.cuda.Stream(axis.device)
    with torch.cuda.stream(axis.kept[beside]):
        yield


def used_here(*tensors: Tensor) -> None:
    """Have memory that belongs to another stream stay until the current one is done with it.

    Memory is given back to the stream on which it was allocated as soon as no tensor holds it, and used there again,
    whatever another stream has still to read.
    """
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def _tensors_in(value: object) -> Iterator[Tensor]:
    """Those that a result is made of."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors_in([*value.values()])
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors_in(one)
    elif is_dataclass(value) and not isinstance(value, Axis | type):
        yield from _tensors_in([getattr(value, field.name) for field in fields(value)])


def _deliver(jobs: SimpleQueue[Callable[[], None] | None], turns: _Turns | None) -> None:
    # A function and not a method, so that the thread does not keep its `BackgroundThread` alive.
    traffic.is_background.flag = True
    if turns is not None:
        _own.turns = turns
        turns.take()
    while (run := _next(jobs, turns)) is not None:
        run()
        del run


def _next(jobs: SimpleQueue[Callable[[], None] | None], turns: _Turns | None) -> Callable[[], None] | None:
    while turns is not None and jobs.empty():
        turns.give_back()
    return jobs.get()


def _close_all() -> None:
    for thread in list(_threads):
        thread.close()
