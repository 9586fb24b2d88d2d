"""`tulle run`: starts the ranks, watches them, says what failed, and sums the run up."""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from rich.console import Console, RenderableType
from rich.text import Text

from tulle.allowance import cores
from tulle.cli.console import console
from tulle.cli.failures import Cause, Failure, collect, describe, forget_interrupted, signal_name
from tulle.cli.finish import Finished, finish, summary_table
from tulle.cli.folder import Description, RunFolder, default_path, made_free
from tulle.cli.hosts import parse_hosts
from tulle.cli.launch import Outcome, launch, launch_config, machines, place_on_hosts, rank_arguments
from tulle.cli.live import LiveView, PlainView
from tulle.cli.options import Split
from tulle.cli.rank import write_json
from tulle.cli.usage import UsageError
from tulle.cli.watcher import View, Watcher
from tulle.distribute import CHECK_FINITE
from tulle.record import TIMELINE
from tulle.report import quantity
from tulle.report.headline import short


@dataclass(frozen=True, slots=True)
class RunOptions:
    """tulle's own options of `tulle run`; see its `--help`."""

    processes: str | None = None
    hosts: str | None = None
    run_dir: Path | None = None
    timeline: bool = False
    compare: Path | None = None
    check_finite: bool = False
    as_json: bool = False
    plain: bool = False


def run(
    split: Split,
    options: RunOptions,
    *,
    settings: Mapping[str, str] | None = None,
    show: Callable[[Finished], RenderableType] = summary_table,
    more: Callable[[Path], Mapping[str, object]] = lambda _: {},
) -> int:
    """Run a script on its ranks and return the exit code of the command.

    Args:
        split: The command line.
        options: tulle's own part of it.
        settings: Environment variables that every rank gets besides those of the options. If they ask for a profile,
            the command has failed without it.
        show: Draws what is said at the end of a run that did not fail.
        more: Gives what `--json` says besides the summary, from the run folder.

    Raises:
        UsageError: Before anything is started, if the options do not fit.
        CommunicationError: If the machines did not find each other.
    """
    torchrun = split.torchrun
    _check_target(torchrun)
    if options.compare is not None and not options.compare.is_dir():
        raise UsageError(f"--compare {options.compare} is not there, expected the folder of another run")
    hosts = [] if options.hosts is None else parse_hosts(options.hosts)
    place_on_hosts(split, hosts, options.processes)
    path = _choose_path(torchrun, options)
    command = [*(["-m"] if torchrun.module else []), torchrun.training_script, *torchrun.training_script_args]
    description = Description(command, hosts or ["localhost"], _settings(options) | dict(settings or {}))
    folder = _open_folder(path, description, is_chosen=options.run_dir is not None)
    says = _Says(options, show, more)
    says.notes.print(Text(f"[tulle] records, logs and report: {short(folder.path)}"))
    if hosts:
        says.waits(torchrun)
    outcome = start(torchrun, folder, says.view, notes=says.notes)
    failed = collect(folder.path, outcome.endings, since_s=folder.started.timestamp()) if outcome.endings else []
    if failed:
        _record(folder.path, failed)
        says.failed(failed, folder)
    if outcome.interrupted_by:
        forget_interrupted(folder.path)
        says.interrupted(outcome.interrupted_by)
    says.finished(finish(folder.path, compare=options.compare) if folder.leads else None, failed, folder)
    is_lacking = folder.leads and folder.profile is not None and not folder.profile.exists()
    return exit_code(outcome) or int(is_lacking)


def exit_code(outcome: Outcome) -> int:
    """0 if all went well, 1 if a rank failed, 128 + the signal (130 for Ctrl-C) if it was interrupted."""
    if outcome.interrupted_by:
        return 128 + outcome.interrupted_by
    return 1 if outcome.endings else 0


def start(torchrun: Namespace, folder: RunFolder, view: Callable[[], View], *, notes: Console) -> Outcome:
    """Start the ranks of this machine and watch them to their end.

    Args:
        torchrun: torchrun's options, completed by `place_on_hosts`.
        folder: The run folder.
        view: Makes the view, once the notes before it are printed.
        notes: Where to say what was chosen.
    """
    processes, own = int(torchrun.nproc_per_node), cores()
    if "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, own // processes)
        os.environ["OMP_NUM_THREADS"] = str(threads)  # torchrun hands it on
        here = f"{quantity.plural(processes, 'process')} on {quantity.plural(own, 'core')}"
        notes.print(Text(f"[tulle] {here}: OMP_NUM_THREADS={threads} (set it to choose yourself)"))
    config = launch_config(torchrun, folder)
    with Watcher(folder, view()):
        return launch(config, rank_arguments(torchrun), folder)


def _check_target(torchrun: Namespace) -> None:
    """Refuse a script that does not exist before anything is started."""
    target = torchrun.training_script
    if torchrun.module:
        if os.sep in target or target.endswith(".py"):
            raise UsageError(
                f"-m {target} is a path, expected a module's name, package.module: leave -m out, or name that"
            )
        package = target.split(".")[0]
        if PathFinder.find_spec(package, [os.getcwd(), *sys.path]) is None:
            raise UsageError(f"-m {target}: there is no module {package!r} here or among the installed packages")
    elif not torchrun.no_python and not os.path.exists(target):
        raise UsageError(
            f"the script {target} is not there (looked in {os.getcwd()}): check the path, "
            "or write -m before the name of a module"
        )
    elif os.path.isdir(target) and not os.path.exists(os.path.join(target, "__main__.py")):
        raise UsageError(f"{target} is a folder without a __main__.py, expected a script")
    elif target.endswith(".ipynb"):
        raise UsageError(f"{target} is a notebook, expected a script: jupyter nbconvert --to script {target} makes one")


def _choose_path(torchrun: Namespace, options: RunOptions) -> Path:
    path = options.run_dir
    if path is None:
        if machines(torchrun) > 1:
            raise UsageError("with several hosts give --run-dir, the same on each of them")
        return default_path(torchrun.training_script)
    if path.exists() and not path.is_dir():
        raise UsageError(f"--run-dir {path} is a file, expected a folder or a name that is free")
    return path


def _open_folder(path: Path, description: Description, *, is_chosen: bool) -> RunFolder:
    try:
        return RunFolder(path if is_chosen else made_free(path), description)
    except OSError as error:
        raise UsageError(
            f"the run folder {path} cannot be written ({error.strerror}): choose one with --run-dir"
        ) from error


def _settings(options: RunOptions) -> dict[str, str]:
    asked = {TIMELINE: options.timeline, CHECK_FINITE: options.check_finite}
    return {name: "1" for name, wanted in asked.items() if wanted}


def _record(run: Path, failed: Sequence[Failure]) -> None:
    """Leave word for a rank that could not do so itself, and of each how far it came, so that the report says it."""
    for failure in failed:
        path = run / f"failure-rank-{failure.rank}.json"
        if path.exists():
            write_json(path, json.loads(path.read_text(encoding="utf-8")) | {"step": failure.step})
        elif failure.cause is Cause.OWN:
            write_json(path, failure.as_json() | {"at": failure.at, "traceback": failure.traceback})


class _Says:
    """What the command says, and where: with `--json` stdout is kept for the summary alone."""

    def __init__(
        self,
        options: RunOptions,
        show: Callable[[Finished], RenderableType],
        more: Callable[[Path], Mapping[str, object]],
    ) -> None:
        self._options = options
        self._show = show
        self._more = more
        self.notes = console(stderr=True)
        self.output = self.notes if options.as_json else console()

    def view(self) -> View:
        """The live table on a terminal, else plain lines."""
        if self._options.plain or not self.output.is_terminal or self.output.is_dumb_terminal:
            return PlainView(self.output, self.notes)
        return LiveView(self.output)

    def waits(self, torchrun: Namespace) -> None:
        """That the other hosts must be started too."""
        where = f"host {torchrun.node_rank + 1} of {torchrun.nnodes}, the first is {torchrun.master_addr}"
        self.notes.print(Text(f"[tulle] {where}: start the same command on each; the ranks begin when all are there"))

    def failed(self, failed: list[Failure], folder: RunFolder) -> None:
        """The first failure in full, the others in a line each, and where the logs are."""
        first, _, rest = describe(failed, folder.logs).partition("\n")
        self.notes.print(Text(first, style="bold red"))
        self.notes.print(Text(f"{rest}\nEach rank's output: {short(folder.path / 'logs')}/rank-R.log"))

    def interrupted(self, number: int) -> None:
        """That the run was ended from outside."""
        self.notes.print(f"Interrupted by signal {signal_name(number)}: all ranks were ended.")

    def finished(self, finished: Finished | None, failed: list[Failure], folder: RunFolder) -> None:
        """The summary, and where the report is."""
        if self._options.as_json:
            print(json.dumps({**_as_json(finished, failed, folder), **self._more(folder.path)}))
            if finished and finished.note:
                self.notes.print(Text(finished.note))
            return
        if finished is None:
            self.notes.print("The machine of rank 0 has the summary and the report.")
            return
        if finished.summary and not failed:
            self.output.print(self._show(finished))
        for name, path in (("Report", finished.report), ("Timeline", finished.timeline)):
            if path is not None:
                self.output.print(f"{name}: {short(path)}")
        if finished.note:
            self.notes.print(Text(finished.note))


def _as_json(finished: Finished | None, failed: list[Failure], folder: RunFolder) -> dict[str, object]:
    return {
        **(finished.summary if finished else {}),
        "run": str(folder.path),
        "report": str(finished.report) if finished and finished.report else None,
        "failure": failed[0].as_json() if failed else None,
    }
