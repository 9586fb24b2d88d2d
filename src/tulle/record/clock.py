"""`StepClock`: how long the parts of a training step took, and what was sent and waited for meanwhile."""

from __future__ import annotations

from typing import Any

from tulle.comm import now_s, traffic

WAITS: tuple[str, ...] = ("forward_wait_s", "backward_wait_s", "optimizer_wait_s")
"""What of `wait_s` was in these parts of a step; the rest was between them."""


class StepClock:
    """Hears where forwards and optimizers begin and end, and gives the numbers of each step.

    A step lasts from the end of the one before to its own. Its backward lasts from the end of the last forward to the
    beginning of the first optimizer.

    Example:
        >>> clock = StepClock()
        >>> clock.begin_forward()
        >>> clock.end_forward()
        >>> clock.begin_optimizer()
        >>> clock.end_optimizer("SGD")
        >>> numbers = clock.end_step()
        >>> sorted(name for name in numbers if name.endswith("ward_s"))
        ['backward_s', 'forward_s']
    """

    def __init__(self) -> None:
        self._began_s = self._forward_began_s = self._backward_began_s = self._optimizer_began_s = now_s()
        self._waited_s = self._looked_at_s = traffic.wait_s
        """What this process had waited in all when the step began, and when a part of it last began or ended."""
        self._bytes_sent = self._messages = 0
        """What it had sent in all when the step began; what was sent before the first step belongs to that."""
        self._begin_step()

    def _begin_step(self) -> None:
        self._forward_s = self._optimizer_s = 0.0
        self._backward_s: float | None = None
        self._waits_s = dict.fromkeys(WAITS, 0.0)

    def begin_forward(self) -> None:
        """A forward begins, of an evaluation too."""
        self._looked_at_s = traffic.wait_s
        self._forward_began_s = now_s()

    def end_forward(self) -> None:
        """A forward of training has ended, and its backward begins."""
        ended_s = now_s()
        traffic.span("computation", "forward", self._forward_began_s, ended_s)
        self._forward_s += ended_s - self._forward_began_s
        self._waited_in("forward_wait_s")
        self._backward_began_s = ended_s

    def begin_optimizer(self) -> None:
        """An optimizer begins to step; with the first one after a forward backward has ended."""
        self._optimizer_began_s = now_s()
        if self._backward_s is None and self._forward_s:
            self._backward_s = self._optimizer_began_s - self._backward_began_s
            traffic.span("computation", "backward", self._backward_began_s, self._optimizer_began_s)
            self._waited_in("backward_wait_s")
        self._looked_at_s = traffic.wait_s

    def end_optimizer(self, name: str) -> None:
        """An optimizer has stepped."""
        ended_s = now_s()
        traffic.span("computation", f"{name}.step", self._optimizer_began_s, ended_s)
        self._optimizer_s += ended_s - self._optimizer_began_s
        self._waited_in("optimizer_wait_s")

    def _waited_in(self, part: str) -> None:
        """What was waited for since the last look at it belongs to a part of the step."""
        self._waits_s[part] += traffic.wait_s - self._looked_at_s
        self._looked_at_s = traffic.wait_s

    def end_step(self) -> dict[str, Any]:
        """The numbers of the step that ends now, as its line has them; the next one begins."""
        ended_s, waited_s = now_s(), traffic.wait_s
        bytes_sent, messages = traffic.total.bytes_sent, traffic.total.messages
        numbers = {
            "step_s": ended_s - self._began_s,
            "forward_s": self._forward_s,
            **({} if self._backward_s is None else {"backward_s": self._backward_s}),
            "optimizer_s": self._optimizer_s,
            "wait_s": waited_s - self._waited_s,
            **self._waits_s,
            "bytes_sent": bytes_sent - self._bytes_sent,
            "messages": messages - self._messages,
        }
        self._began_s, self._waited_s, self._bytes_sent, self._messages = ended_s, waited_s, bytes_sent, messages
        self._begin_step()
        return numbers
