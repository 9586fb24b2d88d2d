"""Gradients of parts that meet what a program made as large as the whole, an average by `torch.zeros(p.shape)` say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from tulle.parts import Whole, replaced, tensors_in, writes


def given_wholes(
    func: Callable[..., Any], args: Sequence[Any], keywords: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """What a function is given, with all of the gradients that it has parts of. Every rank must ask.

    Args:
        func: The function, which failed as shapes differ.
        args: Its arguments, and
        keywords: those by name.

    Returns:
        None if nothing in it is as large as the whole, it writes in a gradient, or one cannot be gathered.
    """
    given = [*tensors_in(args), *tensors_in(keywords.values())]
    wholes: dict[int, Whole] = {id(one): whole for one in given if (whole := getattr(one, "whole", None)) is not None}
    is_met = any(one.shape == whole.shape for one in given if id(one) not in wholes for whole in wholes.values())
    if not is_met or (writes(func) and id(args[0]) in wholes):
        return None
    if not all(whole.is_gathered for whole in wholes.values()):
        return None

    def whole_of(gradient: Tensor) -> Tensor | None:
        whole = wholes.get(id(gradient))
        return None if whole is None else whole.gather(gradient.detach())

    return replaced(args, keywords, whole_of)
