"""Tells apart the options of tulle, those of torchrun, and the words that belong to the script."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

from torch.distributed.run import get_args_parser

from tulle.cli.usage import UsageError

# What torchrun would do with each rank's output; `tulle run` puts it all into the run folder.
_OUTPUT_OPTIONS = {
    "log_dir": "--log-dir",
    "redirects": "--redirects",
    "tee": "--tee",
    "local_ranks_filter": "--local-ranks-filter",
    "duplicate_stdout_filters": "--duplicate-stdout-filters",
    "duplicate_stderr_filters": "--duplicate-stderr-filters",
    "logs_specs": "--logs-specs",
}


@dataclass(frozen=True, slots=True)
class Split:
    """A command line in its two parts.

    Args:
        ours: The words that are tulle's own options and their values, in order.
        torchrun: What torchrun's parser made of the rest, with `training_script` and `training_script_args`.
        given: Names in `torchrun` that were on the command line, and do not merely have their default.
    """

    ours: list[str]
    torchrun: argparse.Namespace
    given: frozenset[str]


class HelpAsked(Exception):  # noqa: N818 - no error, but the way out of the parser
    """`--help` stood among the options."""


def split(
    arguments: Sequence[str], own: Mapping[str, bool], *, command: str = "tulle run", target: str = "SCRIPT"
) -> Split:
    """Split the words after `tulle run`, or a command like it; all that follows the script is the script's.

    Args:
        arguments: The words.
        own: tulle's own options, each with whether a value follows it.
        command: As it was typed, for the text of an error.
        target: What follows the options, for that text.

    Raises:
        HelpAsked: If `--help` stands before the script.
        UsageError: If torchrun's parser refuses an option, or an option says where output goes.

    Example:
        >>> parts = split(["--json", "--max-restarts", "1", "train.py", "--json"], {"--json": False})
        >>> parts.ours, parts.torchrun.max_restarts, parts.torchrun.training_script_args
        (['--json'], 1, ['--json'])
    """
    ours: list[str] = []
    refuse = partial(_refuse, command, target)
    torchrun = _parser(own, ours, refuse).parse_args(arguments)
    unset = object()  # the parser sets no default where the namespace has a value already
    probe = argparse.Namespace(**dict.fromkeys(vars(torchrun), unset))
    _parser(own, [], refuse).parse_args(arguments, probe)
    given = frozenset(name for name, value in vars(probe).items() if value is not unset)
    _give_back_dashes(torchrun, arguments)
    refused = [option for name, option in _OUTPUT_OPTIONS.items() if name in given]
    if refused:
        raise UsageError(
            f"{', '.join(refused)}: tulle keeps what every rank writes in logs/ of the run folder; "
            "leave this out, and choose the folder with --run-dir"
        )
    return Split(ours, torchrun, given)


def _parser(own: Mapping[str, bool], ours: list[str], refuse: partial[NoReturn]) -> argparse.ArgumentParser:
    class Keep(argparse.Action):
        def __call__(
            self,
            parser: argparse.ArgumentParser,
            namespace: argparse.Namespace,
            values: object,
            option_string: str | None = None,
        ) -> None:
            ours.extend([str(option_string), *([values] if isinstance(values, str) else [])])

    parser = get_args_parser()
    parser.allow_abbrev = False  # `--run` must not become --run-path behind the user's back
    parser.error = refuse
    parser.print_help = _ask_for_help
    for option, has_value in own.items():
        parser.add_argument(option, action=Keep, nargs=None if has_value else 0, dest="ours")
    return parser


def _give_back_dashes(torchrun: argparse.Namespace, arguments: Sequence[str]) -> None:
    """Before Python 3.13 argparse swallows a `--` right after the script, which is the script's own."""
    words = torchrun.training_script_args
    if arguments[-len(words) - 1] == "--":
        words.insert(0, "--")


def _refuse(command: str, target: str, message: str) -> NoReturn:
    if "required" in message:
        what = target.lower().replace("|", " or ")
        raise UsageError(f"no {what} was given, expected {command} [OPTIONS] {target} [ARGUMENTS]...")
    raise UsageError(f"{message}: {command} --help and torchrun --help have the options")


def _ask_for_help(file: object = None) -> NoReturn:
    raise HelpAsked
