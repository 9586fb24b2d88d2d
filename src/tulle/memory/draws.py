"""`Draws`: generators from which a recomputed module draws stand where they stood when it runs again.

torch puts its own back. Those of Python and numpy, and such as the module keeps or is given, would give it other
numbers then, and the loop others from then on than those of a process that recomputes nothing.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from tulle.generators import GENERATORS, put_back, standing

_OF_ALL: tuple[Any, ...] = (vars(random)["_inst"], np.random.mtrand._rand)
"""What functions of Python's and numpy's modules draw from."""


class Draws:
    """Where generators stood before a forward.

    Args:
        held: What the forward can reach: of it those that are generators count, besides Python's and numpy's own.
    """

    def __init__(self, held: Iterable[object]) -> None:
        own = {id(one): one for one in held if isinstance(one, GENERATORS)}
        self._before = [(one, standing(one)) for one in (*_OF_ALL, *own.values())]

    def look(self) -> None:
        """Forward has run: those count from which it drew."""
        self._before = [(one, where) for one, where in self._before if standing(one) != where]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Have them stand there."""
        now = [(one, standing(one)) for one, _ in self._before]
        try:
            for one, where in self._before:
                put_back(one, where)
            yield
        finally:
            for one, where in now:
                put_back(one, where)
