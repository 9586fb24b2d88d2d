"""`profile_later`: under `tulle profile`, profiles what a script trains, once it has trained a few steps."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from tulle.engine import is_looking_ahead
from tulle.environment import RUN_DIR
from tulle.mesh import Mesh
from tulle.pipeline.structure import flatten, rebuild
from tulle.profiling.measure import profile
from tulle.profiling.steps import Twin

PROFILE = "TULLE_PROFILE"
"""Set by `tulle profile`: the name of the file that rank 0 writes the profile to, in the run folder."""
SAMPLES = 3
"""So many batches of the script are recorded, and then the profile is made."""


def profile_later(model: nn.Module, optimizers: Sequence[Optimizer], mesh: Mesh) -> None:
    """Record the batches with which a model is trained, and profile a copy of it. Every rank must call it.

    Does nothing unless `tulle profile` asked for it. The profile says, too, if the script's loop goes through
    `tulle.lookahead`.

    Args:
        model: Before anything is done to it; what it is called with is what the script trains it on.
        optimizers: Over its parameters; the steps of the last one are counted.
        mesh: Where it will run.
    """
    name = os.environ.get(PROFILE)
    if name:
        path = Path(os.environ.get(RUN_DIR, "."), name)
        recording = _Recording(Twin.of(model, optimizers, [], _unused), mesh, path)
        model.register_forward_pre_hook(recording.see, with_kwargs=True)
        optimizers[-1].register_step_post_hook(recording.count)


@dataclass(slots=True)
class _Recording:
    """Batches, until there are enough."""

    twin: Twin | None
    mesh: Mesh
    path: Path
    samples: list[object] = field(default_factory=list)
    is_over: bool = False

    def see(self, model: nn.Module, arguments: tuple[object, ...], keywords: Mapping[str, object]) -> None:
        if not self.is_over and model.training and len(self.samples) < SAMPLES:
            self.samples.append(_kept(_as_sample(model, arguments, keywords)))

    def count(self, *_: object) -> None:
        if self.is_over or len(self.samples) < SAMPLES:
            return
        assert self.twin is not None, "it is needed once"
        self.is_over = True
        first, *further = self.samples
        found = profile(self.twin.model, self.twin.optimizers, first, self.mesh, further=further)
        if self.mesh.rank == 0:
            replace(found, lookahead=is_looking_ahead()).save(self.path)
        self.samples.clear()
        self.twin = None


def _as_sample(model: nn.Module, arguments: tuple[object, ...], keywords: Mapping[str, object]) -> object:
    """A call as `profile` takes it: all by position or, if anything was given by name, all by name."""
    if not keywords:
        return arguments
    return {**dict(zip(signature(model.forward).parameters, arguments, strict=False)), **keywords}


def _kept(sample: object) -> object:
    leaves, spec = flatten(sample)
    return rebuild(spec, [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves])


def _unused(output: object) -> Any:
    raise AssertionError(f"the copy is not trained here, and gave {type(output).__name__}")
