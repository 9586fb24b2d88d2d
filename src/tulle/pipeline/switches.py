"""`Switches`: what holds for the whole process, and code sets for a while: kernels of attention, the default dtype.

Autocast and `no_grad` are each thread's own; these are not. Code between modules that runs within `sdpa_kernel(...)`,
say, puts back at the end what it found at the beginning, and other micro-batches run meanwhile. So each finds what it
left. Those that begin, and who comes after the step, find what the last of those before them has left at its end.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch.distributions import Distribution
from torch.nn.utils import parametrize

_torch: Any = torch._C
_KERNELS = ("flash", "mem_efficient", "math", "cudnn", "overrideable")
_CUDNN = ("enabled", "benchmark", "deterministic")


def _set_anomaly(both: tuple[bool, bool]) -> None:
    torch.set_anomaly_enabled(*both)


def _set_cached(both: tuple[int, dict[Any, Any]]) -> None:
    parametrize._cache_enabled, parametrize._cache = both[0], dict(both[1])  # it is filled in place


def _set_filters(filters: Any) -> None:
    warnings.filters = filters
    with warnings.catch_warnings():  # which has Python look at them anew
        pass


_SWITCHES: Sequence[tuple[Callable[[], Any], Callable[[Any], object]]] = (
    *(
        (getattr(_torch, f"_get_{one}_sdp_enabled"), getattr(_torch, f"_set_sdp_use_{one}"))
        for one in _KERNELS
        if hasattr(_torch, f"_get_{one}_sdp_enabled")
    ),
    (_torch._get_sdp_priority_order, _torch._set_sdp_priority_order),
    *((getattr(_torch, f"_get_cudnn_{one}"), getattr(_torch, f"_set_cudnn_{one}")) for one in _CUDNN),
    (torch.get_default_dtype, torch.set_default_dtype),
    (lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()), _set_anomaly),
    (lambda: (parametrize._cache_enabled, parametrize._cache), _set_cached),
    (lambda: warnings.filters, _set_filters),
    (lambda: Distribution._validate_args, Distribution.set_default_validate_args),
)
"""What tells each of them, and what sets it."""


class Switches:
    """Those of all programs of one step, as they are when this is made."""

    def __init__(self) -> None:
        self._begin, self._ended = self.now(), -1

    def now(self) -> Sequence[Any]:
        """What the program that runs finds."""
        return [told() for told, _ in _SWITCHES]

    def put_back(self, left: Sequence[Any] | None = None) -> None:
        """Let a program go on with what it left, or begin."""
        for (_, put), there, wanted in zip(_SWITCHES, self.now(), left or self._begin, strict=True):
            if there is not wanted:
                put(wanted)

    def end(self, micro_batch: int) -> None:
        """A program is over."""
        if micro_batch > self._ended:
            self._begin, self._ended = self.now(), micro_batch


class Checks:
    """Of one program, whether `torch.distributions` check what they are given: between modules alike on all ranks.

    To check is to ask for numbers, of which the rank that has them tells the others. Torch turns it off for good where
    something is compiled, or `flex_attention` called, for the first time: in a module, that is on one rank.
    """

    _alone: ClassVar[bool | None] = None
    """As what runs on this rank alone has left it, in whatever program; None if that never set it."""

    def __init__(self) -> None:
        self._between = True

    def begin(self) -> None:
        """Something runs on this rank alone."""
        self._between = Distribution._validate_args
        if Checks._alone is not None:
            Distribution._validate_args = Checks._alone

    def end(self) -> None:
        """It is over."""
        now = Distribution._validate_args
        if now is not self._between:
            Checks._alone, Distribution._validate_args = now, self._between
