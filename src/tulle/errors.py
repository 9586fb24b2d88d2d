"""Every error that tulle raises on purpose, as one tree.

TulleError
├── MeshError            a mesh, axis, backend or launch environment that does not fit   (also ValueError)
├── PlanError            an unknown scheme, or a plan that does not fit model and mesh     (also ValueError)
├── ModelError           a model, optimizer or table that cannot be distributed            (also ValueError)
├── GradientError        a gradient that cannot be synchronized, or is not finite          (also ValueError)
├── DataError            a file or logged number of no use, or ranks with unequal batches (also ValueError)
├── CheckpointError      a checkpoint that is absent, damaged or of another model          (also RuntimeError)
└── CommunicationError   a collective that failed or timed out, naming who fell first      (also RuntimeError)

A message says what was given, what was expected and the mend.
"""

from __future__ import annotations

import os
import traceback

import torch


class TulleError(Exception):
    """The root of all errors that tulle raises on purpose."""


class MeshError(TulleError, ValueError):
    """A mesh, axis, backend or launch environment does not fit the processes that run."""


class PlanError(TulleError, ValueError):
    """A scheme is unknown, or a plan does not fit the model and the mesh."""


class ModelError(TulleError, ValueError):
    """A model, an optimizer or a table cannot be distributed as given."""


class GradientError(TulleError, ValueError):
    """A gradient cannot be synchronized as given, or is not finite."""


class DataError(TulleError, ValueError):
    """A file is missing, empty, misaligned or oddly encoded, what was logged is no number, or batches are unequal."""


class CheckpointError(TulleError, RuntimeError):
    """A checkpoint is absent, damaged, or belongs to another model."""


class CommunicationError(TulleError, RuntimeError):
    """A collective failed or timed out; the message names the rank that fell first if it is known."""


def raised_in(error: BaseException) -> str:
    """Where in the user's code an error came from, as ` (train.py:12, in forward)`, or nothing.

    That is its innermost frame outside of tulle, PyTorch and Python's own library.
    """
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        is_pythons = frame.filename.startswith(_PYTHON) and "-packages" not in frame.filename
        if not (is_pythons or frame.filename.startswith(_NOT_THE_USERS)):
            return f" ({frame.filename}:{frame.lineno}, in {frame.name})"
    return ""


_PYTHON = os.path.join(os.path.dirname(os.__file__), "")
_NOT_THE_USERS = ("<frozen", *(os.path.join(os.path.dirname(one), "") for one in (__file__, torch.__file__)))
