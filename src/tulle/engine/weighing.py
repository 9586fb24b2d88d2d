"""`check_weighed`: what is computed of all ranks' parts is weighed alike by all ranks' losses, or backward raises."""

from __future__ import annotations

import torch

from tulle.comm import Weights, all_gather
from tulle.errors import ModelError
from tulle.mesh import Axis

_LABEL = "weights of penalties"
_TOLERANCE = 1e-4
"""Relative: what computes them on every rank may round differently."""


def check_weighed(home: Axis, axis: Axis, step: int) -> None:
    """Compare what ranks weighed such numbers by in the backward that ends, if there were any. Every rank must call it.

    Args:
        home: Whose ranks have parts.
        axis: The same, on which to exchange.
        step: Number of the backward.

    Raises:
        ModelError: On every rank, if they did so differently.
    """
    weights = Weights.on(home)
    if not weights.is_asked:
        return
    given = [float(one.sum()) for one in weights.take()]
    mine = torch.tensor([sum(given), sum(map(abs, given))], dtype=torch.float64, device=axis.device)
    heard = all_gather(mine, axis, label=_LABEL).wait().view(axis.size, 2).cpu()
    if not heard.isfinite().all():
        return  # losses are not, which is not for this to tell
    sums, largest = heard[:, 0], float(heard[:, 1].max())
    if float(sums.max() - sums.min()) <= _TOLERANCE * largest:
        return
    by_rank = ", ".join(f"{number:.6g} on rank {rank}" for rank, number in enumerate(sums.tolist()))
    raise ModelError(
        "a number of split weights in the loss, a penalty say, was weighed differently on the ranks of axis "
        f"{axis.name!r} in backward {step}: by {by_rank}. Each rank's part is moved by its own rank's weight, so all "
        "must be alike: add penalties behind the weight of a rank's share, "
        "loss * len(share) * ranks / len(batch) + penalty"
    )
