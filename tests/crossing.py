"""Cases of tests that have too many of them for a run in which every one is tried."""

from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import pytest


def crossed(*choices: Iterable[Any], without: Callable[..., bool] = lambda *_: False) -> list[Any]:
    """All combinations: in the default run one for each of the longest list, in turns of the others; the rest is slow.

    Of ("a", "b", "c") and (1, 2) the first are a-1, b-2 and c-1.

    Args:
        choices: A list for each parameter.
        without: Tells of a combination whether there is none.
    """
    lists = [[*some] for some in choices]
    longest = max(range(len(lists)), key=lambda number: len(lists[number]))
    found = []
    for turn, choice in enumerate(lists[longest]):
        lists_now = [[choice] if number == longest else some for number, some in enumerate(lists)]
        combinations = [values for values in product(*lists_now) if not without(*values)]
        for number, values in enumerate(combinations):
            is_quick = number == turn % len(combinations)
            found.append(pytest.param(*values, marks=() if is_quick else pytest.mark.slow))
    return found
