"""Selection along a dimension that may be split: the largest entries, and drawing one by its logit."""

from __future__ import annotations

import torch

from tulle.errors import ModelError
from tulle.named.dims import Dim, check_dim, check_once
from tulle.named.lookup import gather
from tulle.named.placed import Local, label_of, shared_scope
from tulle.named.pointwise import equal, range, where
from tulle.named.randomness import next_key, uniform
from tulle.named.reduction import max, min
from tulle.named.relayout import Mover, splits_of
from tulle.named.tensor import Tensor


def argmax(tensor: Tensor, over: Dim) -> Tensor:
    """Place of the largest entry along a dimension, for which NaN counts; of equal ones the first, in every layout."""
    shared_scope([tensor], "argmax")
    place = tensor.place(over, "argmax")
    rest = tuple(dim for dim in tensor.dims if dim != over)
    if not tensor.scope.axes_of(over):
        return Tensor(tensor.local.argmax(place), rest)
    fixed = tensor.detach()
    found = equal(fixed, max(fixed, over)) | ~equal(fixed, fixed)
    return min(where(found, range(over), over.size), over)


def top_k(tensor: Tensor, over: Dim, k: Dim) -> tuple[Tensor, Tensor]:
    """The largest entries along a dimension and their places, both `(rest, k)`, the largest first.

    Of equal entries the first comes first, in every layout. Each rank sorts its part and only the best travel.

    Raises:
        ModelError: If there are not so many entries.
    """
    place = tensor.place(over, "top_k")
    check_dim(k)
    check_once((over, k), "top_k of")
    if k.size > over.size:
        raise ModelError(f"top_k was asked for {k!r} of {over!r}: there are not so many")
    scope = shared_scope([tensor], "top_k")
    rest = tuple(dim for dim in tensor.dims if dim != over)
    dims = (*rest, k)
    scope.axes(dims, "top_k to")
    values, places = _largest(tensor.local.detach().movedim(place, -1), k.size)
    places = places + scope.offset(over)
    for axis in reversed(scope.axes_of(over)):
        label = label_of("top_k", tensor.dims)
        values, places = (scope.wire.gather(part, axis, len(rest), label) for part in (values, places))
        values, among = _largest(values, k.size)
        places = places.gather(-1, among)
    mover = Mover(scope, places, label_of("top_k", dims), splits_of(scope, dims, whole=len(rest)))
    index = Tensor(mover.move(splits_of(scope, dims)), dims)
    return gather(tensor, index, over, label="top_k"), index


def sample(logits: Tensor, over: Dim, *, temperature: float = 1.0) -> Tensor:
    """Draw a place along a dimension with the probabilities of its softmax: the same in every layout.

    Raises:
        ModelError: If the temperature is negative; 0 takes the largest.
    """
    if temperature < 0:
        raise ModelError(f"sample was given the temperature {temperature!r}, expected 0 or more")
    if temperature == 0:
        return argmax(logits, over)
    local = logits.local.detach()
    drawn = uniform(logits.scope, logits.dims, next_key(), device=local.device)
    gumbel = -torch.log(-torch.log(drawn.clamp(min=2.0**-53)))
    return argmax(logits.with_part(local.double() / temperature + gumbel), over)


def _largest(local: Local, count: int) -> tuple[Local, Local]:
    values, places = torch.sort(local, dim=-1, descending=True, stable=True)
    return values[..., :count].contiguous(), places[..., :count].contiguous()
