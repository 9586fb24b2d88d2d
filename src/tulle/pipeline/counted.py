"""`counted`: operations that write in what they are given past torch's count of writes, made to count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import increment_version


def counted(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same operation, but all that it writes is counted: batch norm keeps quiet of its running statistics.

    Example:
        >>> mean, variance = torch.zeros(3), torch.ones(3)
        >>> normed = counted(F.batch_norm)(torch.ones(2, 3), mean, variance, training=True)
        >>> mean._version, counted(torch.relu) is torch.relu
        (1, True)
    """
    return _COUNTED.get(function, function)


def apart(function: Callable[..., Any], arguments: list[Any]) -> list[Any]:
    """An operation's arguments, with counts of their own where it counts more than torch does.

    Backward of others, who have saved the statistics, would refuse what was written in since.
    """
    if function not in _COUNTED.values():
        return arguments
    return [one.data if isinstance(one, Tensor) and not one.requires_grad else one for one in arguments]


def _counting(function: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        statistics = {name: given[name] for name in _STATISTICS if given.get(name) is not None}
        # Not these themselves: autograd saves them, and would refuse that they were written in.
        result = function(**{**given, **{name: one.data for name, one in statistics.items()}})
        if given.get("training"):
            increment_version(tuple(statistics.values()))
        return result

    return run


_STATISTICS = "running_mean", "running_var"
_RATES = "momentum", "eps"
_COUNTED = {
    F.batch_norm: _counting(F.batch_norm, ("input", *_STATISTICS, "weight", "bias", "training", *_RATES)),
    torch.batch_norm: _counting(
        torch.batch_norm, ("input", "weight", "bias", *_STATISTICS, "training", *_RATES, "cudnn_enabled")
    ),
}
