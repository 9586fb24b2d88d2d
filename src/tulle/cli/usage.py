"""`UsageError`: a command line that cannot be carried out as it stands."""

from __future__ import annotations

from tulle.errors import TulleError


class UsageError(TulleError, ValueError):
    """The words after `tulle` do not fit: the command ends with exit code 2 before anything was started."""
