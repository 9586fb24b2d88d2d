"""The state of a rank's random number generators, as values that a reader that runs no code knows."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tulle.checkpoint.standing import Standing

logger = logging.getLogger("tulle")


def random_state(standing: Standing) -> dict[str, Any]:
    """Python's, NumPy's, torch's and, where there is one, this rank's GPU's and its pipeline's."""
    version, words, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state(legacy=True)
    gpu = torch.cuda.get_rng_state() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    return {
        "python": [version, list(words), gauss],
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "torch": torch.get_rng_state(),
        "cuda": gpu,
        "place": standing.place,
        "pipeline": list(standing.pipeline.drawn) if standing.pipeline else None,
    }


def restore_random(states: Sequence[Mapping[str, Any]], standing: Standing) -> None:
    """Go on from what a rank at this place of such a mesh saved; else all stay as they are, and the log says so.

    Ranks along axes `pipe` and `model` draw alike, replicas do not: by number alone some would get others' states.
    """
    rank, size = standing.ranks.rank, standing.ranks.size
    if len(states) != size:
        if rank == 0:
            logger.warning(
                "the checkpoint was saved by %d %s and is loaded by %d: random states are not restored",
                len(states),
                "rank" if len(states) == 1 else "ranks",
                size,
            )
        return
    placed = [state for state in states if state.get("place", standing.place) == standing.place]
    if not placed:
        if rank == 0:
            logger.warning(
                "the checkpoint was saved on a mesh of %s and is loaded on one of %s: random states are not restored",
                _mesh(states[0]["place"]),
                _mesh(standing.place),
            )
        return
    state = placed[0] if "place" in placed[0] else states[rank]
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if standing.pipeline is not None and state.get("pipeline"):
        standing.pipeline.draw_on(*state["pipeline"])


def _mesh(place: Mapping[str, Sequence[int]]) -> str:
    return ", ".join(f"{name}={size}" for name, (_, size) in place.items()) or "one rank"
