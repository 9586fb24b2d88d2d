"""Pure simulation: a training step as tasks on a mesh, and how long it takes on ranks that nobody has to have."""

from tulle.simulate.clusters import Change, another
from tulle.simulate.forecast import Forecast, Span
from tulle.simulate.law import Law
from tulle.simulate.noise import Noise, Stragglers
from tulle.simulate.run import run
from tulle.simulate.streams import law_of, looks
from tulle.simulate.sweep import Point, Weather, changes, sweep
from tulle.simulate.task import Step, Task
from tulle.simulate.trace import telling_ranks, trace

__all__ = [
    "Change",
    "Forecast",
    "Law",
    "Noise",
    "Point",
    "Span",
    "Step",
    "Stragglers",
    "Task",
    "Weather",
    "another",
    "changes",
    "law_of",
    "looks",
    "run",
    "sweep",
    "telling_ranks",
    "trace",
]
