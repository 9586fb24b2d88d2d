"""`Prediction`: what a step under a plan is predicted to take, and how sure it is that no other plan takes less."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tulle.entries import Entries, finite

HANDICAP = 1.05
"""What a loop may notice that looks at gradients or parameters between steps, clipping say, must gain more than this:
updates that wait for reads are lost on it, and parameters that are shared out are not there."""
_HANDICAP = f"it must gain {HANDICAP - 1:.0%}, as loops that look at gradients or parameters (clipping, say) notice it"


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a plan was predicted to give when it was chosen.

    Args:
        batch: Samples of a step, of all replicas.
        ranks: Of the cluster.
        step_s: Seconds of a step.
        parts_s: Where the seconds of a step go: forward, backward, waiting, optimizer and other, as a report has them.
        links_s: Seconds that a rank's link is busy with each kind of traffic, beside computation or not.
        memory_bytes: By stage, what a rank needs.
        bound_s: No plan that was allowed takes less than this.
        runner_up: What the second best plan does otherwise.
        runner_up_s: What it takes; None if there is only one plan.
        binding: Which limit keeps it from being faster, a sentence.
        changes: What would change the choice, a sentence each.
        lookahead: Whether the loop was taken to go through `tulle.lookahead`.

    Example:
        >>> Prediction(32, 4, 0.1, {"forward": 0.1}, {}, (10**9,), bound_s=0.1).is_exact
        True
    """

    batch: int
    ranks: int
    step_s: float
    parts_s: Mapping[str, float] = field(hash=False)
    links_s: Mapping[str, float] = field(hash=False)
    memory_bytes: tuple[int, ...]
    bound_s: float
    runner_up: tuple[str, ...] = ()
    runner_up_s: float | None = None
    binding: str = ""
    changes: tuple[str, ...] = field(default=())
    lookahead: bool = False

    @property
    def is_exact(self) -> bool:
        """Whether no plan that was allowed is faster."""
        return self.bound_s >= self.step_s

    def explain(self) -> list[str]:
        """The forecast, the runner-up, what binds and what would change the choice, a line each."""
        told = "no plan is faster" if self.is_exact else f"no plan takes less than {ms(self.bound_s)}"
        memory = ", ".join(dict.fromkeys(map(_mib, self.memory_bytes)))
        ranks = "rank" if self.ranks == 1 else "ranks"
        samples = "sample" if self.batch == 1 else "samples"
        parts, links = (_told(by_name) for by_name in (self.parts_s, self.links_s))
        lines = [
            f"predicted: {ms(self.step_s)} a step of {self.batch:,} {samples} on {self.ranks} {ranks}; {told}",
            f"  of which {parts}",
            f"  links are busy with {links}" if links else "  nothing is sent",
            f"  memory of a rank: {memory}",
        ]
        if self.runner_up_s is not None:
            slower = self.runner_up_s / self.step_s - 1
            passed_over = f"; not taken: {_HANDICAP}" if slower < 0 else ""
            instead = "; ".join(self.runner_up) or "other buckets or cuts"
            lines.append(f"runner-up: {ms(self.runner_up_s)} ({slower:+.1%}): {instead}{passed_over}")
        if self.binding:
            lines.append(f"binding: {self.binding}")
        return lines + [f"would change: {change}" for change in self.changes]

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @staticmethod
    def from_json(parsed: Mapping[str, Any], path: str = "prediction") -> Prediction:
        """From plain values, checked.

        Args:
            parsed: Plain values.
            path: Where they stand in a plan.

        Raises:
            PlanError: Naming the entry that is wrong, and where it stands.
        """
        entries = Entries.of(parsed, path, Prediction)
        if not finite(entries.number("step_s")):
            raise entries.wrong("step_s", "a time")
        return Prediction(
            batch=entries.whole("batch"),
            ranks=entries.whole("ranks", least=1),
            step_s=entries.number("step_s"),
            parts_s=entries.numbers("parts_s"),
            links_s=entries.numbers("links_s"),
            memory_bytes=entries.list_of("memory_bytes", int),
            bound_s=entries.number("bound_s"),
            runner_up=entries.list_of("runner_up", str),
            runner_up_s=None if parsed.get("runner_up_s") is None else entries.number("runner_up_s"),
            binding=entries.text("binding", default=""),
            changes=entries.list_of("changes", str),
            lookahead=entries.flag("lookahead") if "lookahead" in parsed else True,  # as older versions took it
        )


def ms(seconds: float) -> str:
    """A time as people read it, in milliseconds below a second.

    Example:
        >>> ms(0.01234), ms(2.5)
        ('12.3 ms', '2.5 s')
    """
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


MOST_NAMED = 4
"""Of more names than this the first ones are told, and how many there are besides."""


def some(names: Sequence[str]) -> str:
    """Names in a sentence: all, or the first ones and how many more there are.

    Example:
        >>> some(["a", "b"]), some([f"tables.{number}" for number in range(26)])
        ('a, b', 'tables.0, tables.1, tables.2 and 23 others')
    """
    shown = names if len(names) <= MOST_NAMED else names[: MOST_NAMED - 1]
    return ", ".join(shown) + (f" and {len(names) - len(shown)} others" if len(shown) < len(names) else "")


def _mib(size_bytes: int) -> str:
    mib = size_bytes / 2**20
    return f"{mib:,.0f} MiB" if mib >= 10 else f"{mib:.1f} MiB" if mib >= 1 else f"{size_bytes / 2**10:,.1f} KiB"


def _told(by_name: Mapping[str, float]) -> str:
    """The longest first; what takes nothing is left out."""
    longest_first = sorted(by_name.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {ms(seconds)}" for name, seconds in longest_first if seconds > 0)
