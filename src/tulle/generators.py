"""Random generators of the user's own, of Python, numpy and torch: where they stand, and putting them back there."""

from __future__ import annotations

import pickle
import random
from typing import Any

import numpy as np
import torch

GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)


def standing(generator: Any) -> Any:
    """Where a generator stands, as something that can be compared.

    Example:
        >>> generator = np.random.default_rng(0)
        >>> before, drawn = standing(generator), generator.random()
        >>> put_back(generator, before)
        >>> generator.random() == drawn
        True
    """
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    is_new = isinstance(generator, np.random.Generator)
    return pickle.dumps(generator.bit_generator.state if is_new else generator.get_state())


def put_back(generator: Any, where: Any) -> None:
    """Have a generator stand where it stood."""
    if isinstance(generator, random.Random):
        generator.setstate(where)
    elif isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray(where), dtype=torch.uint8))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = pickle.loads(where)
    else:
        generator.set_state(pickle.loads(where))


def begin_anew(generator: Any, number: int) -> None:
    """Have a generator begin with a seed."""
    if isinstance(generator, random.Random | np.random.RandomState):
        generator.seed(number)
    elif isinstance(generator, torch.Generator):
        generator.manual_seed(number)
    else:
        generator.bit_generator.state = type(generator.bit_generator)(number).state
