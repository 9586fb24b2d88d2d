"""Splits and merges dimensions, cuts, pads and joins them; data moves where the layout asks for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from tulle.errors import ModelError
from tulle.named.dims import Dim, Dims, as_dims, check_dim, check_once, spelled, volume
from tulle.named.placed import Local, aligned, label_of, record, shared_scope
from tulle.named.relayout import Mover, fitting, splits_of
from tulle.named.tensor import Tensor


def split(tensor: Tensor, dim: Dim, into: Sequence[Dim]) -> Tensor:
    """Make several dimensions of one, the first of them the slowest-varying.

    Raises:
        ModelError: If the sizes do not multiply to that of `dim`.

    Example:
        >>> import torch
        >>> from tulle import named as tn
        >>> d, heads, d_kv = tn.dims(d=6, heads=2, d_kv=3)
        >>> tn.split(tn.from_torch(torch.arange(6), d), d, (heads, d_kv)).local.tolist()
        [[0, 1, 2], [3, 4, 5]]
    """
    place, into = tensor.place(dim, "split"), as_dims(into)
    _check_product(dim, into, "split")
    scope = shared_scope([tensor], "split")
    dims = (*tensor.dims[:place], *into, *tensor.dims[place + 1 :])
    scope.axes(dims, "split to")
    moves = [(dim, into[0]), *[(None, one) for one in into[1:]], *_unmoved(tensor, dims)]
    record("move", [tensor], tensor.dims, dims, tuple(moves))
    mover = _mover(tensor, label_of("split", dims))
    kept = fitting(scope, mover.splits[place], into[0].size)
    while mover.splits[place] != kept:
        mover.gather(place)
    mover.part = mover.part.unflatten(place, (-1, *[one.size for one in into[1:]]))
    mover.splits[place : place + 1] = [kept, *[()] * (len(into) - 1)]
    return Tensor(*mover.laid_out_as(dims))


def merge(tensor: Tensor, dims: Sequence[Dim], into: Dim) -> Tensor:
    """Make one dimension of several, the first of them the slowest-varying; it stands where the first stood.

    Raises:
        ModelError: If the sizes do not multiply to that of `into`.

    Example:
        >>> import torch
        >>> from tulle import named as tn
        >>> d, heads, d_kv = tn.dims(d=6, heads=2, d_kv=3)
        >>> tn.merge(tn.from_torch(torch.arange(6).view(2, 3), (heads, d_kv)), (heads, d_kv), d).local.tolist()
        [0, 1, 2, 3, 4, 5]
    """
    merged = as_dims(dims)
    check_dim(into)
    check_once(merged, "merge of")
    places = [tensor.place(dim, "merge") for dim in merged]
    _check_product(into, merged, "merge")
    scope = shared_scope([tensor], "merge")
    rest = [place for place in range(len(tensor.dims)) if place not in places]
    begin = sum(place < places[0] for place in rest)
    order = [*rest[:begin], *places, *rest[begin:]]
    out = (*[tensor.dims[place] for place in rest[:begin]], into, *[tensor.dims[place] for place in rest[begin:]])
    scope.axes(out, "merge to")
    moves = [(merged[0], into), *[(one, None) for one in merged[1:]], *_unmoved(tensor, out)]
    record("move", [tensor], tensor.dims, out, tuple(moves))
    mover = _mover(tensor, label_of("merge", out))
    mover.part = mover.part.permute(order)
    mover.splits = [mover.splits[place] for place in order]
    kept = fitting(scope, scope.axes_of(into), merged[0].size)
    after = splits_of(scope, out)
    mover.part = mover.move([*after[:begin], kept, *[()] * (len(merged) - 1), *after[begin + 1 :]])
    mover.part = mover.part.flatten(begin, begin + len(merged) - 1)
    mover.splits[begin : begin + len(merged)] = [kept]
    return Tensor(*mover.laid_out_as(out))


def slice(tensor: Tensor, dim: Dim, out: Dim, *, start: int = 0) -> Tensor:
    """The entries `start` to `start + out.size` of a dimension, as dimension `out`.

    Raises:
        ModelError: If there are not so many.
    """
    check_dim(out)
    if start < 0 or start + out.size > dim.size:
        raise ModelError(f"slice of {dim!r} from {start} to {start + out.size} goes beyond it: take fewer entries")
    place = tensor.place(dim, "slice")
    return resized(tensor, place, out, lambda whole: whole.narrow(place, start, out.size))


def pad(tensor: Tensor, dim: Dim, out: Dim, *, before: int = 0, value: float = 0.0) -> Tensor:
    """The dimension made longer, as dimension `out`: `before` entries in front, the rest behind.

    Pad a dimension to a multiple of an axis to split it; `tn.mask(out, dim.size)` tells which entries are real.

    Raises:
        ModelError: If `out` is not long enough.
    """
    check_dim(out)
    place, after = tensor.place(dim, "pad"), out.size - dim.size - before
    if before < 0 or after < 0:
        raise ModelError(f"pad of {dim!r} by {before} in front gives more than {out!r}: make that longer")
    width = [0, 0] * (len(tensor.dims) - 1 - place) + [before, after]
    return resized(tensor, place, out, lambda whole: F.pad(whole, width, value=value))


def concat(tensors: Sequence[Tensor], dims: Sequence[Dim], out: Dim) -> Tensor:
    """Lay tensors end to end, each along its own one of `dims`, as dimension `out`; their other dimensions agree.

    Raises:
        ModelError: If sizes do not add up, or other dimensions differ.
    """
    dims = as_dims(dims)
    check_dim(out)
    if sum(dim.size for dim in dims) != out.size or len(dims) != len(tensors):
        raise ModelError(f"concat along {spelled(dims)} cannot give {out!r}: name a dimension of each, adding up to it")
    scope = shared_scope(tensors, "concat")
    place = tensors[0].place(dims[0], "concat")
    result = _replaced(tensors[0].dims, place, out)
    scope.axes(result, "concat to")
    wanted = [_replaced(result, place, dim) for dim in dims]
    for tensor, own in zip(tensors, wanted, strict=True):
        if set(own) != set(tensor.dims):
            raise ModelError(f"concat was given {tensor!r} among tensors of {spelled(own)}: others must agree")
    for tensor, dim in zip(tensors, dims, strict=True):
        _record(tensor, tensor.place(dim, "concat"), result, (out,))
    parts = [
        aligned(_whole(tensor, tensor.place(dim, "concat")), tensor.dims, own)
        for tensor, dim, own in zip(tensors, dims, wanted, strict=True)
    ]
    mover = Mover(scope, torch.cat(parts, place), label_of("concat", result), splits_of(scope, result, whole=place))
    return Tensor(*mover.laid_out_as(result))


def stack(tensors: Sequence[Tensor], dim: Dim) -> Tensor:
    """Lay tensors of the same dimensions side by side, along a new dimension that comes first.

    Raises:
        ModelError: If their number is not the dimension's size.
    """
    check_dim(dim)
    if dim.size != len(tensors):
        raise ModelError(f"stack was given {len(tensors)} tensors for {dim!r}: give as many as its size")
    scope = shared_scope(tensors, "stack")
    result = (dim, *tensors[0].dims)
    for tensor in tensors:
        if set(tensor.dims) != set(result[1:]):
            raise ModelError(f"stack was given {tensor!r} among tensors of {spelled(result[1:])}: all must agree")
    scope.axes(result, "stack to")
    for tensor in tensors:
        _record(tensor, None, result, (dim,))
    part = torch.stack([aligned(tensor.local, tensor.dims, result[1:]) for tensor in tensors])
    mover = Mover(scope, part, label_of("stack", result), splits_of(scope, result, whole=0))
    return Tensor(*mover.laid_out_as(result))


def unstack(tensor: Tensor, dim: Dim) -> list[Tensor]:
    """The tensors that lie side by side along a dimension."""
    shared_scope([tensor], "unstack")
    place = tensor.place(dim, "unstack")
    rest = tuple(other for other in tensor.dims if other != dim)
    _record(tensor, place, rest, ())
    return [Tensor(part, rest) for part in _whole(tensor, place).unbind(place)]


def resized(tensor: Tensor, place: int, out: Dim, change: Callable[[Local], Local]) -> Tensor:
    """A tensor of which one dimension is changed by a function of the part where it is whole."""
    scope = shared_scope([tensor], "slice or pad")
    dims = _replaced(tensor.dims, place, out)
    scope.axes(dims, "slice or pad to")
    _record(tensor, place, dims, (out,))
    part = change(_whole(tensor, place))
    mover = Mover(scope, part, label_of("slice", dims), splits_of(scope, dims, whole=place))
    return Tensor(*mover.laid_out_as(dims))


def _record(tensor: Tensor, place: int | None, result: Dims, made: Dims) -> None:
    """Write down that a dimension, if there is a place of one, is made whole, and others are made of it."""
    unmoved = [(dim, dim) for number, dim in enumerate(tensor.dims) if number != place]
    gone = [] if place is None else [(tensor.dims[place], None)]
    record("move", [tensor], tensor.dims, result, (*gone, *[(None, dim) for dim in made], *unmoved))


def _unmoved(tensor: Tensor, dims: Dims) -> list[tuple[Dim, Dim]]:
    return [(dim, dim) for dim in tensor.dims if dim in dims]


def _whole(tensor: Tensor, place: int) -> Local:
    """This rank's part with one dimension made whole."""
    mover = _mover(tensor, label_of("gather", tensor.dims))
    return mover.move(splits_of(tensor.scope, tensor.dims, whole=place))


def _mover(tensor: Tensor, label: str) -> Mover:
    return Mover(tensor.scope, tensor.local, label, splits_of(tensor.scope, tensor.dims))


def _replaced(dims: Dims, place: int, by: Dim) -> Dims:
    return (*dims[:place], by, *dims[place + 1 :])


def _check_product(one: Dim, several: Dims, what: str) -> None:
    if volume(several) != one.size:
        raise ModelError(f"{what} between {one!r} and {spelled(several)}: the sizes must multiply to {one.size}")
