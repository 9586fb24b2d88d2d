"""`UnitCall`: one call of a placed module, with the lists, dictionaries and objects that the module may fill."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from tulle.pipeline.aliases import as_before, pattern_of
from tulle.pipeline.asking import Asked
from tulle.pipeline.filled import can_be_filled, changeable_in, fill, unmarked, with_filled
from tulle.pipeline.held import Settled
from tulle.pipeline.holdings import Holdings, Unit
from tulle.pipeline.objects import Wanted, lent, taken, telling
from tulle.pipeline.operation import Call
from tulle.pipeline.outcome import Constant, Outcome
from tulle.pipeline.past_arguments import absent_refused, cut_where_reached
from tulle.pipeline.placeholder import Placeholder
from tulle.pipeline.recompute import as_checkpointed, is_checkpointed
from tulle.pipeline.strays import strays_noted
from tulle.pipeline.structure import LEAF_KINDS, flatten_call, rebuild
from tulle.pipeline.tape import Tape
from tulle.pipeline.values import Values


class UnitCall(Call):
    """A call of a placed module.

    Args:
        unit: The module.
        caller: What runs it.
        args: Its arguments, and
        kwargs: those by name.
        placed: Gives the placeholder that stands for a tensor with an owner.
        held: What objects were seen to hold, by their identity.
    """

    def __init__(
        self,
        unit: Unit,
        caller: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        placed: Callable[[Any], Any],
        held: dict[int, tuple[Any, Settled]],
    ) -> None:
        leaves, spec = flatten_call(args, kwargs)
        self._args, self._kwargs, self._is_open = args, kwargs, can_be_filled(spec)
        self.given = lent(leaves, held)
        """The objects among the arguments."""
        if self.given is not None:
            leaves, caller = self.given.leaves, self.given.around(caller, args, kwargs)
        self._is_prepared = False
        super().__init__(caller, list(map(placed, leaves)), spec, unit.name, unit)

    def is_plain(self, tape: Tape, *, is_first: bool) -> bool:
        """Whether nothing of what `prepare` puts around the module is needed."""
        assert self.unit is not None, "it is a call of one"
        if self._is_open or self.unit.attributes.shown or self.unit.has_inner_hooks or is_checkpointed():
            return False
        is_uncut = is_first or len(tape.phases) == 1 or not torch.is_grad_enabled()
        return is_uncut and LEAF_KINDS.issuperset(map(type, self.leaves))

    def prepare(self, tape: Tape, *, is_first: bool, holdings: Holdings | None) -> None:
        """It is about to run here, where what the module gives is told, and what it reads is watched."""
        assert self.unit is not None, "it is a call of one"
        if self._is_prepared:
            return
        self._is_prepared = True
        function = self.function if holdings is None else absent_refused(self.function, self.unit, holdings)
        function = as_checkpointed(strays_noted(function, self.unit), self.unit.module)
        if self._is_open:
            function = as_before(with_filled(function), pattern_of((self._args, self._kwargs)))
        function = telling(function, self.unit.module, self.given)
        self.function = cut_where_reached(function, self.unit, self.leaves, tape, is_first=is_first)

    @property
    def placeholders(self) -> list[Placeholder]:
        """Its arguments that live on one rank, then those of what objects hold that the module reads, as it asks.

        In that order they travel, also where what it asks for is known before, as it may be on some ranks only.
        """
        if self.given is None:
            return super().placeholders
        asked = [self.leaves[number] for number in self.given.brought]
        return [leaf for leaf in [*self.leaves[self.given.count :], *asked] if isinstance(leaf, Placeholder)]

    @property
    def about(self) -> Hashable:
        """All of its objects that its outcome can depend on; None if it is given none."""
        return None if self.given is None else self.given.about

    def wanted(self, outcome: Outcome | None) -> Wanted | None:
        """What of its objects is to be brought before it runs, if that is known.

        Args:
            outcome: What is known of its outcome.
        """
        if self.given is not None:
            self.given.may_ask = outcome is None or outcome.varies
        if outcome is None or len(outcome.results) != 1 or not isinstance(outcome.results[0], Constant):
            return None
        value = outcome.results[0].value
        return value if isinstance(value, Wanted) else None

    def natives(self, values: Values, stage: int | None) -> list[Any]:
        """Its arguments as tensors, as far as they have come; None for what of its objects stays a placeholder."""
        given = self.given
        if given is None:
            return super().natives(values, stage)
        read = {id(leaf) for leaf in self.placeholders}
        given.unread, given.absent = {}, set()
        phase, is_graded = values.tape.phase, torch.is_grad_enabled()
        natives: list[Any] = []
        for number, leaf in enumerate(self.leaves):
            native = leaf
            if isinstance(leaf, Placeholder):
                is_of_now = not is_graded or not leaf.needs_grad or leaf.phase is None or leaf.phase is phase
                is_here = values.is_here(leaf) if stage is None else leaf.stage == stage
                if id(leaf) in read or (is_here and is_of_now):
                    native = values.native(leaf)
                else:
                    given.unread[id(leaf)], native = number, None
                    if not is_here:
                        given.absent.add(id(leaf))
            natives.append(native)
        return natives

    def arguments(self, natives: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What it is called with."""
        if self.given is None:
            return super().arguments(natives)
        count, unread = self.given.count, self.given.unread
        held = zip(self.leaves[:count], natives, strict=False)
        self.given.inside = [leaf if native is None and id(leaf) in unread else native for leaf, native in held]
        return rebuild(self.spec, natives[count:])

    def read(self, leaf: Placeholder) -> None:
        """The module reads what stayed a placeholder.

        Raises:
            Asked: If that is not here: the module is to run again when it is.
        """
        if self.given is not None and id(leaf) in self.given.absent:
            raise Asked(self.given.unread[id(leaf)])

    def finish(self, result: Any) -> Any:
        """What the module gives, once its lists, dictionaries and objects hold what it put there. On every rank."""
        result = taken(result, self.given, self.leaves)
        filled = None
        if self._is_open:
            result, filled = result
            result = unmarked(result, changeable_in((self._args, self._kwargs)))
        if self.given is not None:
            result, changes = result
            self.given.change(changes)
        if filled is not None:
            fill((self._args, self._kwargs), filled)
        return result
