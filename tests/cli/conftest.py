"""What the tests of the commands share: launches that happen in pytest's own process."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Launch ranks of one thread each; torchrun leaves their logs for the garbage collector to close."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield
    gc.collect()
