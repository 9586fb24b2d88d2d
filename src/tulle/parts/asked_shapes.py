"""`warn_of_shape`: the log says once where a program asks for the shape of a part, as if that were the whole's."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from types import FrameType

import torch

logger = logging.getLogger("tulle")

_OURS = tuple(
    os.path.join(os.path.dirname(one), "") for one in (os.path.dirname(os.path.abspath(__file__)), torch.__file__)
)
"""Where code lies that knows of parts, or treats every number by itself."""
_ON_THE_WAY = frozenset({"__torch_function__", "answer_of_whole", "warn_of_shape"})
"""Functions between who asks and here."""
_warned: list[str] = []


def warn_of_shape(name: str, refusal: Callable[[str], str]) -> None:
    """Say in the log, once in a process, that code which is neither torch's nor ours was given the shape of a part.

    Args:
        name: Of the function or attribute that was asked for.
        refusal: What an error would say of it.
    """
    if _warned or torch.compiler.is_compiling():
        return
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name in _ON_THE_WAY:
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename.startswith(_OURS):
        return
    where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    _warned.append(where)
    logger.warning(
        "%s. What is computed by the shape of a part, a loss or a count, is not what one process has: ask for shapes "
        "before tulle.distribute, or in forward. This is said once",
        refusal(f"{name} at {where}"),
    )
