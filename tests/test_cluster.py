"""The emulated cluster of benchmarks/cluster: names, addresses, a rank's environment, and two real hosts."""

import ipaddress
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks" / "cluster"
sys.path.insert(0, str(FOLDER))

from addresses import SUBNETS, Addresses, bits_per_s, free_subnet, pid_of, tag, tag_of  # noqa: E402
from cluster import Cluster, ClusterError, RankError  # noqa: E402
from hosts import ETC, hosts_file, remove_leftovers, require_system  # noqa: E402
from launch import rank_environment, run_ranks  # noqa: E402

ADDRESSES = Addresses("tl4711x0", 4, ipaddress.IPv4Network("10.99.7.0/24"))
ALL_REDUCE_BYTES = 8_000_000
ALL_REDUCE = f"""
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.ones({ALL_REDUCE_BYTES // 4})
dist.all_reduce(value)
begin_s = time.perf_counter()
dist.all_reduce(value)
print(time.perf_counter() - begin_s, value[0].item())
dist.destroy_process_group()
"""

needs_hosts = pytest.mark.skipif(
    not (sys.platform == "linux" and os.geteuid() == 0 and shutil.which("ip") and shutil.which("tc")),
    reason="network namespaces need root, ip and tc",
)


def of_process(pid: int) -> list[str]:
    """The namespaces and links of the clusters that a process runs."""
    listings = (["ip", "-json", "netns", "list"], ["ip", "-json", "link", "show"])
    entries = [
        entry
        for command in listings
        for entry in json.loads(subprocess.run(command, capture_output=True, check=True).stdout or b"[]")
    ]
    names = [entry.get("name") or entry.get("ifname") for entry in entries]
    names += [path.name for path in ETC.iterdir()] if ETC.exists() else []
    return [name for name in names if pid_of(name) == pid]


def python(code: str, **environment: str) -> tuple[list[str], dict[str, str]]:
    return [sys.executable, "-c", code], {**os.environ, **environment}


def test_names_fit_an_interface_and_tell_whose_they_are():
    addresses = Addresses(tag(4194304, 9), 100, SUBNETS[0])
    names = [addresses.bridge, *(addresses.host(number) for number in range(100))]
    assert len(set(names)) == 101
    assert max(map(len, names)) <= 15
    assert {pid_of(name) for name in names} == {4194304}
    assert {tag_of(name) for name in names} == {addresses.tag}


@pytest.mark.parametrize("name", ["eth0", "tl0", "tlx0h1", "docker0", "tl4711x0", "tl4711x0h1a"])
def test_names_of_others_are_no_clusters(name):
    assert pid_of(name) is None
    assert tag_of(name) is None


def test_hosts_have_addresses_of_their_own():
    assert [ADDRESSES.address(number) for number in range(4)] == ["10.99.7.1", "10.99.7.2", "10.99.7.3", "10.99.7.4"]


def test_a_host_finds_itself_and_the_others_by_name(monkeypatch):
    monkeypatch.setattr("hosts.socket.gethostname", lambda: "laptop")
    lines = hosts_file(ADDRESSES, 1).splitlines()
    assert lines[:2] == ["127.0.0.1 localhost", "10.99.7.2 laptop"]
    assert lines[2:] == ["10.99.7.1 host0", "10.99.7.2 host1", "10.99.7.3 host2", "10.99.7.4 host3"]


def test_a_subnet_that_is_taken_is_passed_over():
    assert free_subnet([], first=7) == SUBNETS[7]
    assert free_subnet([SUBNETS[7], ipaddress.IPv4Network("10.99.8.128/25")], first=7) == SUBNETS[9]
    assert free_subnet([SUBNETS[255]], first=255) == SUBNETS[0]
    with pytest.raises(ValueError, match=r"all of 10\.99\.0\.0/16 is taken"):
        free_subnet([ipaddress.IPv4Network("10.0.0.0/8")])


@pytest.mark.parametrize(
    ("rate", "expected"), [("1gbit", 1e9), ("2.5gbit", 2.5e9), ("250mbit", 2.5e8), ("64kbit", 64e3), ("none", 1e999)]
)
def test_a_rate_is_read_as_tc_reads_it(rate, expected):
    assert bits_per_s(rate) == expected


@pytest.mark.parametrize("rate", ["", "fast", "1", "1gb", "-1gbit", "0mbit", "1 gbit"])
def test_what_is_no_rate_is_refused_before_anything_starts(rate):
    with pytest.raises(ValueError, match="a rate is a number with kbit, mbit or gbit, or none"):
        Cluster(hosts=2, rate=rate)


def test_a_rank_is_told_what_torchrun_would_tell():
    environment = rank_environment(ADDRESSES, rank=5, ranks_per_host=2, port=29503)
    assert environment == {
        "MASTER_ADDR": "10.99.7.1",
        "MASTER_PORT": "29503",
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "2",
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
    }


def test_a_missing_program_is_named_with_what_to_do(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr("hosts.shutil.which", lambda program: None if program == "tc" else program)
    with pytest.raises(ClusterError, match="tc not found: install iproute2"):
        require_system()


def test_a_user_who_is_not_root_is_told_so(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr("hosts.shutil.which", lambda program: program)
    monkeypatch.setattr("hosts.os.geteuid", lambda: 1000)
    with pytest.raises(ClusterError, match="need root: run with sudo"):
        require_system()


def test_a_cluster_that_is_not_up_says_so():
    with pytest.raises(ClusterError, match="inside `with Cluster"):
        Cluster(hosts=2).run(["true"])


def test_the_first_rank_that_fails_ends_the_others():
    code = "import os, sys, time; os.environ['R'] == '1' and sys.exit('it broke'); time.sleep(60)"
    with pytest.raises(RankError, match=r"rank 1 failed with exit code 1; .*\nit broke") as caught:
        run_ranks([python(code, R=str(rank)) for rank in range(3)], timeout_s=30, echo=False)
    assert (caught.value.rank, caught.value.exit_code, caught.value.stderr_tail) == (1, 1, "it broke")


def test_a_rank_that_is_killed_is_told_with_the_signal():
    with pytest.raises(RankError, match="rank 0 was ended by SIGKILL") as caught:
        run_ranks([python("import os; os.kill(os.getpid(), 9)")], timeout_s=30, echo=False)
    assert caught.value.exit_code == 137


def test_the_time_limit_ends_all_ranks():
    with pytest.raises(RankError, match="rank 0 was still running at the time limit") as caught:
        run_ranks([python("import time; time.sleep(60)")] * 2, timeout_s=0.3, echo=False)
    assert caught.value.exit_code == 124


def test_what_ranks_print_is_returned_and_shown_line_by_line(capfd):
    code = "import os; print('one'); print('rank', os.environ['R'], end='')"
    printed = run_ranks([python(code, R=str(rank)) for rank in range(2)], timeout_s=30, echo=True)
    assert printed == ["one\nrank 0", "one\nrank 1"]
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0] one", "[0] rank 0", "[1] one", "[1] rank 1"]


@needs_hosts
def test_two_hosts_reduce_over_a_link_that_is_held_to_its_rate():
    with Cluster(hosts=2, rate="200mbit") as cluster:
        rate = cluster.measured_rate(duration_s=0.5)
        printed = cluster.run([sys.executable, "-c", ALL_REDUCE], timeout_s=60)
        assert of_process(os.getpid()), "this is how leftovers would be seen"
    # A busy machine may not fill the link; were its two directions one, each would have half.
    assert all(110e6 < value < 205e6 for value in rate.as_dict().values()), rate
    seconds, value = map(float, printed[0].split())
    assert value == 4
    # Each of two ranks sends the whole tensor once. The link's burst allowance makes it a little faster.
    assert 0.9 * ALL_REDUCE_BYTES * 8 / 200e6 < seconds < 3 * ALL_REDUCE_BYTES * 8 / 200e6
    assert of_process(os.getpid()) == []


@needs_hosts
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_after_a_signal(number):
    runner = subprocess.Popen(
        [sys.executable, str(FOLDER), "--hosts", "2", "--", "sh", "-c", "echo pid $$; sleep 60"],
        stdout=subprocess.PIPE,
        text=True,
        # A shell's job in the background ignores Ctrl-C, and so would all that it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    alarm = threading.Timer(30, runner.kill)
    alarm.start()
    assert runner.stdout is not None
    pids = [int(runner.stdout.readline().split()[-1]) for _ in range(2)]
    assert of_process(runner.pid)
    runner.send_signal(number)
    runner.communicate()
    alarm.cancel()
    assert runner.returncode == 128 + number
    assert of_process(runner.pid) == []
    assert not any(Path("/proc", str(pid)).exists() for pid in pids)


@needs_hosts
def test_what_a_killed_run_left_is_removed_by_the_next():
    runner = subprocess.Popen(
        [sys.executable, str(FOLDER), "--hosts", "2", "--", "sh", "-c", "echo up; sleep 60"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert runner.stdout is not None
    runner.stdout.readline()
    runner.kill()
    runner.communicate()
    assert of_process(runner.pid), "a killed run cannot clean up"
    assert tag(runner.pid, 0) in remove_leftovers()
    assert of_process(runner.pid) == []
