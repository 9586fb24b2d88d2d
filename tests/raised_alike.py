"""What tests of bad input share: an error that every rank raises, with what was given, what was expected, and the mend.

Each body ends with a barrier: it hangs, and fails the test, if any rank has been left inside a collective.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

from tulle.errors import TulleError


@contextmanager
def every_rank_raises(kind: type[TulleError], text: str, *, found_by: int | None = None) -> Iterator[None]:
    """The body must raise `kind` with `text` in it on every rank.

    Args:
        kind: The error's class.
        text: A part of it, literally.
        found_by: The one rank that found the cause, whose number the others must be told.
    """
    with pytest.raises(kind) as raised:
        yield
    assert type(raised.value) is kind
    message = str(raised.value)
    assert text in message
    told = message.removeprefix(f"rank {found_by}: ")
    assert (told != message) == (found_by is not None and found_by != dist.get_rank())
    everybodys = [told] * dist.get_world_size()
    dist.all_gather_object(everybodys, told)
    assert everybodys == [told] * dist.get_world_size()


def last() -> int:
    return dist.get_world_size() - 1


def sgd(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=0.1)
