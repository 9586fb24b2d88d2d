"""The report of a run: the JSON files that a run left in its folder, drawn as one HTML page."""

from tulle.report.folder import read
from tulle.report.page import write
from tulle.report.records import Run
from tulle.report.summary import summarize

__all__ = ["Run", "read", "summarize", "write"]
