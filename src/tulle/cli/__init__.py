"""The commands: `tulle run`, `profile`, `plan`, `explain`, `simulate`, `report` and `doctor`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 done, 1 failed, 2 wrong usage, 130 interrupted.

    Args:
        arguments: The words after `tulle`; those of this process by default.
    """
    if not all(map(find_spec, ("typer", "rich"))):
        print('The command needs two more packages: pip install "tulle[cli]"', file=sys.stderr)
        return 2
    from tulle.cli.app import execute  # only now, because it imports typer and rich

    return execute(sys.argv[1:] if arguments is None else arguments)
