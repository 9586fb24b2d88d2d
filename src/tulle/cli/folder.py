"""`RunFolder`: the folder of one run, and where torchrun is told to put what the ranks write."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, Std

from tulle import __version__
from tulle.allowance import cores
from tulle.cli.rank import write_json
from tulle.environment import RUN_DIR
from tulle.profiling import PROFILE
from tulle.record import PREVIOUS


@dataclass(frozen=True, slots=True)
class Description:
    """What `run.json` says of a run before it has begun.

    Args:
        command: The script and its arguments.
        hosts: The machines.
        settings: Environment variables that every rank gets.
    """

    command: list[str]
    hosts: list[str]
    settings: Mapping[str, str] = field(default_factory=dict)


class RunFolder(LogsSpecs):
    """The folder of one run; torchrun asks it for each rank's log and environment.

    Args:
        path: The folder; made if it is not there.
        description: What is run.
    """

    def __init__(self, path: Path, description: Description) -> None:
        self.path = path.absolute()
        self.logs: dict[int, Path] = {}
        """Log of each rank on this machine, of the latest attempt."""
        self.attempts: list[Path] = []
        """Log of rank 0, if it runs on this machine, of every attempt."""
        self.processes = 0
        """Number of ranks on all machines, 0 until they have met."""
        self._description = description
        self.started = datetime.now(UTC)
        self._log_folder = self.path / "logs"
        self._log_folder.mkdir(parents=True, exist_ok=True)
        super().__init__(str(self._log_folder), redirects=Std.ALL)
        for left in self.path.glob("failure-rank-*.json"):  # of an earlier run in the same folder
            left.unlink(missing_ok=True)

    @property
    def root_log_dir(self) -> str:
        """The folder of the logs, as torchrun's messages name it."""
        return str(self._log_folder)

    @property
    def leads(self) -> bool:
        """Whether rank 0 runs on this machine, which then writes the summary and the report."""
        return 0 in self.logs

    @property
    def profile(self) -> Path | None:
        """Where the profile will be, if the ranks are asked for one."""
        name = self._description.settings.get(PROFILE)
        return None if name is None else self.path / name

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Name each rank's log and complete its environment; torchrun calls it before each attempt."""
        logs: dict[int, Path] = {}
        stdouts: dict[int, str] = {}
        errors: dict[int, str] = {}
        for local_rank, environment in envs.items():
            rank = int(environment["RANK"])
            self.processes = int(environment["WORLD_SIZE"])
            attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
            name = f"rank-{rank}" if attempt == "0" else f"rank-{rank}.restart-{attempt}"
            log = logs[rank] = self._log_folder / f"{name}.log"
            stdouts[local_rank] = str(log)
            error_file = self._log_folder / f"{name}.error.json"
            for left in (log, error_file):  # of an earlier run in the same folder
                left.unlink(missing_ok=True)
            errors[local_rank] = environment["TORCHELASTIC_ERROR_FILE"] = str(error_file)
            environment |= {RUN_DIR: str(self.path), **self._description.settings}
        self.logs = logs
        if self.leads:
            self.attempts.append(logs[0])
            self._describe()
        first_attempt = all(one.get("TORCHELASTIC_RESTART_COUNT", "0") == "0" for one in envs.values())
        if first_attempt:
            self._put_by_earlier_records()
        # A rank joins its stderr to stdout itself: two descriptors of one file would write over each other.
        return LogsDest(stdouts, dict.fromkeys(envs, ""), error_files=errors)

    def _put_by_earlier_records(self) -> None:
        """A run that starts anew must not add to an earlier one's record; one that resumes takes up its own again."""
        for record in self._of_our_ranks("rank-*.jsonl"):
            if record.stat().st_size:  # what fell before its first step has nothing to take up
                record.replace(record.with_name(f"{PREVIOUS}{record.name}"))
        for timeline in self._of_our_ranks("timeline-rank-*.json"):
            timeline.unlink(missing_ok=True)
        if self.leads:  # else they would be taken for this script's, if that makes none
            told = [self.path / "mesh.json", self.path / "plan.json", *([self.profile] if self.profile else [])]
            for made in told:
                if made.is_file() and str(made) not in self._description.settings.values():  # as `--plan` names one
                    made.replace(made.with_name(f"{PREVIOUS}{made.name}"))

    def _of_our_ranks(self, pattern: str) -> list[Path]:
        """What an earlier run left of this machine's ranks; if it leads, also of ranks that are no more."""
        found = [(path.stem.rpartition("-")[2], path) for path in self.path.glob(pattern)]
        ranks = [(int(rank), path) for rank, path in found if rank.isdecimal()]
        return [path for rank, path in ranks if rank in self.logs or (self.leads and rank >= self.processes)]

    def _describe(self) -> None:
        description = {
            "format": 1,
            "tulle": __version__,
            "torch": torch.__version__.split("+")[0],
            "python": platform.python_version(),
            "started": self.started.isoformat(timespec="seconds"),
            "command": self._description.command,
            "processes": self.processes,
            "hosts": self._description.hosts,
            "cores": cores(),
        }
        write_json(self.path / "run.json", description)


def default_path(script: str) -> Path:
    """`runs/<name of the script>-<time>`.

    Example:
        >>> default_path("examples/01_translate.py").parent.name
        'runs'
    """
    stem = Path(script).stem if script.endswith(".py") else Path(script).name
    return Path("runs", f"{stem}-{datetime.now().astimezone():%Y%m%d-%H%M%S}")


def made_free(path: Path) -> Path:
    """Make a folder, with a number behind its name if another run made it in the same second.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> [made_free(folder / "train-20260101-120000").name for _ in range(2)]
        ['train-20260101-120000', 'train-20260101-120000-2']
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    free, number = path, 1
    while True:
        try:
            free.mkdir()
            return free
        except FileExistsError:
            number += 1
            free = path.with_name(f"{path.name}-{number}")
