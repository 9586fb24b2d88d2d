"""tulle trains PyTorch models on many processes: for every tensor, where it lives and how it is kept in step."""

import importlib
from types import ModuleType

from tulle import errors, sync
from tulle.checkpoint import full_state_dict, load, save, save_safetensors
from tulle.clip import clip_grad_norm_
from tulle.deferred import deferred_init
from tulle.distribute import distribute
from tulle.distribute import make_plan as plan
from tulle.errors import TulleError
from tulle.estimate import estimate
from tulle.lookahead import lookahead
from tulle.mesh import Mesh, init
from tulle.pipeline import stage, step
from tulle.plan import Memory, Plan
from tulle.profiling import profile
from tulle.record import log
from tulle.rows import RowSparse
from tulle.softmax import SampledSoftmax, ShardedSoftmax

__all__ = [
    "Memory",
    "Mesh",
    "Plan",
    "RowSparse",
    "SampledSoftmax",
    "ShardedSoftmax",
    "TulleError",
    "__version__",
    "clip_grad_norm_",
    "deferred_init",
    "distribute",
    "errors",
    "estimate",
    "full_state_dict",
    "init",
    "load",
    "log",
    "lookahead",
    "plan",
    "profile",
    "save",
    "save_safetensors",
    "stage",
    "step",
    "sync",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> ModuleType:
    """`tulle.named`, imported when it is asked for: it takes a second."""
    if name != "named":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("tulle.named")
