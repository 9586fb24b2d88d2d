"""`ShardGradient`: the gradient of a rank's part of a parameter, whose norm is that of the whole.

Without it `torch.nn.utils.clip_grad_norm_`, and clipping by hand, would scale every rank's gradients by another factor,
a gradient scaler would skip a step on one rank only, and a norm that is logged would be that of a part. To optimizers
of torch's it is a plain tensor.

    p.grad.norm(),  p.grad.abs().max(),  torch.cat([p.grad.flatten() for p in parameters]).norm()
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from tulle.comm import all_reduce
from tulle.errors import GradientError
from tulle.mesh import Axis
from tulle.parts import (
    ALIKE,
    BY_ROW,
    COUNTS,
    DRAWS,
    EACH_BY_ITSELF,
    JOINED,
    LEAVES_TORCH,
    LIKE,
    ONE_NUMBER_OF_EACH,
    PLAIN,
    PRODUCTS,
    REDUCED,
    SHAPES,
    Extent,
    Reduction,
    Together,
    Whole,
    asks_of_whole,
    counted,
    extent_of_joined,
    goes_along,
    held_alone,
    made_of,
    make_gradients_by,
    meeting,
    meets_parts,
    mixes,
    name_of,
    norm_of_whole,
    number_of_whole,
    picks,
    taken_together,
    tensors_in,
)
from tulle.tables.row_numbers import goes_by_told, tell
from tulle.tables.whole_gradients import given_wholes

FOREACH_NORM = vars(torch)["_foreach_norm"]
UNSCALE = vars(torch)["_amp_foreach_non_finite_check_and_unscale_"]
_LABEL = "gradient norm"
_OF_ALL = {*REDUCED, "dot", "vdot"}
"""Names of what may give one number of all."""
_NUMBERS = {"indices", "_indices"}
"""Names of what gives the numbers of the rows that a sparse gradient stores."""
_MEND = ".to_local() gives this rank's part"


@meets_parts
@taken_together
class ShardGradient(torch.Tensor):
    """A gradient, dense or sparse, of which every rank of an axis, or of several, has a part.

    What makes one number of all of it (norms, as methods, as functions, and as gradient clipping takes them; sums;
    the largest; whether any or all are), and the check for infinities of a gradient scaler, is over all ranks: every
    rank must ask. What mixes numbers along a dimension that is cut, or goes by their places along it, is refused; what
    other operations give is a part again.
    """

    axes: tuple[Axis, ...]
    count: int | None = None
    """Numbers in the whole; None to count them."""
    whole: Whole | None = None
    """What it is a gradient of; None of what became of one in another shape."""
    cuts: tuple[int, ...] = ()
    """The dimensions that are; none if what goes along them is not to be looked at."""
    held: Callable[[], Tensor | None] | None = None
    """Where along the first of them numbers of the whole lie; None for everywhere."""
    is_known: bool = True
    """Whether one number of all can be told."""
    is_stepped: bool = False
    """Whether an optimizer steps by it just now, to which the parameter is this rank's part: so are numbers of rows."""
    is_mixed: bool = False
    """Whether whole gradients were put together with it, of which no number over all ranks is right."""

    @classmethod
    def of(
        cls,
        gradient: Tensor,
        axes: Sequence[Axis],
        count: int | None = None,
        *,
        whole: Whole | None = None,
        cuts: Sequence[int] = (),
        held: Callable[[], Tensor | None] | None = None,
    ) -> ShardGradient:
        """Turn a plain gradient into one; it stays the object that it is."""
        gradient.__class__ = cls  # as_subclass refuses sparse tensors
        assert isinstance(gradient, ShardGradient), "just made so"
        gradient.axes, gradient.cuts = tuple(axes), tuple(cuts)
        gradient.count, gradient.whole, gradient.held = count, whole, held
        return gradient

    def extent(self) -> Extent:
        """Which numbers of the whole it has."""
        return Extent(self.cuts, self.count, None if self.held is None else self.held(), self.is_known)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Let operations see plain tensors, and what they give be a part."""
        if any(not issubclass(kind, ShardGradient) for kind in types):
            return NotImplemented  # a gradient that is still under way comes first
        keywords = kwargs or {}
        if func in COUNTS:
            return counted(args[0], lambda: _counting(args[0]))
        if func in SHAPES and args[0].whole is not None and asks_of_whole():
            return func(torch.empty(args[0].whole.shape, device="meta"), *args[1:], **keywords)
        check_alone(func, args, keywords)
        with torch._C.DisableTorchFunctionSubclass():
            given = [*tensors_in(args), *tensors_in(keywords.values())]
            for together in meeting(func, args, given) if any(1 in one.shape for one in given) else ():
                _check_shapes(name_of(func), together)  # which torch would repeat
            try:
                result = func(*args, **keywords)
            except RuntimeError as error:
                if (wholes := given_wholes(func, args, keywords)) is not None:
                    return func(*wholes[0], **wholes[1])
                _check_shapes(name_of(func), given, error)
                raise
        if func is UNSCALE:
            for axis in axes_of(args[0]):
                all_reduce(args[1], axis, label=_LABEL, op="max").wait()
            return result
        return over_ranks(func, args, keywords, result)

    def to_local(self) -> Tensor:
        """The numbers that lie on this rank, in the same memory, as of torch's DTensor."""
        there = self.detach()  # if it was on the way
        with torch._C.DisableTorchFunctionSubclass():
            return there.detach()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """A plain tensor of the same numbers."""
        with torch._C.DisableTorchFunctionSubclass():
            return memo.setdefault(id(self), self.detach().clone())

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A pickle of a plain tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.detach().__reduce_ex__(protocol)


@make_gradients_by
def gradient_of_part(gradient: Tensor, whole: Whole) -> ShardGradient:
    """Turn a plain gradient into that of a part of a whole; it stays the object that it is."""
    with torch._C.DisableTorchFunctionSubclass():
        axes = cast("Sequence[Axis]", whole.axes)
        return ShardGradient.of(gradient, axes, whole.count, whole=whole, cuts=whole.dims, held=whole.held)


def check_alone(func: Callable[..., Any], args: Sequence[Any], keywords: Mapping[str, Any]) -> None:
    """Raise if what a function would give, or write, is not what it does of all of a gradient.

    Raises:
        GradientError: If it mixes numbers along a dimension that is cut, or goes by their places along it.
    """
    name, given = name_of(func), [*tensors_in(args)]
    if name in PRODUCTS:
        _check_products(name, given)
    if not given or not isinstance(gradient := given[0], ShardGradient):
        return
    if name in LEAVES_TORCH or name in DRAWS:
        _refuse_to(name, gradient)
    with torch._C.DisableTorchFunctionSubclass():
        placed = next((cut for cut in gradient.cuts if goes_along(name, gradient, cut, args, keywords)), None)
        mixed = next((cut for cut in gradient.cuts if mixes(name, gradient, cut, args, keywords)), None)
    cut = placed if mixed is None else mixed
    if isinstance(args[0], Tensor) and cut is not None and not (gradient.is_stepped and goes_by_told(args, keywords)):
        _refuse_along(name, gradient, cut)


def over_ranks(func: Callable[..., Any], args: Sequence[Any], keywords: Mapping[str, Any], result: Any) -> Any:
    """What a function gives of whole gradients, if it gave `result` of parts. Every rank of their axis must call it.

    Raises:
        GradientError: If that is not known.
    """
    if (order := order_of_norms(func, args, keywords)) is not None and func is FOREACH_NORM:
        return norms_over_ranks(args[0], result, order)
    name, first = name_of(func), args[0] if args else None
    if isinstance(first, list | tuple) and name in ONE_NUMBER_OF_EACH:
        return [ONE_NUMBER_OF_EACH[name](one, *args[1:], **keywords) for one in first]
    if isinstance(result, list | tuple) and name.startswith(EACH_BY_ITSELF):
        given = [[one[t] if isinstance(one, list | tuple) else one for one in args] for t in range(len(result))]
        return type(result)(_made(func, one, {}, got) for one, got in zip(given, result, strict=True))
    if isinstance(first, list | tuple) and name in JOINED and any(isinstance(g, ShardGradient) for g in first):
        return _joined(func, first, result)
    return _made(func, args, keywords, result)


def _made(func: Callable[..., Any], args: Sequence[Any], keywords: Mapping[str, Any], result: Any) -> Any:
    """What a function of parts gave: a part again, or a number that is of the whole."""
    name = name_of(func)
    parts = [one for one in (*tensors_in(args), *tensors_in(keywords.values())) if isinstance(one, ShardGradient)]
    if not parts or name in PLAIN or (name in LIKE and not isinstance(args[0], ShardGradient)):
        return result
    if name in _NUMBERS and parts[0].is_stepped:
        return tell(result)
    is_of_rows = name == "_nnz" and 0 in parts[0].cuts and not parts[0].is_stepped
    if is_of_rows or (isinstance(result, bool) and name in ALIKE):
        mine = torch.tensor(float(result), dtype=torch.float64, device=parts[0].device)
        return type(result)(_together(parts[0].axes, None).over(mine, "sum" if is_of_rows else "min").item())
    if isinstance(result, tuple) and name in REDUCED and not result[0].dim():  # aminmax, var_mean
        _refuse_to(name, parts[0])
    if isinstance(result, tuple | list):
        for one in result:
            _made(func, args, keywords, one)
    return _of_tensor(func, parts, args, keywords, result) if type(result) is Tensor else result


def _of_tensor(
    func: Callable[..., Any],
    parts: Sequence[ShardGradient],
    args: Sequence[Any],
    keywords: Mapping[str, Any],
    result: Tensor,
) -> Tensor:
    """What a function of parts gave, if it gave a plain tensor."""
    gradient = next((part for part in parts if part.shape == result.shape), parts[0])
    if not result.dim():
        return _of_all(func, gradient, args, keywords, result) if gradient.dim() else result
    if (result.is_leaf and result.requires_grad) or (result._base is not None and result is args[0]):
        return result  # a parameter, or a view of what others know, that was written in
    with torch._C.DisableTorchFunctionSubclass():
        if result.shape == gradient.shape and not picks(func, args):
            return _like(gradient, result, None)
        given = (gradient, tuple(args), dict(keywords))
        return _like(gradient, *made_of(func, gradient.extent(), given, result))


def _of_all(
    func: Callable[..., Any],
    gradient: ShardGradient,
    args: Sequence[Any],
    keywords: Mapping[str, Any],
    result: Tensor,
) -> Tensor:
    """One number of all of a gradient, from that of its part.

    Raises:
        GradientError: If that is not known.
    """
    name = name_of(func)
    _check_not_mixed(name, gradient)
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        extent = gradient.extent()
        given, result = held_alone(func, extent, (gradient, tuple(args), dict(keywords)), result)
        together = _together(gradient.axes, gradient.count)
        found = number_of_whole(name, *given, result, together) if extent.is_known else None
    if found is None and name in REDUCED:
        _refuse_to(name, gradient)
    return result if found is None else found


def _check_products(name: str, given: Sequence[Tensor]) -> None:
    """Raise if what is turned, or multiplied by a matrix, is a part, unless each whole row is by itself."""
    for place, one in enumerate(given):
        is_by_row = place == 0 and name in BY_ROW and one.dim() > 1
        if isinstance(one, ShardGradient) and one.cuts and not (is_by_row and one.cuts == (0,)):
            _refuse_along(name, one, one.cuts[0])


def _check_shapes(name: str, given: Sequence[Tensor], error: RuntimeError | None = None) -> None:
    """Raise by name if a part met what is longer where that is cut (a mask, say), and failed, or would be repeated."""
    for part in (one for one in given if isinstance(one, ShardGradient)):
        for other in (one for one in given if one.dim() == part.dim() and not isinstance(one, ShardGradient)):
            if any(other.shape[cut] > part.shape[cut] for cut in part.cuts) and (error or _repeats(name, part, other)):
                raise GradientError(
                    f"{name} was given a gradient of which this rank has a part, {list(part.shape)}, and a tensor of "
                    f"shape {list(other.shape)}: that would need the whole. Take a plan that leaves the parameter "
                    f"whole, or that tensor's part; {_MEND}"
                ) from error


def _repeats(name: str, part: ShardGradient, other: Tensor) -> bool:
    """Whether torch repeats a part that is 1 long where it is cut along what is as long there as the whole."""
    if name in PRODUCTS | JOINED or len(part.cuts) != 1 or part.shape[part.cuts[0]] != 1 or not part.numel():
        return False
    return other.shape[part.cuts[0]] * part.numel() == part.count


def _refuse_along(name: str, gradient: ShardGradient, cut: int) -> NoReturn:
    raise GradientError(
        f"{name} was asked of a gradient along dimension {cut}, of which this rank has a part, "
        f"{list(gradient.shape)}: norms, sums and the like of all of it are known, along that dimension none are. "
        f"Take a plan that leaves the parameter whole; {_MEND}"
    )


def _refuse_to(name: str, gradient: ShardGradient) -> NoReturn:
    raise GradientError(
        f"{name} was asked of a gradient of which this rank has a part, {list(gradient.shape)}, and what it is of "
        f"the whole is not known: norms, sums and the largest are; {_MEND}"
    )


def axes_of(gradients: Iterable[Tensor]) -> list[Axis]:
    """The axes over which some gradients are shared out, each once; the same, in their order, on all ranks."""
    axes = (axis for gradient in gradients if isinstance(gradient, ShardGradient) for axis in gradient.axes)
    return [*{axis.ranks: axis for axis in axes}.values()]


def _together(axes: Sequence[Axis], count: int | None) -> Together:
    def over(number: Tensor, op: Reduction) -> Tensor:
        for axis in axes:
            number = all_reduce(number.clone(), axis, label=_LABEL, op=op).wait()
        return number

    return Together(over, count)


def _counting(gradient: ShardGradient) -> Together:
    if gradient.is_mixed or not gradient.is_known:
        _refuse_to("numel", gradient)
    return _together(gradient.axes, gradient.count)


def _like(gradient: ShardGradient, result: Tensor, extent: Extent | None) -> ShardGradient:
    """What became of a gradient of a part; without an extent of its own it has the gradient's."""
    made = ShardGradient.of(result, gradient.axes, gradient.count, cuts=gradient.cuts, held=gradient.held)
    made.whole = gradient.whole if extent is None else None
    made.is_known, made.is_mixed, made.is_stepped = gradient.is_known, gradient.is_mixed, gradient.is_stepped
    if extent is not None:
        made.cuts, made.count, made.is_known = extent.cuts, extent.count, extent.is_known
        made.held = lambda: extent.places
    return made


def _joined(func: Callable[..., Any], gradients: Sequence[Tensor], result: Any) -> ShardGradient:
    """Several gradients in one tensor."""
    shards = [gradient for gradient in gradients if isinstance(gradient, ShardGradient)]
    with torch._C.DisableTorchFunctionSubclass():
        made = _like(shards[0], result, extent_of_joined(func, [(one, one.extent()) for one in shards], result))
    is_other = any(shard.is_mixed or _ranks(shard) != _ranks(shards[0]) for shard in shards)
    made.is_mixed = is_other or len(shards) < len(gradients)
    return made


def _check_not_mixed(name: str, gradient: ShardGradient) -> None:
    if gradient.is_mixed and name in _OF_ALL:
        raise GradientError(
            f"{name} was asked of gradients that were put together, of some of which this rank has a part and of "
            "others all: take it of each, torch.stack([p.grad.norm() for p in parameters]).norm() say, or "
            f"tulle.clip_grad_norm_; {_MEND}"
        )


def order_of_norms(func: object, args: Sequence[Any], keywords: Mapping[str, Any]) -> float | None:
    """The order, if a call takes norms as torch's clipping does (`_foreach_norm`, `vector_norm`); else None."""
    if func is not FOREACH_NORM and not (func is torch.linalg.vector_norm and len(args) + len(keywords) <= 2):
        return None
    return float(args[1] if len(args) > 1 else keywords.get("ord", 2))


def norms_over_ranks(gradients: Sequence[Tensor], norms: Sequence[Tensor], order: float) -> list[Tensor]:
    """Norms of which those of parts are replaced by those of the wholes; one all-reduce an axis for all alike."""
    found, alike = [*norms], dict[tuple[tuple[int, ...], ...], list[int]]()
    for t, gradient in enumerate(gradients):
        if isinstance(gradient, ShardGradient):
            _check_not_mixed("norm", gradient)
            alike.setdefault(_ranks(gradient), []).append(t)
    for parts in alike.values():
        together = _together(cast("ShardGradient", gradients[parts[0]]).axes, None)
        whole = norm_of_whole(torch.stack([norms[t] for t in parts]), order, together)
        for t, norm in zip(parts, whole.unbind(), strict=True):
            found[t] = norm
    return found


def _ranks(gradient: ShardGradient) -> tuple[tuple[int, ...], ...]:
    return tuple(axis.ranks for axis in gradient.axes)
