"""A background thread does its jobs in order, and whatever happens to one comes out at `result()`."""

import gc
import threading
import weakref
from contextlib import nullcontext

import pytest
import torch

import tulle
from ranks import on_ranks
from tulle import comm
from tulle.comm import BackgroundThread, Job, pause, traffic
from tulle.comm import background as background_module
from tulle.mesh import Axis
from tulle.rows import RowSparse
from tulle.tables.split import RowSplit

CPU = torch.device("cpu")
SOON_S = 20.0  # a wait that ends at once where all is well


@pytest.fixture
def background():
    one = BackgroundThread("test", CPU)
    yield one
    one.close()


def test_jobs_are_done_in_the_order_in_which_they_came_by_one_other_thread(background):
    seen: list[tuple[int, int]] = []
    held = threading.Event()
    first = background.submit(lambda: held.wait(SOON_S))
    jobs = [background.submit(lambda k=k: seen.append((k, threading.get_ident()))) for k in range(50)]
    assert seen == [], "nobody overtakes the first"
    held.set()
    assert first.result() is True
    for job in reversed(jobs):
        job.result()
    assert [k for k, _ in seen] == list(range(50))
    assert len({thread for _, thread in seen}) == 1
    assert seen[0][1] != threading.get_ident()


def test_a_result_is_given_as_often_as_it_is_asked_for(background):
    job = background.submit(lambda: [1, 2])
    assert job.result() is job.result()
    assert job.result() == [1, 2]


def test_what_a_job_raises_comes_out_at_its_result_and_the_next_job_is_done(background):
    def fall() -> None:
        raise ValueError("this one fell")

    fallen, next_one = background.submit(fall), background.submit(lambda: 7)
    assert next_one.result() == 7
    for _ in range(2):
        with pytest.raises(ValueError, match="this one fell"):
            fallen.result()


def test_a_job_lets_go_of_what_it_worked_on(background):
    class Large:
        pass

    large = Large()
    left = weakref.ref(large)
    job = background.submit(lambda large=large: id(large))
    del large
    job.result()
    background.submit(lambda: None).result()  # the thread has gone on
    gc.collect()
    assert left() is None


def test_only_what_the_process_waits_for_counts_as_its_waiting(background):
    held = threading.Event()

    def wait_there() -> None:
        traffic.waited(1000.0)
        traffic.span("waiting", "wait: rows", 0.0, 1000.0)
        held.wait(SOON_S)

    before_s = traffic.wait_s
    traffic.take_spans()
    traffic.is_tracing = True
    try:
        job = background.submit(wait_there)
        assert traffic.wait_s == before_s
        threading.Timer(0.05, held.set).start()
        job.result()
    finally:
        traffic.is_tracing = False
    assert 0.0 < traffic.wait_s - before_s < SOON_S, "this thread stood still for the result, not for 1000 s"
    tracks = {span.name: span.track for span in traffic.take_spans()}
    assert tracks == {"wait: rows": "tables", "wait: tables": "waiting"}
    traffic.waited(1.0)
    assert traffic.wait_s - before_s > 1.0, "the twin: what this thread waits is counted"


def test_a_background_thread_that_is_closed_has_done_its_jobs_and_may_be_given_new_ones(background):
    jobs = [background.submit(lambda k=k: k) for k in range(5)]
    thread = background._thread
    background.close()
    assert not thread.is_alive()
    assert [job.result() for job in jobs] == list(range(5))
    background.close()  # again: nothing is left to do
    assert background.submit(lambda: 8).result() == 8


def test_without_a_job_no_thread_runs(background):
    assert background._thread is None
    background.close()
    assert background._thread is None


def test_a_background_thread_ends_when_nobody_holds_it():
    background = BackgroundThread("dropped", CPU)
    job = background.submit(lambda: 3)
    thread, left = background._thread, weakref.ref(background)
    del background
    gc.collect()
    assert left() is None
    thread.join(SOON_S)
    assert not thread.is_alive()
    assert job.result() == 3, "what it was given before is done"


class Stream:
    """What a job asks of a CUDA stream."""

    device = CPU

    def __init__(self) -> None:
        self.waited_for: list[object] = []
        self.wait_event = self.wait_stream = self.waited_for.append

    def record_event(self) -> str:
        return "given"


def test_on_a_gpu_what_a_job_gives_is_waited_for_and_outlives_its_last_reader(monkeypatch):
    theirs, ours, kept = Stream(), Stream(), []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: ours)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda one, stream: kept.append((one, stream)), raising=False)
    axis = Axis("data", 0, 1, (0,), object(), CPU, 1.0, kept={"scratch": [torch.zeros(1)]})
    tensors = [torch.tensor([n]) for n in range(4)]
    rows = RowSparse.trusted(tensors[0], tensors[1].view(1, 1), 5)
    given = {3: [rows, (tensors[2], None)], "split": RowSplit("words", 5, 1, axis), "sum": tensors[3]}
    job = Job(lambda: given, theirs)
    job.run()
    assert theirs.waited_for == ["given"]
    assert job.result() is given
    assert ours.waited_for == [theirs]
    assert sorted(one.item() for one, stream in kept if stream is ours) == [0, 1, 2, 3]


@pytest.fixture
def in_turns(background):
    """As on a GPU."""
    background._turns = background_module._Turns()
    return background


def test_in_turns_work_is_done_when_it_is_submitted(in_turns):
    seen: list[int] = []
    for k in range(50):
        job = in_turns.submit(lambda k=k: seen.append(k))
        assert job._future.done()
        assert seen[-1] == k
    assert threading.get_ident() != in_turns.submit(threading.get_ident).result()


def test_in_turns_a_job_that_takes_a_pause_goes_on_at_the_next_or_at_its_result(in_turns):
    seen: list[str] = []

    def work(name: str) -> str:
        seen.append(f"{name} begins")
        pause()
        seen.append(f"{name} goes on")
        pause()
        seen.append(f"{name} ends")
        return name

    first = in_turns.submit(lambda: work("first"))
    assert seen == ["first begins"]
    second = in_turns.submit(lambda: work("second"))
    assert seen == ["first begins", "first goes on", "first ends", "second begins"]
    assert first.result() == "first"
    assert seen[-1] == "second begins", "what is done need not go on"
    assert second.result() == "second"
    assert seen[-1] == "second ends"


def test_in_turns_what_a_job_raises_after_a_pause_comes_out_at_its_result(in_turns):
    def fall() -> None:
        pause()
        raise ValueError("fell")

    fallen, next_one = in_turns.submit(fall), in_turns.submit(lambda: 7)
    assert next_one.result() == 7
    with pytest.raises(ValueError, match="fell"):
        fallen.result()


def test_in_turns_whoever_waits_is_told_of_time_that_passes(in_turns):
    told: list[bool] = []
    enough = threading.Event()

    def meanwhile() -> None:
        told.append(True)
        if len(told) == 3:
            enough.set()

    def work() -> bool:
        pause()
        return enough.wait(SOON_S)

    assert in_turns.submit(work).result(meanwhile=meanwhile, after_s=0.01)
    assert len(told) >= 3


def test_in_turns_a_wait_that_somebody_ends_can_be_begun_again(in_turns):
    enough = threading.Event()

    def give_up() -> None:
        raise ValueError("enough of it")

    def work() -> bool:
        pause()
        return enough.wait(SOON_S)

    job = in_turns.submit(work)
    with pytest.raises(ValueError, match="enough of it"):
        job.result(meanwhile=give_up, after_s=0.01)
    enough.set()
    assert job.result() is True
    assert in_turns.submit(lambda: 4)._future.done()


def test_in_turns_a_thread_that_is_closed_in_a_pause_ends_its_job_and_may_be_given_new_ones(in_turns):
    def work() -> int:
        pause()
        return 5

    job, thread = in_turns.submit(work), in_turns._thread
    in_turns.close()
    assert not thread.is_alive()
    assert job._future.result(0) == 5
    assert in_turns.submit(lambda: 8).result() == 8


def test_elsewhere_a_pause_does_nothing(background):
    pause()
    assert background.submit(lambda: pause() or 3).result() == 3


def test_one_background_thread_does_not_wait_for_another():
    slow, fast = BackgroundThread("slow", CPU), BackgroundThread("fast", CPU)
    held = threading.Event()
    waiting: Job[bool] = slow.submit(lambda: held.wait(SOON_S))
    assert fast.submit(lambda: "there").result() == "there"
    assert not waiting._future.done()
    held.set()
    assert waiting.result() is True
    slow.close()
    fast.close()


@on_ranks(2, 3)
def test_background_threads_exchange_beside_the_process_and_beside_each_other():
    axis = tulle.init(data=-1)["data"]
    lanes = [comm.lane(axis, name) for name in ("first", "second")]
    threads = [BackgroundThread("first", CPU), BackgroundThread("second", CPU)]

    def exchange(step: int, which: int) -> float:
        gathered = comm.all_gather_parts(torch.full((3,), float(step)), [3] * axis.size, lanes[which], label="there")
        reduced = comm.all_reduce(torch.tensor(float(which)), lanes[which], label="there")
        return gathered.wait().sum().item() + reduced.wait().item()

    jobs = {}
    for step in range(10):
        for which in (0, 1) if axis.rank else (1, 0):  # each thread's own order is all that must agree
            jobs[step, which] = threads[which].submit(lambda step=step, which=which: exchange(step, which))
        mine = comm.all_reduce(torch.tensor(float(step)), axis, label="here").wait()
        assert mine.item() == step * axis.size
    for (step, which), job in jobs.items():
        assert job.result() == axis.size * (3 * step + which)
    for background in threads:
        background.close()
