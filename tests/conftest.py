"""What all tests share: the processes of the warm teams end with the session."""

import gc
import importlib
import os
import tempfile
from collections.abc import Iterator

import hypothesis
import pytest
import torch
import torch.distributed as dist

from ranks import end_all_workers

if "TULLE_CACHE" not in os.environ:  # plans that tests make are kept there; ranks, which run this too, share it
    _CACHE = tempfile.TemporaryDirectory(prefix="tulle-cache-")
    os.environ["TULLE_CACHE"] = _CACHE.name
torch.set_num_threads(1)  # of this process, beside which the ranks of the teams run
# The first example of a test may wait for its team's processes to start.
hypothesis.settings.register_profile("tulle", deadline=None)
hypothesis.settings.load_profile("tulle")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Have processes of a long session import at once what many of its tests do.

    What this process has imported stays, as on ranks: the collections of a profile or a placement need not look at it.
    """
    if len(session.items) > 200:
        os.environ["TULLE_TESTS_MANY"] = "1"
        importlib.import_module("torch._dynamo")  # with the first optimizer, otherwise
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _no_process_outlives_the_session() -> Iterator[None]:
    yield
    end_all_workers()


@pytest.fixture(autouse=True)
def _a_process_group_of_this_process_ends_with_its_test() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
