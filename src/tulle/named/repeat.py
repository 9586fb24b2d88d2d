"""Less memory for more work: `recompute` forgets what backward can compute again, `serialize` cuts up a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TypeVar, cast

from torch.utils.checkpoint import checkpoint

from tulle.errors import ModelError
from tulle.named.dims import Dim, Dims, check_dim
from tulle.named.placed import Local, check_named, record, shared_scope
from tulle.named.randomness import drawn_again, mark
from tulle.named.scope import Scope, current, entered
from tulle.named.tensor import Tensor

Given = TypeVar("Given", Tensor, tuple[Tensor, ...])


def recompute(function: Callable[..., Given], *inputs: Tensor) -> Given:
    """`function(*inputs)`, a tensor or a tuple of them; only the inputs are kept for backward, which does it again.

    Exchanges inside are done again too, in the same order on every rank; dropout, torch's own too, drops the same.

    Raises:
        ModelError: If an input, or what the function gives, is no named tensor.

    Source: Chen et al., *Training Deep Nets with Sublinear Memory Cost* (2016).
    """
    scope, before = shared_scope(inputs, "recompute"), mark()
    dims: list[Dims] = []
    is_tuple = False

    def run(*locals_: Local) -> tuple[Local, ...]:
        nonlocal is_tuple
        named = [Tensor(local, one.dims, (), scope) for local, one in zip(locals_, inputs, strict=True)]
        with entered(scope), drawn_again(before) if dims else nullcontext():
            given = function(*named)
            is_tuple = isinstance(given, tuple)
            results = given if isinstance(given, tuple) else (given,)
            for one in results:
                check_named(one, "recompute, as what its function gives,")
            dims[:] = [one.dims for one in results]
            return tuple(one.local for one in results)

    for one in inputs:
        record("kept", [one], one.dims, one.dims)
    with _recomputed(scope):
        parts = checkpoint(run, *[one.local for one in inputs], use_reentrant=False)
    assert isinstance(parts, tuple), "this is what run gives"
    made = tuple(Tensor(part, several) for part, several in zip(parts, dims, strict=True))
    return cast("Given", made if is_tuple else made[0])


@contextmanager
def _recomputed(scope: Scope) -> Iterator[None]:
    """Have what is written down within the block taken for what is done again."""
    before, scope.is_recomputed = scope.is_recomputed, True
    try:
        yield
    finally:
        scope.is_recomputed = before


def serialize(loss_of: Callable[..., Tensor], batch: Dim, pieces: int, *inputs: Tensor) -> Tensor:
    """Forward and backward of one piece of the batch after the other; gradients add up and are summed over ranks once.

    A piece is every `pieces`-th entry of the batch: each rank cuts it from the part that it holds, nothing travels, and
    yet it is the same piece in every layout, as what its entries share (a capacity, a mean over words, dropout) asks
    for. Inside, the batch is a dimension of the same name and smaller size. Every rank must call it.

    Args:
        loss_of: Gives the mean loss of what it is called with, a tensor without dimensions.
        batch: The dimension to cut; inputs without it are given whole each time.
        pieces: How many pieces.
        *inputs: What `loss_of` is called with.

    Returns:
        The mean loss, without gradient.

    Raises:
        ModelError: If the pieces would not be of one size on every rank, or the loss is no named number.
    """
    check_dim(batch)
    scope = current()
    if pieces < 1 or scope.local_size(batch) % pieces:
        raise ModelError(
            f"serialize was asked for {pieces} pieces of {batch!r}, of which each rank has {scope.local_size(batch)}: "
            "choose a number that divides it"
        )
    total: Tensor | None = None
    for piece in range(pieces):
        loss = loss_of(*[_piece(one, batch, pieces, piece) for one in inputs])
        check_named(loss, "serialize, as its loss,")
        loss = loss * (1 / pieces)
        if piece < pieces - 1:
            with scope.gradients.held():
                loss.backward()
        else:
            loss.backward()
        total = loss.detach() if total is None else total + loss.detach()
    assert total is not None, "there is at least one piece"
    return total


def _piece(tensor: Tensor, batch: Dim, pieces: int, piece: int) -> Tensor:
    check_named(tensor, "serialize")
    if batch not in tensor.dims:
        return tensor
    place, small = tensor.place(batch, "serialize"), batch.resized(batch.size // pieces)
    dims = tuple(small if dim == batch else dim for dim in tensor.dims)
    return Tensor(tensor.local.unflatten(place, (-1, pieces)).select(place + 1, piece), dims)
