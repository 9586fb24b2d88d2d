"""What `tulle run` records of each rank: one JSON line a step, the plan, and, on request, a timeline."""

from tulle.record.clock import WAITS
from tulle.record.recorder import PREVIOUS, STOP_AFTER, TIMELINE, Recorder, current, log

__all__ = ["PREVIOUS", "STOP_AFTER", "TIMELINE", "WAITS", "Recorder", "current", "log"]
