"""`Views`: what forwards leave on modules is each micro-batch's own, for as long as it runs.

While one waits in its backward, forwards of others leave theirs. So each finds, when it goes on, what it left; one that
begins finds what the forward of the one before it has left, and the step ends with what the last one has.

What a micro-batch sets after its backward of what forwards set, too, the next one would see in one process. Whether a
step function does so its first micro-batch shows, which runs alone; if it does, all run one after the other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from tulle.errors import ModelError
from tulle.pipeline.left_behind import Key, LeftBehind
from tulle.pipeline.remembered import Remembered
from tulle.pipeline.turn import Turn

logger = logging.getLogger("tulle")
View = dict[Key, Remembered]


class Views:
    """Those of all programs of a step; one serves all steps, one after the other."""

    def __init__(self) -> None:
        self._begin_with(None, ())

    def _begin_with(self, function: object, models: Sequence[LeftBehind]) -> None:
        self._function, self._models = function, models
        self._views: dict[int, View] = {}
        """Of micro-batches under way that do not run now."""
        self._last: View | None = None
        """What the one that began last has left at its end."""
        self._newest = -1
        self._base: View = {}
        """What the one that runs found after its backward."""
        self._is_first = any(function not in model.seen for model in models)
        self._is_trial = False
        """Whether the first micro-batch is to end before others begin."""
        self._is_clashing = False
        """Whether each is to end before the next begins."""

    @contextmanager
    def step(
        self,
        function: Callable[..., Any],
        models: Sequence[LeftBehind],
        generators: Sequence[Any],
        is_any: Callable[[bool], bool],
        *,
        asks_peers: bool,
    ) -> Iterator[None]:
        """The step that runs within this context.

        Args:
            function: The step's.
            models: All, if forwards are to end before others begin, because they keep something; the same on all ranks.
            generators: That the function may draw from.
            is_any: Whether something is so on any rank that is to come to the same order.
            asks_peers: Whether there are such ranks.
        """
        self._begin_with(_named(function), models)
        self._is_trial = self._is_first and asks_peers
        if models:
            self._is_clashing = is_any(any(self._function in model.clashing for model in models))
        for number, model in enumerate(models):
            model.begin(generators if number == 0 else (), is_whole=self._is_first)
        try:
            yield
            for model in models:
                model.seen.add(self._function)
        finally:
            self._put_back(self._views.get(self._newest, self._last))
            for model in models:
                model.end()
            self._begin_with(None, ())

    @property
    def is_alone(self) -> bool:
        """Whether a micro-batch is to end before the next begins."""
        return self._is_trial or self._is_clashing

    def begin(self, turn: Turn) -> None:
        """A program begins."""
        if self._models:
            self._put_back(self._views.get(self._newest, self._last))
            self._newest = turn.micro_batch

    def look(self, turn: Turn) -> None:
        """A program stops: see what its forward has left, and whether it has set some of that after its backward."""
        if not self._models or turn.in_backward:
            return
        if _is_past(turn):
            self._check(turn)
            return
        if turn.micro_batch == 0 and (turn.is_at_backward or self._is_first):
            for model in self._models:
                model.look()
        if turn.is_at_backward:
            if turn.micro_batch == 0:
                self._is_trial |= any(model.is_left and self._function not in model.tried for model in self._models)
            counts = [model.buffers.now() for model in self._models]
            turn.program.adopted.written_since = partial(self._written_since, turn, counts) if any(counts) else None

    def leave(self, turn: Turn) -> None:
        """A program gives way to another."""
        if self._models:
            is_known = _is_past(turn) and not turn.in_backward  # by `look`, a moment ago
            self._views[turn.micro_batch] = self._base if is_known else self._now()

    def enter(self, turn: Turn) -> None:
        """A program goes on."""
        if self._models:
            self._base = self._views.pop(turn.micro_batch)
            self._put_back(self._base)

    def pass_backward(self, turn: Turn) -> None:
        """A program goes on after its backward."""
        self._base = self._now() if self._models and _is_past(turn) else {}

    def end(self, turn: Turn) -> None:
        """A program is over."""
        if not self._models:
            return
        self.look(turn)
        if turn.micro_batch == self._newest:
            self._last = self._now()
        if turn.micro_batch == 0 and self._is_trial:
            self._is_trial = False
            for model in self._models:
                model.tried.add(self._function)

    def _check(self, turn: Turn) -> None:
        """See whether a program has set, after its backward, what forwards set, too; refuse it if some ran since."""
        now = self._now()
        changed = [
            spot.label
            for model in self._models
            for key, (spot, before) in model.spots.items()
            if spot.is_common and not now[key].is_like(self._base.get(key, before))
        ]
        self._base = now
        if not changed or self._is_clashing:
            return
        if turn.micro_batch < self._newest:
            raise ModelError(
                f"micro-batch {turn.micro_batch} sets {_listed(changed)} after its backward, which forwards set, too, "
                "and the first micro-batch that ran did not: forwards of later ones, which were to find that, have run "
                "by now; set it before the forward, in it, or between steps"
            )
        self._is_clashing = True
        for model in self._models:
            model.clashing.add(self._function)
        logger.warning(
            "a step sets %s after its backward, which forwards set, too: each micro-batch ends before the next "
            "begins, so that stages wait for each other; set it before the forward, or in it",
            _listed(changed),
        )

    def _written_since(self, turn: Turn, counts: Sequence[Sequence[int]], tensor: object) -> str | None:
        """The name of a tensor in which forwards of later micro-batches have written."""
        if turn.micro_batch >= self._newest:
            return None
        names = (model.buffers.written_since(tensor, one) for model, one in zip(self._models, counts, strict=True))
        return next(filter(None, names), None)

    def _now(self) -> View:
        return {key: spot.now() for model in self._models for key, (spot, _) in model.spots.items()}

    def _put_back(self, view: View | None) -> None:
        if view is not None:
            for model in self._models:
                for key, (spot, before) in model.spots.items():
                    view.get(key, before).put_back(spot.holder, spot.name)


def _is_past(turn: Turn) -> bool:
    """Whether a program has come past its first backward."""
    return turn.backwards > 1 or (turn.backwards == 1 and not turn.is_at_backward and not turn.in_backward)


def _named(function: Any) -> object:
    """What stays the same of a step function that is made anew for each step."""
    inner = getattr(function, "func", function)
    return getattr(inner, "__code__", type(inner))


def _listed(names: Sequence[str]) -> str:
    """Some names."""
    return ", ".join(map(repr, names[:3])) + (", ..." if len(names) > 3 else "")
