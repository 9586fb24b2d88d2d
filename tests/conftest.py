"""What all tests share: the processes of the warm teams end with the session."""

import os
import tempfile
from collections.abc import Iterator

import hypothesis
import pytest
import torch
import torch.distributed as dist

from ranks import end_all_workers

if "TULLE_CACHE" not in os.environ:  # plans that tests make are kept there; ranks, which run this too, share it
    os.environ["TULLE_CACHE"] = tempfile.mkdtemp(prefix="tulle-cache-")
torch.set_num_threads(1)  # of this process, beside which the ranks of the teams run
# The first example of a test may wait for its team's processes to start.
hypothesis.settings.register_profile("tulle", deadline=None)
hypothesis.settings.load_profile("tulle")


@pytest.fixture(scope="session", autouse=True)
def _no_process_outlives_the_session() -> Iterator[None]:
    yield
    end_all_workers()


@pytest.fixture(autouse=True)
def _no_process_group_outlives_a_test() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("left a process group to the tests that follow in this process: mark it with on_ranks(1)")
