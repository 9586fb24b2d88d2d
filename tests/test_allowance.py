"""In a container a process uses what the container has, whichever version of control groups says so."""

import os

import pytest

from tulle.allowance import cores, memory_bytes

MACHINE_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
ALL = len(os.sched_getaffinity(0))
V1 = "4:memory:/pod/job\n2:cpu,cpuacct:/pod/job\n1:name=systemd:/\n"


def kernel(root, files):
    """Files of a kernel below `root`."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


CONTAINERS = {
    "version 2": {
        "proc/self/cgroup": "0::/pod/job\n",
        "sys/fs/cgroup/pod/job/cpu.max": "max 100000\n",
        "sys/fs/cgroup/pod/cpu.max": "150000 100000\n",
        "sys/fs/cgroup/pod/job/memory.max": "1048576\n",
        "sys/fs/cgroup/pod/memory.max": "max\n",
    },
    "version 2, from within": {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/cpu.max": "100000 100000\n",
        "sys/fs/cgroup/memory.max": "1048576\n",
    },
    "version 1": {
        "proc/self/cgroup": V1,
        "sys/fs/cgroup/cpu/pod/job/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu/pod/job/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/cpu/pod/cpu.cfs_quota_us": "199999\n",
        "sys/fs/cgroup/cpu/pod/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/memory/pod/job/memory.limit_in_bytes": "1048576\n",
    },
    "version 1, from within": {
        "proc/self/cgroup": V1,
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "1048576\n",
    },
}


@pytest.mark.parametrize("files", CONTAINERS.values(), ids=CONTAINERS)
def test_a_container_has_what_it_was_given(tmp_path, files):
    root = kernel(tmp_path, files)
    assert (cores(root), memory_bytes(root)) == (1, 2**20)


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"},
        {
            "proc/self/cgroup": V1,
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": f"{(ALL + 1) * 100000}\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
    ],
    ids=["no control groups", "no limits", "more than there is"],
)
def test_what_is_not_limited_is_that_of_the_machine(tmp_path, files):
    root = kernel(tmp_path, files)
    assert (cores(root), memory_bytes(root)) == (ALL, MACHINE_BYTES)
