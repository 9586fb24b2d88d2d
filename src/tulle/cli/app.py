"""The command line: what each command is called, takes, and says in its help."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperOption

from tulle import __version__
from tulle.cli.doctor import SCRIPT, doctor
from tulle.cli.explain import explain, explain_script
from tulle.cli.options import HelpAsked, Split, split
from tulle.cli.plan import plan
from tulle.cli.profile import profile
from tulle.cli.run import RunOptions
from tulle.cli.run import run as run_command
from tulle.cli.simulate import simulate
from tulle.cli.usage import UsageError
from tulle.distribute import MAKE_ANEW
from tulle.errors import TulleError
from tulle.plan import PLAN, Plan
from tulle.report import summarize, write

_CODES = "Exit codes: 0 all went well, 1 it failed, 2 the command line is wrong, 130 by Ctrl-C, 143 by SIGTERM."

_Mistake: Any = typer.BadParameter.__mro__[1]
"""What typer raises of a command line that does not parse: click's, under a name of typer's own in some versions."""

app = typer.Typer(
    name="tulle",
    help="Train PyTorch models on many processes.\n\nTry: tulle run --processes 4 train.py",
    epilog=_CODES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
"""What a write ends in that finds no room."""


def execute(arguments: Sequence[str]) -> int:
    """Run the command line and return its exit code."""
    try:
        code = _executed(arguments)
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()  # what is left for the end of Python fails with a traceback of Python's own
    except BrokenPipeError:
        _let_go_of_output()
        return 1
    except OSError as error:
        if error.errno not in _FULL or error.filename is not None:
            raise
        _let_go_of_output()
        with suppress(OSError):
            print(f"tulle: what it says or saves cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    return code


def _let_go_of_output() -> None:
    """Send what stdout still holds nowhere: Python would try once more to write it when it ends."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _executed(arguments: Sequence[str]) -> int:
    """The command's exit code, its errors told in a line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a sign that its encoding lacks must not end a run
            stream.reconfigure(errors="replace")
    try:
        code = app(list(arguments) or ["--help"], prog_name="tulle", standalone_mode=False)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except UsageError as error:
        command = next((f" {word}" for word in arguments if not word.startswith("-")), "")
        print(f"tulle: {error}\nSee tulle{command} --help.", file=sys.stderr)
        return 2
    except _Mistake as error:
        said = error.format_message()
        command = error.ctx.command_path if error.ctx else "tulle"
        print(f"tulle: {said[:1].lower()}{said[1:].rstrip('.')}\nSee {command} --help.", file=sys.stderr)
        return 2
    except TulleError as error:
        print(f"tulle: {error}", file=sys.stderr)
        return 1
    return code if isinstance(code, int) else 0


class LauncherCommand(TyperCommand):
    """A command that takes torchrun's options among its own; their `Split` comes with the context."""

    script_of_its_own: str | None = None
    """The script that it runs, None if the command line names one."""
    target = "SCRIPT"
    """What follows its options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Hand tulle's own options to typer and keep the rest, split, in `ctx.obj`."""
        own = {
            name: not option.is_flag
            for option in self.params
            if isinstance(option, TyperOption)
            for name in option.opts
        }
        # Behind two dashes it is no value of an option that lacks its own.
        script = [] if self.script_of_its_own is None else ["--", self.script_of_its_own]
        try:
            ctx.obj = split([*args, *script], own, command=ctx.command_path, target=self.target)
        except HelpAsked:
            return super().parse_args(ctx, ["--help"])
        if script and ctx.obj.torchrun.training_script != script[-1]:
            raise UsageError(f"{ctx.obj.torchrun.training_script!r} is too much: the command takes options only")
        return super().parse_args(ctx, ctx.obj.ours)


class ExplainCommand(LauncherCommand):
    """`tulle explain`, whose options may also follow the plan: a plan has none of its own."""

    target = "PLAN|SCRIPT"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put a plan where a script would be, behind all options."""
        valued = {name for one in self.params if isinstance(one, TyperOption) and not one.is_flag for name in one.opts}
        words = (n for n, word in enumerate(args) if not word.startswith("-") and (n == 0 or args[n - 1] not in valued))
        first = next(words, None)
        if first is not None and args[first].endswith(".json"):
            args = [*args[:first], *args[first + 1 :], args[first]]
        return super().parse_args(ctx, args)


class DoctorCommand(LauncherCommand):
    """`tulle doctor`, whose ranks run a script of tulle's own."""

    script_of_its_own = str(SCRIPT)


Processes = Annotated[
    str | None,
    typer.Option("--processes", "-n", metavar="N", help="Processes on each host. Default: one for each GPU, else one."),
]
Hosts = Annotated[
    str | None,
    typer.Option(
        metavar="A,B,...",
        help="Run on these hosts together. Start the same command on each of them, by hand or by your "
        "scheduler: the first has rank 0, and the others find it there.",
    ),
]
RunDir = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Folder for records, logs and report. Default: runs/SCRIPT-DATE-TIME.",
        show_default=False,
    ),
]
Plain = Annotated[
    bool, typer.Option("--plain", metavar="", help="No live table, as when the output is not a terminal.")
]
Compare = Annotated[
    Path | None, typer.Option(metavar="RUN", help="Draw this other run's curves into the report as well.")
]
AsJson = Annotated[bool, typer.Option("--json", metavar="", help="Print one JSON object and nothing else on stdout.")]


@app.callback(invoke_without_command=True)
def main(
    version: Annotated[bool, typer.Option("--version", metavar="", help="Print the version and end.")] = False,
) -> None:
    """Show the version; the rest is in the commands."""
    if version:
        print(f"tulle {__version__}")
        raise typer.Exit


@app.command(
    "run",
    cls=LauncherCommand,
    options_metavar="[OPTIONS] [TORCHRUN OPTIONS] SCRIPT [ARGUMENTS]...",
    epilog=_CODES,
)
def _run(  # noqa: PLR0913 - typer makes each argument an option
    ctx: typer.Context,
    processes: Processes = None,
    hosts: Hosts = None,
    run_dir: RunDir = None,
    compare: Compare = None,
    timeline: Annotated[
        bool, typer.Option("--timeline", metavar="", help="Also record timeline.json for ui.perfetto.dev.")
    ] = False,
    check_finite: Annotated[
        bool,
        typer.Option("--check-finite", metavar="", help="Stop at the first gradient that is not finite, and name it."),
    ] = False,
    plan_: Annotated[
        Path | None, typer.Option("--plan", metavar="FILE", help='Train with this plan where the script says "auto".')
    ] = None,
    anew: Annotated[
        bool, typer.Option("--anew", metavar="", help='Where the script says "auto", take no plan of an earlier run.')
    ] = False,
    as_json: AsJson = False,
    plain: Plain = False,
) -> None:
    """Run a script on several processes, watch it, and draw a report at the end.

    Example: tulle run --processes 4 train.py --epochs 3

    The script is plain Python that calls tulle.init() or torch.distributed; what follows its name is its own.
    -m PACKAGE.MODULE runs a module, and every other option of torchrun works too (--max-restarts,
    --rdzv-backend, ...: see torchrun --help). What each rank writes is kept in logs/ of the run folder;
    rank 0's is shown.
    """
    options = RunOptions(
        processes=processes,
        hosts=hosts,
        run_dir=run_dir,
        timeline=timeline,
        compare=compare,
        check_finite=check_finite,
        as_json=as_json,
        plain=plain,
    )
    settings = {MAKE_ANEW: "1"} if anew else {}
    settings |= {} if plan_ is None else {PLAN: str(_readable(plan_))}
    raise typer.Exit(run_command(_split_of(ctx), options, settings=settings))


@app.command(
    "profile",
    cls=LauncherCommand,
    options_metavar="[OPTIONS] [TORCHRUN OPTIONS] SCRIPT [ARGUMENTS]...",
    epilog=_CODES,
)
def _profile(  # noqa: PLR0913 - typer makes each argument an option
    ctx: typer.Context,
    processes: Processes = None,
    hosts: Hosts = None,
    run_dir: RunDir = None,
    every: Annotated[int, typer.Option(metavar="N", min=1, help="Observe every N steps.")] = 10,
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="End the script after N steps.")] = 50,
    as_json: AsJson = False,
    plain: Plain = False,
) -> None:
    """Run some steps of a script, and show what its modules take and how sparse its tables' gradients are.

    Example: tulle profile --processes 4 train.py --epochs 3

    What each module takes and holds, and what tables look up, goes into profile.json of the run folder: tulle
    plan and tulle simulate read it, on any machine. For each table: density, overlap, densification and
    skewness, the scheme in force, and its time and bytes, predicted and measured, beside those of the best other
    schemes. It starts the script as tulle run does, with the same options of torchrun, and ends it after --steps.
    """
    options = RunOptions(processes=processes, hosts=hosts, run_dir=run_dir, as_json=as_json, plain=plain)
    raise typer.Exit(profile(_split_of(ctx), options, every=every, steps=steps))


app.command("plan", epilog=_CODES)(plan)
app.command("simulate", epilog=_CODES)(simulate)


@app.command(
    "explain",
    cls=ExplainCommand,
    options_metavar="[OPTIONS] [TORCHRUN OPTIONS] PLAN|SCRIPT [ARGUMENTS]...",
    epilog=_CODES,
)
def _explain(  # noqa: PLR0913 - typer makes each argument an option
    ctx: typer.Context,
    measured: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Folder of a run under this plan, to compare with.")
    ] = None,
    against: Annotated[Path | None, typer.Option(metavar="PLAN", help="Say what this other plan does instead.")] = None,
    processes: Processes = None,
    hosts: Hosts = None,
    run_dir: RunDir = None,
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="Of a script, end it after N steps.")] = 50,
    as_json: AsJson = False,
    plain: Plain = False,
) -> None:
    """Say what a plan decides, why, and what would change it; and whether a run went as predicted.

    Example: tulle explain plan.json --measured runs/demo

    Example: tulle explain --processes 4 train.py --epochs 3

    Of a script, some steps are run and profiled as by tulle profile, and the best plan for them is explained; it and
    the profile are kept in the run folder.
    """
    split_ = _split_of(ctx)
    if Path(split_.torchrun.training_script).suffix != ".json":
        if measured is not None:
            raise UsageError(
                "--measured compares a run with the plan in a file: tulle explain PLAN.json --measured RUN"
            )
        options = RunOptions(processes=processes, hosts=hosts, run_dir=run_dir, as_json=as_json, plain=plain)
        raise typer.Exit(explain_script(split_, options, steps=steps, against=against))
    explain(Path(split_.torchrun.training_script), measured=measured, against=against, as_json=as_json)


@app.command("report", epilog=_CODES)
def _report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run, as tulle run named it.")],
    compare: Compare = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="The page to write. Default: report.html in RUN."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Draw the report of a run again, from what it recorded; also of a run that is still going.

    Example: tulle report runs/demo --compare runs/one-process

    With --json nothing is drawn: the summary is printed.
    """
    if as_json:
        print(json.dumps(summarize(run)))
        return
    print(write(run, compare=compare, output=output))


@app.command("doctor", cls=DoctorCommand, options_metavar="[OPTIONS] [TORCHRUN OPTIONS]", epilog=_CODES)
def _doctor(
    ctx: typer.Context,
    processes: Annotated[
        str | None,
        typer.Option(
            "--processes",
            "-n",
            metavar="N",
            help="Processes on each host. Default: one for each GPU, else two.",
        ),
    ] = None,
    hosts: Hosts = None,
    as_json: AsJson = False,
) -> None:
    """Check this machine: versions, backends, devices, and whether processes reach each other and how fast.

    Example: tulle doctor --processes 4

    Each line has a tick or a cross, and a cross says what to do. With --hosts, start it on each host.
    """
    raise typer.Exit(doctor(_split_of(ctx), processes=processes, hosts=hosts, as_json=as_json))


def _readable(plan_: Path) -> Path:
    """The plan's path from wherever ranks run; refused before any is started if it is no plan."""
    Plan.load(plan_)
    return plan_.resolve()


def _split_of(ctx: typer.Context) -> Split:
    assert isinstance(ctx.obj, Split), "LauncherCommand.parse_args sets it"
    return ctx.obj
