"""`Gathered`: a whole that `state_dict()` made of all ranks' parts; what is written into it this rank's part gets, too.

Of a plain model a state's tensors are the parameters' own memory, and loops rely on it: a moving average goes over
`zip(average.state_dict().values(), model.state_dict().values())` and writes into the first. Of a model whose parameters
are shared out, or split over axis `model`, these tensors are copies, and what is written into them would be lost.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from tulle.errors import ModelError
from tulle.parts.guards import meets_parts
from tulle.parts.stated import Stated, refusal_to_checkpoint
from tulle.parts.torch_functions import tensors_in
from tulle.parts.wholes import OWNER, local_of, writes_by_data


@meets_parts
class Gathered(Stated):
    """A whole, or a view of one; to torch's functions it is a plain tensor."""

    _write_back: Callable[[], None]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Do as with plain tensors, and give parts what was written."""
        if not _PLAIN.issuperset(types):
            return NotImplemented  # parts, and what is still under way, know what they may be given
        keywords = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            given = [one for one in tensors_in([*args, *keywords.values()]) if isinstance(one, Gathered)]
            before = [one._version for one in given]
            result = func(*args, **keywords)
            written = [one for one, version in zip(given, before, strict=True) if one._version != version]
            for view in tensors_in(result if isinstance(result, tuple | list) else [result]):
                for one in given:
                    if type(view) is Tensor and _share_memory(one, view):
                        _become_gathered(view, one._write_back)
        for one in written:  # outside: parts are to see that they are written in
            one._write_back()
        return result

    def __repr__(self, *, tensor_contents: str | None = None) -> str:
        """That of a plain tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return repr(self.as_subclass(Tensor))


_PLAIN = {Gathered, Tensor, nn.Parameter}


def write_through(
    whole: Tensor, part: Tensor, take: Callable[[Tensor], Tensor], *, refusal: str | None = None
) -> Tensor:
    """Have what is written into a whole, in place, be written into the part that this rank has of it, too.

    Every rank must write the same, as with all that lies on several. Sends nothing.

    Args:
        whole: A plain tensor, which nobody else has; it is given back.
        part: What this rank has of it.
        take: This rank's part of a whole.
        refusal: What to raise where the part was written in meanwhile, whose numbers of before would come back.

    Example:
        >>> part = torch.zeros(2)
        >>> whole = write_through(torch.zeros(4), part, lambda whole: whole[:2])
        >>> whole.add_(1).mul(2)
        tensor([2., 2., 2., 2.])
        >>> part
        tensor([1., 1.])
    """
    if whole.is_inference() or whole is part:
        return whole  # which counts no writes, or is no copy
    plain, known = whole.data, _writes_in(part)  # a view would keep whole, which keeps it, for good

    @torch.no_grad()
    def write_back() -> None:
        nonlocal known
        if refusal is not None and _writes_in(part) != known:
            raise ModelError(refusal)
        part.copy_(take(plain))
        known = _writes_in(part)

    return _become_gathered(whole, write_back)


def refusal_of_what_is_old(name: str) -> str:
    """What an error says of what was read of a parameter, before that was written in, and is written in now."""
    return (
        f"what was read of {name!r} some time ago is written in, but all of it was gathered for that: numbers that "
        "were written into the parameter since would be lost. Read it anew, and write then"
    )


def one_whole(parameter: Tensor, state: dict[str, Any], key: str, gather: Callable[[], Tensor]) -> None:
    """Put a whole into a state; what a parameter has several names for is one tensor under all of them, as in torch.

    A moving average that goes over names writes into it once for each.

    Args:
        parameter: Of which this rank has a part.
        state: That `state_dict()` fills.
        key: The name that the parameter is met under.
        gather: Gives the whole, if the state has none.
    """
    before: tuple[str, ref[Tensor]] | None = _given.get(parameter)
    found = None if before is None else before[1]()
    state[key] = found if before is not None and found is not None and state.get(before[0]) is found else gather()
    _given[parameter] = key, ref(state[key])


_given = WeakTensorKeyDictionary()
"""The name and the whole that a state was last given, by parameter."""


def refuse_to_checkpoint(what: str) -> None:
    """Raise if `torch.distributed.checkpoint` asks for a state with parts in it: it takes plain tensors for wholes.

    It would keep one rank's, and give them to all.

    Args:
        what: It asks for, and which parts that has.

    Raises:
        CheckpointError: With the mend.
    """
    frame = sys._getframe()
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith("torch.distributed.checkpoint."):
            raise refusal_to_checkpoint(f"asked for {what}, and would keep those")
        frame = frame.f_back


def _become_gathered(tensor: Tensor, write_back: Callable[[], None]) -> Tensor:
    object.__setattr__(tensor, "__class__", Gathered)
    cast("Gathered", tensor)._write_back = write_back
    return tensor


def _writes_in(part: Tensor) -> tuple[int, int]:
    """What is another after somebody has written in a part, or in what `.data` is of."""
    with torch._C.DisableTorchFunctionSubclass():
        owner = getattr(part, OWNER, None)
        parameter = part if owner is None else owner
        return parameter._version, writes_by_data(parameter)


def _share_memory(one: Tensor, other: Tensor) -> bool:
    return other.layout == torch.strided and one.untyped_storage()._cdata == other.untyped_storage()._cdata


def load_part(
    part: Tensor,
    key: str,
    state: dict[str, Any],
    errors: list[str],
    *,
    shape: Sequence[int],
    take: Callable[[Tensor], Tensor],
) -> None:
    """Have a state that is to be loaded hold this rank's part, where it has the whole, as that of a plain model does.

    Args:
        part: What the parameter holds.
        key: Of the parameter in the state.
        state: As `load_state_dict` gives it to its hooks.
        errors: What it will raise; a tensor that is neither is added, by the shape of the whole.
        shape: Of the whole.
        take: This rank's part of a whole.
    """
    value = state.get(key)
    if not isinstance(value, Tensor):
        return
    if tuple(value.shape) == tuple(shape):
        state[key] = take(value)
    elif value.shape != part.shape:
        errors.append(
            f"size mismatch for {key}: the state has a tensor of shape {list(value.shape)}, expected {list(shape)}, "
            "the whole, or this rank's part of it"
        )
        state[key] = local_of(part)  # or torch would say the same by the part's shape
