"""`Inputs`: the tensors that a recomputed module was given, as they were when it ran first.

A module that writes in one in place (`hidden += control`, in blocks of a ControlNet) would find it written in when it
runs again, and write once more. Which modules do so their first call shows, for which all are copied; the versions of
the tensors tell, and copies are dropped at once where nothing was written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
        seen = self._seen if self.may_be_written else []  # of what torch has saved it looks at the versions
        self._seen = [(number, one, version) for number, one, version in seen if number not in self._copies]
        if self.may_be_written and self._module.training:
            self._module.__dict__[_WRITES] = bool(written) or self._module.__dict__.get(_WRITES) is True

    def as_they_were(
        self, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments and keywords with copies of the tensors in which forward has written.

        Raises:
            GradientError: If somebody else has written in one since.
        """
        if changed := [one for _, one, version in self._seen if one._version != version]:
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
        Where they may be written in they go in a list, for torch refuses tensors that were written in since.
        """
        if self.may_be_written:
            return checkpoint(lambda given: forward(*given[0], **given[1]), [arguments, keywords], use_reentrant=False)
        first, names = len(arguments), [*keywords]

        def run(*values: Any) -> Any:
            return forward(*values[:first], **dict(zip(names, values[first:], strict=True)))

        return checkpoint(run, *arguments, *keywords.values(), use_reentrant=False)


def _is_counted(one: object) -> bool:
    """Whether it is a plain tensor of whose writes torch keeps count, and has values."""
    is_plain = type(one) is Tensor and one.layout == torch.strided
    return is_plain and not (one.is_meta or one.is_inference() or isinstance(one, FakeTensor))


def _copy(one: Tensor) -> Tensor:
    return one.detach().clone().requires_grad_(one.requires_grad)
