"""`keep_memory`: the C library keeps what a step gives back, for the next.

When activations are gone glibc gives the end of its heap back to the system, page by page, and gets it from there,
zeroed, with the next step: up to a quarter of its time on a CPU. Micro-batches of a pipeline run on threads, to each of
which it gives an arena of its own: there it is a twentieth.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""Numbers of what `mallopt` sets: see malloc.h, and mallopt(3)."""
_SETTINGS = {
    _MMAP_THRESHOLD: 32 * 2**20,  # the most that can be asked for, and what glibc comes to by itself
    _TRIM_THRESHOLD: 2**31 - 1,
    _TOP_PAD: 2**20,  # so that arenas keep stretches that are empty
}
_USERS_OWN = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")
"""Variables of the environment by which users set it."""


@cache
def keep_memory() -> None:
    """Set this for the process, once, unless its user has set it in the environment, or its C library knows no such."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not any(name in os.environ for name in _USERS_OWN):
        for what, value in _SETTINGS.items():
            mallopt(what, value)
