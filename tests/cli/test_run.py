"""A run ends as its ranks end: well, or at once with the right rank's error first."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tulle.cli import main

pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # torchrun's
DEADLINE_S = 30.0

RECORD = """
import json, os, sys, time
rank, run = int(os.environ["RANK"]), os.environ["TULLE_RUN_DIR"]
def record(step):
    with open(f"{run}/rank-{rank}.jsonl", "a") as file:
        times = {"at": time.time(), "step_s": 0.1, "wait_s": 0.01}
        numbers = {"bytes_sent": 1000, "loss": 3.0 - rank, "tokens": 50, "total_steps": 8}
        file.write(json.dumps({"kind": "step", "step": step, **times, **numbers}) + "\\n")
"""
GOES_WELL = """
for step in range(1, 9): record(step)
print(f"rank {rank} has", sys.argv[1:])
if os.environ.get("TULLE_TIMELINE"):
    with open(f"{run}/timeline-rank-{rank}.json", "w") as file:
        json.dump({"traceEvents": [{"name": "forward", "ph": "X", "ts": rank, "dur": 1, "tid": 0, "pid": 0}]}, file)
"""
RANK_1_RAISES = """
record(1)
print(f"rank {rank} begins")
if rank == 0: open(f"{run}/rank-0-has-begun", "w").close()
while not os.path.exists(f"{run}/rank-0-has-begun"): time.sleep(0.01)
if rank == 1: raise ValueError("bad batch")
time.sleep(60)
"""
RANK_1_IS_KILLED = RANK_1_RAISES.replace('raise ValueError("bad batch")', "os.kill(os.getpid(), 9)")
PEERS_FALL = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
if rank == 1: raise ValueError("bad batch")
dist.all_reduce(torch.ones(3))
"""
ONLY_THE_FIRST_TIME = """
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
print("attempt", attempt, flush=True)
said = f"{run}/rank-0-has-said-so"
if rank == 0: open(said, "w").close()
while not os.path.exists(said): time.sleep(0.01)
if rank == 1 and attempt == "0": raise RuntimeError("once")
if attempt == "0": time.sleep(60)
"""


@pytest.fixture
def launch(tmp_path, monkeypatch, capsys, one_thread):
    """Run a script with `tulle run` on two ranks; return exit code, stdout, stderr and the run folder."""
    monkeypatch.chdir(tmp_path)

    def start(script, *options, arguments=()):
        (tmp_path / "train.py").write_text(RECORD + script)
        begin_s = time.monotonic()
        code = main(["run", "--processes", "2", "--run-dir", "out", *options, "train.py", *arguments])
        assert time.monotonic() - begin_s < DEADLINE_S
        output = capsys.readouterr()
        return code, output.out, output.err, tmp_path / "out"

    return start


def test_a_run_that_ends_well_leaves_summary_report_and_logs(launch):
    code, out, err, run = launch(GOES_WELL, arguments=["--json", "--help"])
    assert (code, "Traceback" in err) == (0, False)
    assert out.startswith("rank 0 has ['--json', '--help']\n")
    assert "rank 1 has" not in out
    assert "Report: out/report.html" in out
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["processes"], summary["steps"], summary["loss"]) == (2, 8, 2.5)
    assert (run / "logs" / "rank-1.log").read_text() == "rank 1 has ['--json', '--help']\n"
    assert (run / "report.html").exists()
    described = json.loads((run / "run.json").read_text())
    assert described["command"] == ["train.py", "--json", "--help"]
    assert (described["processes"], described["hosts"]) == (2, ["localhost"])


def test_json_is_all_that_stdout_gets(launch):
    code, out, err, run = launch(GOES_WELL, "--json", "--timeline")
    assert code == 0
    summary = json.loads(out)
    assert (summary["steps"], summary["failure"], summary["run"]) == (8, None, str(run))
    assert "rank 0 has" in err
    events = json.loads((run / "timeline.json").read_text())["traceEvents"]
    assert [event["pid"] for event in events if event["name"] == "forward"] == [0, 1]


def test_the_rank_that_raised_is_shown_first_and_the_run_ends_at_once(launch):
    code, out, err, run = launch(RANK_1_RAISES)
    assert code == 1
    assert "rank 0 begins" in out
    first, _, rest = err.partition("rank 1 failed first, after step 1: ValueError: bad batch\n")
    assert "Traceback" not in first
    assert rest.startswith('\nTraceback (most recent call last):\n  File "train.py", line')
    assert "rank 0 was ended by the launcher, because rank 1 had failed" in rest
    assert "Each rank's output: out/logs/rank-R.log" in rest
    assert "SIGTERM" in (run / "logs" / "launcher.log").read_text()
    assert (run / "report.html").exists()


def test_the_report_says_the_same_step_as_the_terminal(launch):
    late = "import atexit; atexit.register(record, 1)\nif rank == 1: raise ValueError('bad batch')\ntime.sleep(60)"
    _, _, err, run = launch(late)
    assert "rank 1 failed first, after step 1: ValueError" in err
    word = json.loads((run / "failure-rank-1.json").read_text())
    assert word["step"] == 1, "a rank writes its last records when it ends, after its word"
    assert word["traceback"]


def test_a_failure_is_in_the_json_too(launch):
    code, out, _, _ = launch(RANK_1_RAISES, "--json")
    assert code == 1
    assert json.loads(out)["failure"] == {"rank": 1, "step": 1, "error": "ValueError: bad batch"}


def test_a_rank_that_was_killed_is_named_with_its_signal(launch):
    code, _, err, run = launch(RANK_1_IS_KILLED)
    assert code == 1
    assert "rank 1 was killed by signal 9 (SIGKILL)" in err
    assert "  rank 1 begins" in err
    word = json.loads((run / "failure-rank-1.json").read_text())
    assert word["error"] == "was killed by signal 9 (SIGKILL)"


def test_peers_that_fell_are_not_taken_for_the_cause(launch):
    code, out, err, _ = launch(PEERS_FALL)
    assert code == 1
    assert "rank 1 failed first: ValueError: bad batch" in err
    assert err.count("Traceback") == 1
    assert "Traceback" not in out  # rank 0's own, which its log has


def test_ranks_can_be_restarted(launch):
    code, out, err, run = launch(ONLY_THE_FIRST_TIME, "--max-restarts", "1")
    assert (code, "Traceback" in err) == (0, False)
    assert "attempt 0\nattempt 1\n" in out
    assert not list(run.glob("failure-rank-*.json"))
    assert (run / "logs" / "rank-1.restart-1.log").read_text() == "attempt 1\n"


def test_threads_are_chosen_and_said(launch, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    code, out, err, _ = launch("print(os.environ['OMP_NUM_THREADS'])")
    assert code == 0
    assert f"OMP_NUM_THREADS={out.splitlines()[0]} (set it to choose yourself)" in err
    assert "No steps were recorded" in err


SLEEPS = """
print("begins", os.getpid())
time.sleep(60)
"""


@pytest.fixture
def sleeping_run(tmp_path):
    """A launcher in a process of its own whose two ranks sleep; yields it with the ranks' process numbers."""
    (tmp_path / "train.py").write_text(RECORD + SLEEPS)
    command = [sys.executable, "-c", "import sys; from tulle.cli import main; sys.exit(main())"]
    options = ["run", "--processes", "2", "--run-dir", "out", "train.py"]
    with subprocess.Popen([*command, *options], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        logs = [tmp_path / "out" / "logs" / f"rank-{rank}.log" for rank in range(2)]
        until(lambda: all(log.exists() and log.read_text().endswith("\n") for log in logs))
        yield run, [int(log.read_text().split()[1]) for log in logs]
        run.kill()


def until(condition):
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_ctrl_c_ends_all_ranks_with_code_130_and_is_no_failure(sleeping_run, tmp_path):
    run, ranks = sleeping_run
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=DEADLINE_S)
    assert run.returncode == 130
    assert b"Interrupted by signal 2 (SIGINT): all ranks were ended." in err
    assert b"Traceback" not in err
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)
    assert not list((tmp_path / "out").glob("failure-rank-*"))


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends the ranks on Linux only")
def test_a_launcher_that_is_killed_takes_its_ranks_with_it(sleeping_run):
    run, ranks = sleeping_run
    run.kill()
    until(lambda: not any(is_running(rank) for rank in ranks))


def is_running(process):
    try:
        return "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False
