"""`Whole`: what a part of a parameter, or what became of one, is a part of; `Reader`: who knows all of it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from tulle.errors import ModelError, TulleError
from tulle.parts.asked import SHAPES, asks_of_whole
from tulle.parts.extents import LAID_OUT, Extent
from tulle.parts.indexed import rows_by_number
from tulle.parts.reductions import Reduction
from tulle.parts.torch_functions import LEAVES_TORCH, LOOKUPS, REDUCED, name_of

OF_ROWS = LOOKUPS | SHAPES | {Tensor.__getitem__, Tensor.index_select, torch.index_select}
"""What asks for rows by their numbers, or may do so, or for how many there are."""
PART_OF = "_tulle_part_of"
"""The attribute by which a part knows what it is a part of."""
OWNER, _WRITES = "_tulle_data_of", "_tulle_writes"
"""The attributes by which `parameter.data` knows its parameter, and that how often it was written in by way of it."""
_READER = "_tulle_reader"
"""The attribute by which a part knows who has the rest."""


KINDS: set[type] = set()
"""Classes of parts, and of what becomes of them; `Guarded` and its kin tell of themselves."""


def writes_by_data(parameter: Tensor) -> int:
    """How often a guarded parameter was written in by way of `.data`, or given other data: no version tells of it."""
    return getattr(parameter, _WRITES, 0)


def note_write(parameter: Tensor) -> None:
    """A guarded parameter has been written in so."""
    setattr(parameter, _WRITES, writes_by_data(parameter) + 1)


def local_of(tensor: Tensor) -> Tensor:
    """What of a tensor lies on this rank, without a graph: of a part what `.to_local()` gives, else `.detach()`."""
    if type(tensor) in KINDS:
        with torch._C.DisableTorchFunctionSubclass():
            return Tensor.detach(tensor)
    found = tensor.detach()  # which is waited for, if it is on the way
    if not hasattr(found, PART_OF):
        return found
    with torch._C.DisableTorchFunctionSubclass():
        return found.detach()


def locals_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """What `local_of` gives of each of many, which are parts for the most part."""
    with torch._C.DisableTorchFunctionSubclass():
        own = [Tensor.detach(tensor) if type(tensor) in KINDS else None for tensor in tensors]
    return [local_of(tensor) if found is None else found for found, tensor in zip(own, tensors, strict=True)]


class PartError(ModelError):
    """A function was given a part as if it were the whole."""


class Whole(Protocol):
    """What a parameter holds a part of."""

    @property
    def dims(self) -> Sequence[int]:
        """The dimensions that are cut."""
        ...

    @property
    def shape(self) -> Sequence[int] | None:
        """Of all of it; None if that goes by the part, see `shape_of_whole`."""
        ...

    @property
    def axes(self) -> Sequence[Hashable]:
        """Over whose ranks it is shared out."""
        ...

    @property
    def count(self) -> int | None:
        """Numbers in the whole; None to count them."""
        ...

    @property
    def is_gathered(self) -> bool:
        """Whether all ranks can put it together, as `gather` does."""
        ...

    def gather(self, part: Tensor) -> Tensor | None:
        """All of what ranks have such parts of. Every rank that has a part must call it, alike.

        Args:
            part: This rank's numbers, of the parameter or of its gradient.

        Returns:
            None, and nothing is sent, if it is cut otherwise, nobody gathers it, or it wants a gradient that none has.
        """
        ...

    def gather_along(self, part: Tensor, dim: int) -> Tensor | None:
        """The same of what became of it in another shape, with a place for each of the part's along `dim` alone."""
        ...

    def held(self) -> Tensor | None:
        """Where in this part, along the dimension that is cut, numbers of the whole lie; None for everywhere."""
        ...

    @property
    def layout(self) -> Hashable:
        """What is equal for parts whose numbers lie alike."""
        ...

    def over(self, number: Tensor, op: Reduction) -> Tensor:
        """What all ranks' numbers make; a sum gives each its gradient. Every rank that has a part must call it."""
        ...

    def refusal(self, taker: str) -> str:
        """What an error says of a function that took the part for all of it, from the function's name on."""
        ...

    def refusal_of_gradient(self) -> str | None:
        """What an error says of `torch.autograd.grad` for it; None if that gives the part's."""
        ...


class Reader(Protocol):
    """Knows all of a table of which a rank has a part."""

    @property
    def shape(self) -> tuple[int, int]:
        """`(rows, width)` of all of it."""
        ...

    @property
    def is_forward(self) -> bool:
        """Whether the model's own code is running, which knows of no parts."""
        ...

    def look_up(self, function: Callable[..., Tensor], ids: Tensor, part: Tensor, **options: Any) -> Tensor:
        """What a function of `LOOKUPS` gives of the whole."""
        ...


def read_by(part: nn.Parameter, reader: Reader) -> None:
    """Have lookups in a guarded parameter by `torch.nn.functional` be those of the whole, in forward its shape, too."""
    setattr(part, _READER, reader)


def answer_of_whole(func: Callable[..., Any], args: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
    """What a function of `OF_ROWS` would give if all of it were here; NotImplemented if nobody knows that."""
    reader: Reader | None = getattr(args[1] if func in LOOKUPS else args[0], _READER, None)
    if func in SHAPES:
        is_of_whole = (reader is not None and reader.is_forward) or asks_of_whole()
        shape = shape_of_whole(args[0]) if is_of_whole else None
        return NotImplemented if shape is None else func(torch.empty(shape, device="meta"), *args[1:], **keywords)
    if reader is None:
        return NotImplemented
    if func in LOOKUPS:
        return reader.look_up(func, *args, **keywords)
    rows = rows_by_number(func, args, keywords, reader.shape[0])
    if rows is None or (rows.is_view and not (torch.is_grad_enabled() and args[0].requires_grad)):
        return NotImplemented  # what is a view may be written in
    return rows.of(reader.look_up(functional.embedding, rows.ids, args[0], sparse=False))


@dataclass(frozen=True, slots=True, eq=False)
class Became:
    """What a tensor is a part of that an operation has made of a part, in another shape say."""

    of: Whole
    extent: Extent

    @property
    def shape(self) -> None:
        """That goes by the part."""

    @property
    def dims(self) -> Sequence[int]:
        """The dimensions that are cut."""
        return self.extent.cuts

    @property
    def axes(self) -> Sequence[Hashable]:
        """Over whose ranks the part it was made of is shared out."""
        return self.of.axes

    @property
    def count(self) -> int | None:
        """Numbers in the whole; None to count them."""
        return self.extent.count

    @property
    def is_gathered(self) -> bool:
        """Not of any shape."""
        return False

    def gather(self, part: Tensor) -> Tensor | None:
        """None: whose place is whose is not known."""

    def gather_along(self, part: Tensor, dim: int) -> Tensor | None:
        """None."""

    def held(self) -> Tensor | None:
        """Where in it, along the dimension that is cut, numbers of the whole lie; None for everywhere."""
        return self.extent.places

    @property
    def layout(self) -> Hashable:
        """That of the part it was made of."""
        return self.of.layout

    def over(self, number: Tensor, op: Reduction) -> Tensor:
        """That of the part."""
        return self.of.over(number, op)

    def refusal(self, taker: str) -> str:
        """That of the part."""
        return self.of.refusal(taker)

    def refusal_of_gradient(self) -> str | None:
        """That of the part."""
        return self.of.refusal_of_gradient()


@dataclass(frozen=True, slots=True, eq=False)
class Along(Became):
    """The same of what has a place for each of the part's, along the dimension that is cut: its rows' norms, say."""

    @property
    def is_gathered(self) -> bool:
        """As the part is."""
        return True

    def gather(self, part: Tensor) -> Tensor | None:
        """All of it, if all of the part can be gathered. Every rank must call it."""
        return self.gather_along(part, self.extent.cuts[0])

    def gather_along(self, part: Tensor, dim: int) -> Tensor | None:
        """The same of what became of it, which is cut along a dimension."""
        return self.of.gather_along(part, dim)


@dataclass(frozen=True, slots=True, eq=False)
class Flat(Became):
    """The same of what lies flat, as long as the part is; what cuts it has it gathered.

    Args:
        made_of: The shape of the part that it was made of.
    """

    made_of: torch.Size

    @property
    def is_gathered(self) -> bool:
        """As the part is."""
        return True

    def gather(self, part: Tensor) -> Tensor | None:
        """All of it, flat, if that it was made of can be gathered. Every rank must call it."""
        found = part.view(self.made_of)
        object.__setattr__(found, "__class__", type(part))
        setattr(found, PART_OF, self.of)
        setattr(found, OWNER, getattr(part, OWNER, None))
        whole = self.of.gather(found)
        with torch._C._EnableTorchFunction():  # a view of what writes through does so, too
            return None if whole is None else whole.flatten()


def became(whole: Whole, extent: Extent, part: Tensor, name: str) -> Became:
    """What a tensor is a part of that a function, by its name, has made of a part."""
    if not whole.is_gathered or isinstance(whole, Flat) or len(extent.cuts) != 1:
        return Became(whole, extent)
    if extent.follows:
        return Along(whole, extent)
    return Flat(whole, extent, part.shape) if name in LAID_OUT else Became(whole, extent)


def shape_of_whole(part: Tensor) -> tuple[int, ...] | None:
    """The shape of all of what a part is a part of, or of what became of it; None if that is not known."""
    whole: Whole = getattr(part, PART_OF)
    if whole.shape is not None:
        return tuple(whole.shape)
    root = whole
    while isinstance(root, Became):
        root = root.of
    with torch._C.DisableTorchFunctionSubclass():
        shape = [*part.shape]
    if len(shape) == 1 and whole.count is not None:
        return (whole.count,)
    if root.shape is None or len(whole.dims) != 1 or len(root.dims) != 1 or not extent_of_whole(whole).follows:
        return None
    shape[whole.dims[0]] = root.shape[root.dims[0]]
    return tuple(shape)


def extent_of_whole(whole: Whole) -> Extent:
    """Which numbers of a whole lie in this rank's part."""
    return whole.extent if isinstance(whole, Became) else Extent(tuple(whole.dims), whole.count, whole.held())


def lies(whole: Whole) -> Hashable:
    """What is equal for what is cut alike, and became of parts whose numbers lie alike."""
    return whole.layout, tuple(whole.dims)


def is_of_each_row(tensor: Tensor, part: Tensor) -> bool:
    """Whether a tensor is what became of a part's rows, a number of each: their norms, with `keepdim=True`."""
    whole, became = getattr(part, PART_OF), getattr(tensor, PART_OF, None)
    shape = [length if dim in whole.dims else 1 for dim, length in enumerate(part.shape)]
    return became is not None and lies(became) == lies(whole) and [*tensor.shape] == shape


def has_rows_for(tensor: Tensor, part: Tensor) -> bool:
    """Whether a tensor is a gradient that meets its parameter's rows, of each of which a part has a number.

    A unit-wise clipping multiplies it by norms of rows, say.
    """
    cuts = getattr(tensor, "cuts", None)
    if cuts is None or tensor.dim() != part.dim():
        return False
    whole: Whole = getattr(part, PART_OF)
    lengths = enumerate(zip(tensor.shape, part.shape, strict=True))
    is_alike = [*cuts] == [*whole.dims] and [*getattr(tensor, "axes", ())] == [*whole.axes]
    return is_alike and all(one == other or (other == 1 and dim not in cuts) for dim, (one, other) in lengths)


def may_be_equal(given: Iterable[tuple[Tensor, Whole | None]]) -> bool:
    """Whether what parts, and plain tensors, stand for has one shape, as far as that is known: alike on all ranks."""
    return len({_shape_of(tensor, whole) for tensor, whole in given} - {None}) < 2


def _shape_of(tensor: Tensor, whole: Whole | None) -> tuple[int, ...] | None:
    """That of the whole, where one dimension is cut; None of a plain tensor, which may be a part of something."""
    if whole is None:
        return tuple(tensor.shape) if isinstance(tensor, nn.Parameter) else None
    return shape_of_whole(tensor) if len(whole.dims) == 1 else None


def _is_as_long(tensor: Tensor, part: Tensor, whole: Whole) -> bool:
    """Whether a tensor that meets a part is as long as the whole where that is cut, and the part is not."""
    shape = _shape_of(part, whole)
    if shape is None:
        return False
    [cut] = whole.dims
    place = tensor.dim() - part.dim() + cut
    return place >= 0 and tensor.shape[place] == shape[cut] != part.shape[cut]


def check_no_whole(name: str, given: Iterable[Tensor], part: Tensor, whole: Whole) -> None:
    """Raise if a function was given a part's numbers and plain ones as long as the whole where that is cut.

    Where the part is 1 long torch would repeat it along them, and say nothing.
    """
    if any(_is_as_long(one, part, whole) for one in given):
        mend = "; what is to follow it, a moving average say, is made after tulle.distribute"
        if name in {"copy_", "__set__"}:
            mend = f"; model.load_state_dict, called on every rank, takes of whole weights what is this rank's{mend}"
        raise PartError(whole.refusal(name) + mend)


def check_gradients(given: Iterable[Tensor]) -> None:
    """Raise if `torch.autograd.grad` was given a part that it would not give the gradient of."""
    for part in given:
        whole: Whole | None = getattr(part, PART_OF, None)
        if whole is not None and (refusal := whole.refusal_of_gradient()) is not None:
            raise ModelError(refusal)


def called(part: Tensor, func: Callable[..., Any], args: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
    """What a function gives of a part; what torch refuses of it, by shapes say, it may take of the whole.

    Raises:
        PartError: If it does.
    """
    try:
        return func(*args, **keywords)
    except RuntimeError as error:
        if isinstance(error, TulleError | torch.OutOfMemoryError):
            raise
        refuse(part, name_of(func))


def refuse(part: Tensor, name: str) -> NoReturn:
    """Raise as a function, by its name, was given a part as if it were the whole."""
    whole: Whole = getattr(part, PART_OF)
    hint = ""
    if name in REDUCED:
        hint = "; sums, means and norms of all of it are known, p.pow(2).sum() say, and have gradients"
    elif name in LEAVES_TORCH:
        hint = "; tulle.full_state_dict(model), called on every rank, gives rank 0 all of it"
    raise PartError(whole.refusal(name) + hint)
