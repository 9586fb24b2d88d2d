"""`called_first`: calls a step's closure before the step, which then sees this rank's parts as plain parameters.

An element-wise optimizer of torch calls it once, before all else, so that nothing comes out otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tulle.errors import ModelError
from tulle.step_hooks import Arguments


def called_first(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Arguments | None:
    """Call the closure among the arguments of a step, with gradients on, and put in its place what it returned.

    Args:
        arguments: Of `step`, the optimizer first.
        keywords: Of `step`.

    Returns:
        The arguments for the step; None if there is no closure among them.
    """
    given = [*arguments[1:], *keywords.values()]
    if not any(callable(one) for one in given):
        return None
    optimizer, *others = arguments
    return (
        (optimizer, *(_called(one) if callable(one) else one for one in others)),
        {name: _called(one) if callable(one) else one for name, one in keywords.items()},
    )


def _called(closure: Callable[[], Any]) -> Callable[[], Any]:
    with torch.enable_grad():
        results = [closure()]

    def result() -> Any:
        if not results:
            raise ModelError(
                "an optimizer of which each rank steps a part called its closure a second time, within its step, where "
                "the gradients of whole parameters cannot be computed: call loss.backward() before optimizer.step()"
            )
        return results.pop()

    return result
