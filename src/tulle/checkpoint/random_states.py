"""The state of a rank's random number generators, as values that a reader that runs no code knows."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

logger = logging.getLogger("tulle")


def random_state() -> dict[str, Any]:
    """Python's, NumPy's, torch's and, where there is one, this rank's GPU's."""
    version, words, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state(legacy=True)
    gpu = torch.cuda.get_rng_state() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    return {
        "python": [version, list(words), gauss],
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "torch": torch.get_rng_state(),
        "cuda": gpu,
    }


def restore_random(states: Sequence[Mapping[str, Any]], rank: int, size: int) -> None:
    """Go on from a rank's state, if as many ranks saved theirs; else all stay as they are, and the log says so."""
    if len(states) != size:
        if rank == 0:
            logger.warning(
                "the checkpoint was saved by %d %s and is loaded by %d: random states are not restored",
                len(states),
                "rank" if len(states) == 1 else "ranks",
                size,
            )
        return
    state = states[rank]
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
