"""`Inside`: what of a program runs on this rank alone, as in one process: a module, an operation or backward."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import Any
from weakref import WeakMethod

import torch

from tulle.errors import ModelError
from tulle.pipeline.operation import Call
from tulle.pipeline.outcome import versions_of
from tulle.pipeline.past_arguments import written_past
from tulle.pipeline.placeholder import Placeholder
from tulle.pipeline.structure import flatten, rebuild
from tulle.pipeline.switches import Checks
from tulle.pipeline.values import Values


class Inside:
    """Of one program.

    Args:
        values: Of the program.
        need: Of the program: notes that gradients go back to an earlier call, if they do; whether that is news.
    """

    def __init__(self, values: Values, need: Callable[[Placeholder], bool]) -> None:
        self._values, self._need = values, WeakMethod(need)  # of what has this one
        self.name: str | None = None
        """What runs; None between these."""
        self._raised: Exception | None = None
        self._call: Call | None = None
        self._token: Token[Inside | None] | None = None
        self._checks = Checks()

    def begin(self, name: str, call: Call | None = None) -> None:
        """Something begins, in this thread.

        Args:
            name: Of it.
            call: Its call, unless it is a backward.
        """
        self.name, self._call, self._token = name, call, at_work.set(self)
        self._checks.begin()

    def end(self) -> None:
        """It is over."""
        assert self._token is not None, "it has begun"
        self._checks.end()
        at_work.reset(self._token)
        self.name, self._call, self._token = None, None, None

    def note_raised(self, call: Call, error: Exception) -> None:
        """Within a step, a call has raised that, of which other ranks are told where the step ends."""
        if call.unit is not None and self._values.holdings.mailbox.axis.size > 1:
            self._raised = error

    def check_goes_on(self) -> None:
        """Refuse to go on behind an error that code between modules has caught, and that other ranks did not have."""
        if self._raised is not None:
            raise ModelError(
                f"a step goes on though a placed module raised {self._raised!r}, which other ranks did not have, so "
                "that they would run something else: catch it inside the module, or outside of the step"
            ) from self._raised

    def operate(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A placeholder has reached what runs past its arguments: by a closure, or an attribute of some object."""
        leaves, spec = flatten((args, kwargs))
        earlier: list[Any] = []
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, Placeholder):
                is_of_now = leaf.phase is self._values.tape.phase
                leaves[number] = self._native(leaf, function)
                earlier += [] if is_of_now else [leaves[number]]
        versions = versions_of(earlier)
        args, kwargs = rebuild(spec, leaves)
        result = function(*args, **kwargs)
        if torch.is_grad_enabled() and versions_of(earlier) != versions:
            raise written_past(earlier[0])
        return result

    def _native(self, leaf: Placeholder, function: Callable[..., Any]) -> Any:
        if self._call is not None:
            self._call.read(leaf)
        if leaf.local is None:
            raise ModelError(
                f"the operation {getattr(function, '__name__', function)!r} in {self.name!r} reads {leaf!r}, which "
                "lives at another stage, and which the module was not given as an argument: pass it as one, or place "
                "both at one stage"
            )
        self._check_closure(leaf)
        return self._values.native(leaf)

    def _check_closure(self, leaf: Placeholder) -> None:
        """Only this rank knows that a gradient is to go back to an earlier call: the others would not walk it."""
        if torch.is_grad_enabled() and self.name != "backward" and self._is_news(leaf):
            raise ModelError(
                f"{self.name!r} reads {leaf!r}, which an earlier call of the model made, and which the module was "
                "not given as an argument: pass it as one, or detach it"
            )

    def _is_news(self, leaf: Placeholder) -> bool:
        need = self._need()
        assert need is not None, "its program runs"
        return need(leaf)


at_work: ContextVar[Inside | None] = ContextVar("at_work", default=None)
"""What this thread runs so: it may read what an earlier program has made."""
