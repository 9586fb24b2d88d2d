"""`left_whole`: how much of a model no layer that was split has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from torch import Tensor, nn

from tulle.tensor_parallel.placement import Placement


def left_whole(
    models: Sequence[nn.Module],
    cuts: Mapping[int, tuple[Tensor, Placement]],
    smallest_bytes: int,
    leave: Collection[str],
) -> dict[str, float]:
    """The shares of all parameters that lie in whole ones of some size, by the class of the module that has them.

    Args:
        models: After a walk.
        cuts: What was cut, by identity.
        smallest_bytes: From which size on.
        leave: Names of modules that are not to count, as they are to stay whole.
    """
    counts: Counter[str] = Counter()
    total = sum(placement.shape.numel() for _, placement in cuts.values())
    seen = {*cuts}
    for path, module in (one for model in models for one in model.named_modules()):
        for parameter in [one for one in module._parameters.values() if one is not None]:
            if id(parameter) not in seen:
                total += parameter.numel()
                is_meant = parameter.nbytes >= smallest_bytes and path not in leave
                counts[type(module).__name__] += parameter.numel() if is_meant else 0
            seen.add(id(parameter))
    return {kind: count / total for kind, count in counts.items() if count}
