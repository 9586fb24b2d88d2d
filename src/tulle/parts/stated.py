"""`StatedPart`: the part that `state_dict()` gives of what is split; who would take it for the whole hears of it.

`torch.distributed.checkpoint` keeps one rank's tensor for all where it finds plain ones, and `torch.save` on rank 0,
as loops for DDP have it, writes a file that lacks the rows of all others: both would come out when it is read.
"""

from __future__ import annotations

import logging
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from tulle.errors import CheckpointError

logger = logging.getLogger("tulle")


class Stated(Tensor):
    """What `state_dict()` gives; to pickle, to `copy.deepcopy` and to `nn.Parameter` it is a plain tensor."""

    # What `nn.Parameter(one)` sets, as `load_state_dict(assign=True)` has it: it is to be a parameter like any other.
    _is_param = cast(
        "Any", property(lambda _: False, lambda self, _: object.__setattr__(self, "__class__", nn.Parameter))
    )

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """A plain tensor of the same numbers."""
        return memo.setdefault(id(self), self.clone())

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A pickle of a plain tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor).__reduce_ex__(protocol)


class StatedPart(Stated):
    """To torch's functions a plain tensor; `torch.distributed.checkpoint` is refused it."""

    _said: str

    __torch_function__ = cast("Any", torch._C._disabled_torch_function_impl)

    def detach(self) -> Tensor:
        """The same part, as `nn.Parameter` wants it."""
        return stated_part(super().detach(), self._said)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A pickle of a plain tensor, of which the log says once that it is a part."""
        warn_of_pickle(f"{self._said} is pickled")
        return super().__reduce_ex__(protocol)

    def _refuse(self, *_: object) -> NoReturn:
        raise refusal_to_checkpoint(f"was given {self._said}, and would keep that")

    __create_write_items__ = __create_chunk_list__ = __get_tensor_shard__ = _refuse


_warned: list[str] = []


def warn_of_pickle(said: str) -> None:
    """Say in the log, once in a process, that a part is pickled.

    Args:
        said: Which, as a clause.
    """
    if not _warned:
        _warned.append(said)
        logger.warning(
            "%s, and maybe more like it: a file of one rank lacks what the others have; "
            "tulle.save(path, model, optimizer) writes all, and tulle.full_state_dict(model), on every rank, "
            "gives rank 0 what torch.save may write",
            said,
        )


def refusal_to_checkpoint(what: str) -> CheckpointError:
    """What to raise where `torch.distributed.checkpoint` would take a part for the whole."""
    return CheckpointError(
        f"torch.distributed.checkpoint {what} of one rank for all: take tulle.save and tulle.load, which write an "
        "ordinary checkpoint of it, or tulle.full_state_dict(model)"
    )


def stated_part(part: Tensor, said: str) -> Tensor:
    """What `state_dict()` gives of a part: the tensor that it is given, or a view of a parameter.

    Args:
        part: A tensor that nobody else has; memory is shared with what it is a view of.
        said: Whose part of what it is, as in "rank 0 of 2's part of 'table.weight'".
    """
    object.__setattr__(part, "__class__", StatedPart)
    cast("StatedPart", part)._said = said
    return part
