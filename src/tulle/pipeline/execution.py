"""`Execution`: runs a call of a module or an operation on the rank of its stage, as one process would."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from tulle.pipeline.holdings import Holdings, Known
from tulle.pipeline.in_place import check_written, put_back, unseen_refused
from tulle.pipeline.inside import Inside
from tulle.pipeline.objects import told
from tulle.pipeline.operation import Call, check_family, check_nested
from tulle.pipeline.outcome import Described, Outcome, describe, is_own, untrained_of, versions_of, with_marked
from tulle.pipeline.randomness import forked_generators, forked_python, forked_torch, seed_of, seed_of_numbers
from tulle.pipeline.recompute import outside_of_checkpoint
from tulle.pipeline.values import Values

_NOTHING = nullcontext()


class Execution:
    """Of the calls of one program.

    Args:
        values: Of the program.
        holdings: What lives where.
        inside: Is told what runs.
        seed: Of the program's random numbers.
        is_by_stage: Whether each stage of this rank reads what was brought to it alone, as if it had a rank of its own.
    """

    def __init__(self, values: Values, holdings: Holdings, inside: Inside, *, seed: int, is_by_stage: bool) -> None:
        self._values, self._holdings, self._inside = values, holdings, inside
        self._seed, self._is_by_stage, self._rank = seed, is_by_stage, holdings.mailbox.axis.rank

    def run(
        self, call: Call, stage: int, outcome: Outcome | None, number: int, known: Known | None
    ) -> tuple[Outcome, list[Any]]:
        """Run one whose place is this rank.

        Args:
            call: It; what it reads has come.
            stage: Where it runs.
            outcome: What is known of its outcome.
            number: Of the call, among those of its module or operation.
            known: Of a module's calls such as this one.

        Returns:
            Its outcome, and the leaves of what it gives.
        """
        only = None if known is None or known.draws is not False or outcome is None else outcome.only
        if only is not None and not self._is_by_stage and call.is_plain(self._values.tape, is_first=number == 1):
            return self._again(call, outcome, only, number)
        is_new = outcome is None or outcome.varies
        call.prepare(self._values.tape, is_first=number == 1, holdings=self._holdings if is_new else None)
        if known is None and (target := call.written(outcome)) is not None:
            check_family(call.leaves[target], self._values.tape.phase, by=call.name)  # now that what it reads has come
        natives = call.natives(self._values, stage if self._is_by_stage else None)
        versions = versions_of(natives)
        seed = self._seed_of(call, number)
        if call.unit is None:
            seen, values = describe(self._execute(call, natives, seed, known), natives, versions)
        else:
            attributes, rank_of = call.unit.attributes, self._values.rank_of
            watched = unseen_refused(call, natives, self._rank, rank_of) if outcome is None else _NOTHING
            with attributes.of_its_own(), watched:
                before, untrained = (attributes.all(), untrained_of(natives)) if is_new else ({}, [])
                seen, values = describe(self._execute(call, natives, seed, known), natives, versions)
                if is_new:
                    seen = with_marked(attributes.with_left(seen, before, values), natives, untrained)
        self._see(call, natives, seen, values, outcome)
        return seen, values

    def _again(self, call: Call, outcome: Outcome | None, only: Described, number: int) -> tuple[Outcome, list[Any]]:
        """Run a module of which it is known that it gives one tensor, and does nothing else.

        It is what `run` comes to then, with few calls: behind a module the caches are cold, and each costs what ten do.
        """
        assert outcome is not None, "it has the tensor"
        natives = call.natives(self._values, None)
        versions = versions_of(natives)
        args, kwargs = call.arguments(natives)
        self._inside.begin(call.name, call)
        try:
            with forked_torch(self._seed_of(call, number)):
                result = call.function(*args, **kwargs)
        finally:
            self._inside.end()
        if is_own(result, only, natives) and versions_of(natives) == versions:
            return outcome, [result]
        seen, values = describe(told(result), natives, versions)
        self._see(call, natives, seen, values, outcome)
        return seen, values

    def _seed_of(self, call: Call, number: int) -> int:
        """Of the random numbers of a call."""
        if call.unit is None:
            return seed_of(self._seed, call.name, number)
        return seed_of_numbers(self._seed, call.unit.salt, number)

    def _see(self, call: Call, natives: list[Any], seen: Outcome, values: list[Any], outcome: Outcome | None) -> None:
        """A call has run: refuse what it must not have done, and have placeholders stand for what it did."""
        if call.unit is not None:
            check_written(call, seen, outcome, self._rank, self._values.rank_of)
        check_nested(call.name, values)
        put_back(call, natives, seen, self._values.tape.phase)

    def _execute(self, call: Call, natives: list[Any], seed: int, known: Known | None) -> Any:
        """Run a module or an operation as in one process."""
        args, kwargs = call.arguments(natives)
        self._inside.begin(call.name, call)
        python = forked_python(known, seed) if known is not None else _NOTHING
        try:
            with outside_of_checkpoint(), forked_torch(seed), python, forked_generators(natives, seed):
                return call.function(*args, **kwargs)
        finally:
            self._inside.end()
