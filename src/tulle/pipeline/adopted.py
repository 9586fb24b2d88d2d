"""`Adopted`: tensors of the user's code that are no placeholders, but live on one rank all the same.

These are parameters and the buffers of placed modules, which the code reads between modules; and tensors that all ranks
made alike (`torch.zeros(...)`) until something was written in them that only one rank has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from tulle.errors import ModelError
from tulle.pipeline.holdings import Holdings
from tulle.pipeline.outcome import Described, described
from tulle.pipeline.placeholder import Operator, Placeholder
from tulle.pipeline.strays import are_strays, check_no_stray
from tulle.pipeline.tape import Graph

_LENT_BY = (Tensor.data.__get__, Tensor.detach, torch.detach)  # type: ignore[attr-defined]


class Adopted:
    """The placeholders that stand for such tensors in one program.

    Args:
        holdings: What lives where.
        program: That they belong to.
    """

    def __init__(self, holdings: Holdings, program: Operator) -> None:
        self._holdings, self._axis = holdings, holdings.mailbox.axis
        self._program = ref(program)  # which has this one
        self.written_since: Callable[[Any], str | None] | None = None
        """Gives the name of a tensor if later micro-batches have written in it, to one that is past its backward."""
        self.models = set[int]()
        """Numbers of the models of which something was read between modules; the same on all ranks."""
        self._is_in_forward = False
        self._known: dict[int, Placeholder] = {}
        self._kept: list[Tensor] = []
        self._graph = Graph([])
        """Of those that no call has made."""

    def placed(self, leaf: Any) -> Any:
        """The placeholder that stands for a tensor with an owner; anything else as it is."""
        if self.written_since is not None and not self._is_in_forward:
            self._check_read(leaf)
        if not isinstance(leaf, Tensor) or isinstance(leaf, Placeholder):
            return leaf
        known = self._known.get(id(leaf))
        if known is not None:
            return known
        stage = self._holdings.stages.get(id(leaf))
        if stage is not None:
            made = self._stand_for(_described(leaf), stage)
            if self._axis.rank == stage % self._axis.size:
                made.local = leaf  # a leaf of autograd: no phase of the tape
            made.graph = self._graph
            if id(leaf) in self._holdings.models:
                self.models.add(self._holdings.models[id(leaf)])
            return self._remember(leaf, made)
        if self._known and (base := self._base_of(leaf)) is not None:
            is_moved = base.local is not None and base.local is not base.own
            if is_moved and base.needs_grad and leaf._base is not None:
                raise ModelError(
                    f"a view of {base!r} is read that was made before a value of another stage was written there: "
                    "gradients could not follow; make the view again (tensor[...]) after what is written"
                )
            return self.adopt(leaf, base.stage, base.phase)
        if self._axis.size > 1:
            check_no_stray(leaf)
        return leaf

    def stage_of(self, tensor: Tensor) -> int | None:
        """The stage where a tensor lives, None if on all ranks."""
        placed = self.placed(tensor)
        return placed.stage if isinstance(placed, Placeholder) else None

    def adopt(self, tensor: Tensor, stage: int, phase: object, *, is_trained: bool | None = None) -> Placeholder:
        """From now on, a tensor that all ranks have alike lives at a stage.

        Args:
            tensor: This rank's.
            stage: Where it lives.
            phase: Of the tape, that is being recorded.
            is_trained: Whether it needs a gradient; None if all ranks see that alike.
        """
        known = self._known.get(id(tensor))
        if known is not None:
            return known
        base = _lender(tensor)
        if base is not None:
            self.adopt(base, stage, phase, is_trained=is_trained)
        about = _described(tensor)
        if is_trained is not None:
            about = replace(about, needs_grad=is_trained)
        made = self._stand_for(about, stage)
        made.phase = phase
        if self._axis.rank == stage % self._axis.size:
            made.local = tensor
        if base is not None:
            made.share_memory_with(self._known[id(base)])
            if tensor._base is not None:
                made.needs_grad |= self._known[id(base)].needs_grad  # which its own rank alone would see
        self._holdings.settle(tensor, stage)
        return self._remember(tensor, made)

    def in_forward(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a model, which may go on with what others have written."""
        before, self._is_in_forward = self._is_in_forward, True
        try:
            return call(*args, **kwargs)
        finally:
            self._is_in_forward = before

    def forget(self, tensor: Tensor) -> None:
        """Look at a tensor anew when it is read again."""
        self._known.pop(id(tensor), None)

    def __bool__(self) -> bool:
        """Whether there are any, or what must not be read."""
        return bool(self._known) or are_strays()

    def clear(self) -> None:
        """Forget them."""
        self._known.clear()
        self._kept.clear()
        self.written_since = None

    def _check_read(self, leaf: Any) -> None:
        assert self.written_since is not None, "asked of such programs only"
        name = self.written_since(leaf.own if isinstance(leaf, Placeholder) else leaf)
        if name is not None:
            raise ModelError(
                f"{name!r} is read after a micro-batch's backward, but forwards of later micro-batches have written in "
                "it since: read it before backward, or have the forward return it"
            )

    def _base_of(self, tensor: Tensor) -> Placeholder | None:
        """What stands for the tensor whose memory this one shows, if something does."""
        base = _lender(tensor)
        while base is not None and id(base) not in self._known:
            base = _lender(base)
        return None if base is None else self._known[id(base)]

    def _stand_for(self, about: Described, stage: int) -> Placeholder:
        program = self._program()
        assert program is not None, "it asks"
        return Placeholder(about, stage, program, self._axis.device)

    def _remember(self, tensor: Tensor, made: Placeholder) -> Placeholder:
        self._known[id(tensor)], made.own = made, tensor
        self._kept.append(tensor)  # or another tensor could get its identity
        return made


def with_lender(function: object, args: Sequence[Any], result: Any) -> Any:
    """The result of an operation, which knows whose memory it shows if torch does not: that of `.data`, `.detach()`."""
    if function in _LENT_BY and args and type(result) is Tensor:
        result._tulle_lender = args[0]  # type: ignore[attr-defined]
    return result


def _described(tensor: Tensor) -> Described:
    """A tensor, as if on the device of its rank: where it does not live it is on none."""
    return replace(described(tensor), is_of_host=False)


def _lender(tensor: Tensor) -> Tensor | None:
    """The tensor whose memory another one shows."""
    return tensor._base if tensor._base is not None else tensor.__dict__.get("_tulle_lender")
