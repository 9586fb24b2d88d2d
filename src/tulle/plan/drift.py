"""`Drift`: whether steps take what the plan's prediction says, watched while they run."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from tulle.plan.plan import Plan
from tulle.plan.prediction import ms

WATCHED_STEPS = 50
"""A plan is judged by the median of so many steps."""
TOLERANCE = 1.25
"""A step may take so many times what was predicted, or be as many times faster."""


@dataclass(slots=True)
class Drift:
    """Compares the steps of a run with what its plan predicts.

    Args:
        predicted_s: Of a step.
        samples: With which the model is called in such a step, on each replica; 0 if nobody knows.

    Example:
        >>> drift = Drift(predicted_s=0.1)
        >>> words = [drift.note(0.2) for _ in range(50)]
        >>> words[-1]
        'the plan predicted 100 ms a step, the last 50 took 200 ms (+100%): profile anew and make another plan'
    """

    predicted_s: float
    samples: int = 0
    _steps_s: deque[float] = field(init=False, default_factory=lambda: deque(maxlen=WATCHED_STEPS))
    _called: deque[int] = field(init=False, default_factory=lambda: deque(maxlen=WATCHED_STEPS))
    """Samples of each of these steps."""
    _open: int = field(init=False, default=0)
    """Samples of the step under way."""
    _is_told: bool = field(init=False, default=False)

    @staticmethod
    def of(plan: Plan) -> Drift | None:
        """For a plan, or None if it predicts nothing."""
        if plan.prediction is None:
            return None
        return Drift(plan.prediction.step_s, plan.prediction.batch // plan.mesh.get("data", 1))

    @property
    def is_off(self) -> bool:
        """Whether the last steps, if there were enough, are off."""
        if len(self._steps_s) < WATCHED_STEPS:
            return False
        low, high = sorted((median(self._steps_s), self.predicted_s))
        return high > TOLERANCE * low

    def called(self, samples: int) -> None:
        """Take note of a call of the model, for training, within the step under way."""
        self._open += samples

    def note(self, step_s: float) -> str | None:
        """Take note of a step; what there is to say, once."""
        self._steps_s.append(step_s)
        self._called.append(self._open)
        self._open = 0
        if self._is_told or not self.is_off:
            return None
        self._is_told = True
        took_s, called = median(self._steps_s), round(median(self._called))
        if are_apart(called, self.samples):
            samples = "sample" if self.samples == 1 else "samples"
            return (
                f"the plan predicted {ms(self.predicted_s)} a step of {self.samples:,} {samples} a replica, the last "
                f"{WATCHED_STEPS} were of {called:,} and took {ms(took_s)}: give, as sample=, a batch as steps have it"
            )
        return (
            f"the plan predicted {ms(self.predicted_s)} a step, the last {WATCHED_STEPS} took {ms(took_s)} "
            f"({took_s / self.predicted_s - 1:+.0%}): profile anew and make another plan"
        )


def are_apart(samples: float, predicted: float) -> bool:
    """Whether steps are so much larger or smaller than those of a prediction that it says nothing of them.

    Example:
        >>> are_apart(70, 64), are_apart(16, 64), are_apart(0, 64)
        (False, True, False)
    """
    low, high = sorted((samples, predicted))
    return low > 0 and high > TOLERANCE * low
