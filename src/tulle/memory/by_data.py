"""`following`: what forward writes by way of a whole's `.data`, the part gets, as torch's counter does not tell of it.

So models begin whose weights hang on their first batch: the variational parameters of GPyTorch, ActNorm in flows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from tulle.memory.shard import Shard
from tulle.parts import Stated, write_through

_data: Any = vars(torch._C.TensorBase)["data"]


class _Followed(Stated):
    """A whole while a module runs; to torch's functions a plain tensor."""

    _through: Callable[[Tensor], Tensor]

    __torch_function__ = cast("Any", torch._C._disabled_torch_function_impl)

    def _read(self) -> Tensor:
        return self._through(_data.__get__(self))

    data = cast("Any", property(_read, lambda self, value: _data.__set__(self, value)))

    def detach(self) -> Tensor:
        """The same whole, as `nn.Parameter` wants it."""
        return _follow(super().detach(), self._through)


@contextmanager
def following(
    parts: Sequence[nn.Parameter], wholes: Sequence[Tensor], shards: Sequence[Shard], drop: Callable[[], None]
) -> Iterator[None]:
    """Have parts follow what is written by way of their wholes' `.data`, alike on all ranks.

    Args:
        parts: This rank's.
        wholes: Of each, what was gathered.
        shards: How each is cut.
        drop: Called where something was written.
    """
    plain = [type(whole) is Tensor for whole in wholes]  # else it is within a call that follows, or is not gathered
    try:
        for part, whole, shard, is_plain in zip(parts, wholes, shards, plain, strict=True):
            if is_plain:
                _follow(whole, partial(_through, part, shard, drop))
        yield
    finally:
        for whole, is_plain in zip(wholes, plain, strict=True):
            if is_plain:
                del cast("_Followed", whole)._through
                object.__setattr__(whole, "__class__", Tensor)


def _through(part: nn.Parameter, shard: Shard, drop: Callable[[], None], data: Tensor) -> Tensor:
    def take(whole: Tensor) -> Tensor:
        drop()
        return shard.part(whole)

    refusal = (
        f"a parameter of shape {list(shard.shape)}, which full_shard has shared out, is written in by way of .data in "
        "forward, and was written in by way of its part since that was read: write in one of them"
    )
    # By way of .data there, too: of a pipeline other micro-batches wait for their backward.
    return write_through(data, part.data, take, refusal=refusal)


def _follow(whole: Tensor, through: Callable[[Tensor], Tensor]) -> Tensor:
    object.__setattr__(whole, "__class__", _Followed)
    cast("_Followed", whole)._through = through
    return whole
