"""`Inputs`: the tensors that a recomputed module was given, as they were when it ran first.

A module that writes in one in place (`hidden += control`, in blocks of a ControlNet) would find it written in when it
runs again, and write once more. Which modules do so their first call shows, for which all are copied; the versions of
the tensors tell, and copies are dropped at once where nothing was written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint

from tulle.errors import GradientError, ModelError

_WRITES = "_tulle_writes_in_inputs"
"""The attribute by which a module knows whether its forward does."""


class Inputs:
    """The tensors that one call was given, and copies of those in which it may write.

    Args:
        module: That is called.
        arguments: Which it is given, with what they hold in tuples, lists and dictionaries.
        keywords: The same.
    """

    def __init__(self, module: nn.Module, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> None:
        leaves = enumerate(tree_leaves((tuple(arguments), dict(keywords))))
        self._module = module
        self._seen = [(number, one, one._version) for number, one in leaves if _is_counted(one)]
        self.may_be_written = bool(self._seen) and module.__dict__.get(_WRITES) is not False
        seen = self._seen if self.may_be_written else []
        copies = {id(one): _copy(one) for _, one, _ in seen}  # one of what was given twice
        self._copies = {number: copies[id(one)] for number, one, _ in seen}
        self._others: list[tuple[ref[Tensor], int]] = []

    def look(self) -> None:
        """Forward has run: keep copies of those in which it has written.

        Raises:
            ModelError: If it has, and did not in its first call.
        """
        written = [number for number, one, version in self._seen if one._version != version]
        if written and not self.may_be_written:
            raise ModelError(
                f"the forward of a {type(self._module).__name__}, which is to run again in backward, has written in "
                "place in a tensor that it was given, which it did not in its first call, and would find it so then: "
                "have it write in a copy (.clone()), or leave it out of recompute"
            )
        self._copies = {number: self._copies[number] for number in written}
        if self.may_be_written:
            self._others = [(ref(one), version) for number, one, version in self._seen if number not in written]
        self._seen = []
        if self.may_be_written and self._module.training:
            self._module.__dict__[_WRITES] = bool(written) or self._module.__dict__.get(_WRITES) is True

    def as_they_were(
        self, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments and keywords with copies of the tensors in which forward has written.

        Raises:
            GradientError: If somebody else has written in one since.
        """
        others = [(one(), version) for one, version in self._others]
        if changed := [one for one, version in others if one is not None and one._version != version]:
            raise GradientError(
                f"a tensor of shape {list(changed[0].shape)} that a {type(self._module).__name__} was given, which "
                "runs again in backward, was changed in place after forward: change a copy, or leave it out of "
                "recompute"
            )
        if not self._copies:
            return arguments, keywords
        leaves, structure = tree_flatten((tuple(arguments), dict(keywords)))
        again = {id(copy): copy.clone() for copy in self._copies.values()}  # written in again, at each backward
        for number, copy in self._copies.items():
            leaves[number] = again[id(copy)]
        return tree_unflatten(leaves, structure)

    def checkpoint(self, forward: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """What a forward gives, run by torch so that it saves its inputs only.

        All of them go as positional arguments: of others torch asks no device whose random numbers are to come again.
        Where they may be written in, what it saves is of the same memory and counts no writes, of which it would raise.
        """
        first, names, values = len(arguments), [*keywords], (*arguments, *keywords.values())
        given = [values] if self.may_be_written else []

        def run(*values: Any) -> Any:
            values = given.pop() if given else values
            return forward(*values[:first], **dict(zip(names, values[first:], strict=True)))

        saved = [_uncounted(one) if given and _is_counted(one) else one for one in values]
        return checkpoint(run, *saved, use_reentrant=False)


def _is_counted(one: object) -> bool:
    """Whether it is a plain tensor of whose writes torch keeps count, and has values."""
    if not isinstance(one, Tensor) or type(one) is not Tensor or one.layout != torch.strided:
        return False
    return not (one.is_meta or one.is_inference() or isinstance(one, FakeTensor))


def _copy(one: Tensor) -> Tensor:
    return one.detach().clone().requires_grad_(one.requires_grad)


def _uncounted(one: Tensor) -> Tensor:
    return one.data.requires_grad_(one.requires_grad)
