"""`trial`: a forward that is run for what can be seen of it, with gradients only where it does not run without."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import torch

T = TypeVar("T")


def trial(run: Callable[[], T]) -> T:
    """Run a forward without gradients, so that nothing is kept for backward; if that fails, once more with them.

    They are needed where a forward asks for some itself, as physics-informed networks and models of energy do
    (`torch.autograd.grad`), or has hooks put on those of what it computes.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> trial(lambda: torch.autograd.grad((x * x).sum(), x))[0].tolist()
        [2.0, 2.0]
    """
    with suppress(Exception), torch.no_grad():  # what fails in earnest fails again
        return run()
    return run()
