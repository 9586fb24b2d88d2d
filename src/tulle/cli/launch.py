"""Starts the ranks with torchrun's own launcher and says how each of them ended."""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.distributed.run import config_from_args, determine_local_world_size, parse_min_max_nnodes

from tulle.cli.folder import RunFolder
from tulle.cli.hosts import own_place
from tulle.cli.options import Split
from tulle.cli.usage import UsageError
from tulle.errors import CommunicationError

_BOOTSTRAP = Path(__file__).with_name("rank.py")
_DEFAULT_PORT = 29_500


@dataclass(frozen=True, slots=True)
class Ending:
    """How a rank on this machine ended badly.

    Args:
        exit_code: Its exit code, or minus the signal that killed it.
        at: When the launcher saw it, in seconds since 1970.
    """

    exit_code: int
    at: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a launch ended.

    Args:
        endings: The ranks of this machine that ended badly.
        interrupted_by: Number of the signal that ended the launcher, or None.
    """

    endings: dict[int, Ending] = field(default_factory=dict)
    interrupted_by: int | None = None


def place_on_hosts(split: Split, hosts: Sequence[str], processes: str | None) -> None:
    """Complete torchrun's options by `--hosts` and `--processes`; options that were given stay as they are.

    Raises:
        UsageError: If they contradict each other, or this machine is not among the hosts.
    """
    torchrun = split.torchrun
    _place_processes(split, processes)
    if not hosts:
        return
    if "nnodes" in split.given and machines(torchrun) != len(hosts):
        raise UsageError(f"--nnodes {torchrun.nnodes} and --hosts with {len(hosts)} names: leave out --nnodes")
    torchrun.nnodes = str(len(hosts))
    if "node_rank" not in split.given:
        torchrun.node_rank = own_place(hosts)
    if not 0 <= torchrun.node_rank < len(hosts):
        raise UsageError(f"--node-rank is {torchrun.node_rank}, expected 0 to {len(hosts) - 1} for {len(hosts)} hosts")
    if "master_addr" not in split.given:
        torchrun.master_addr = hosts[0]


def _place_processes(split: Split, processes: str | None) -> None:
    given = "nproc_per_node" in split.given
    if processes is not None and given:
        raise UsageError("--processes and --nproc-per-node say the same: leave one out")
    wanted = "auto" if processes is None else processes
    asked = split.torchrun.nproc_per_node if given else wanted
    if not given and asked != "auto" and not (asked.isdecimal() and int(asked) > 0):
        raise UsageError(f"--processes is {asked!r}, expected a number from 1 up, or auto")
    try:
        count = default_processes() if asked == "auto" else determine_local_world_size(asked)
    except ValueError as error:
        raise UsageError(f"--nproc-per-node {asked}: {error}") from error
    split.torchrun.nproc_per_node = str(count)


def machines(torchrun: Namespace) -> int:
    """The most machines that the run may have."""
    try:
        return parse_min_max_nnodes(torchrun.nnodes)[1]
    except (ValueError, RuntimeError) as error:
        raise UsageError(f"--nnodes is {torchrun.nnodes!r}, expected a number or a range such as 1:4") from error


def default_processes() -> int:
    """One process a GPU, or a single one on a machine without."""
    return max(1, torch.cuda.device_count())


def launch_config(torchrun: Namespace, folder: RunFolder) -> LaunchConfig:
    """Let torchrun make its configuration, with the output of the ranks in the run folder.

    Args:
        torchrun: Its options, completed by `place_on_hosts`.
        folder: The run folder.

    Raises:
        UsageError: If torchrun refuses the options.
    """
    _choose_rendezvous(torchrun)
    torchrun.log_dir = folder.root_log_dir
    try:
        config, _, _ = config_from_args(torchrun)
    except (ValueError, AssertionError, RuntimeError) as error:
        raise UsageError(f"torchrun's launcher refuses the options: {error}") from error
    config.logs_specs = folder
    return config


def _choose_rendezvous(torchrun: Namespace) -> None:
    """As torchrun's own `run`: one machine without a chosen port meets on a free one."""
    chosen = torchrun.rdzv_backend != "static" or torchrun.rdzv_endpoint or torchrun.master_port is not None
    if torchrun.standalone or (machines(torchrun) == 1 and not chosen):
        torchrun.rdzv_backend, torchrun.rdzv_endpoint = "c10d", "localhost:0"
        torchrun.rdzv_id = str(uuid.uuid4())
    if torchrun.master_port is None:
        torchrun.master_port = _DEFAULT_PORT


def rank_arguments(torchrun: Namespace) -> list[str]:
    """The words after `python` that run the script on one rank."""
    kind = "module" if torchrun.module else "program" if torchrun.no_python else "script"
    bootstrap = ["-u", "-X", "faulthandler", str(_BOOTSTRAP)]
    return [*bootstrap, kind, torchrun.training_script, *torchrun.training_script_args]


def launch(config: LaunchConfig, arguments: Sequence[str], folder: RunFolder) -> Outcome:
    """Run the ranks of this machine to their end.

    Raises:
        CommunicationError: If the machines did not find each other.
    """
    with _quiet_torchrun(folder.path / "logs" / "launcher.log"), _own_signal_handlers():
        try:
            elastic_launch(config, os.environ.get("PYTHON_EXEC", sys.executable))(*arguments)
        except ChildFailedError as error:
            return Outcome({r: Ending(f.exitcode, float(f.timestamp)) for r, f in error.failures.items()})
        except SignalException as error:
            return Outcome(interrupted_by=int(error.sigval))
        except KeyboardInterrupt:  # before torchrun had set up its handlers
            return Outcome(interrupted_by=int(signal.SIGINT))
        except (RendezvousError, RuntimeError) as error:  # the store's errors are RuntimeErrors
            raise CommunicationError(
                f"the launchers did not meet at {config.rdzv_endpoint}: {error}. Start the same command on "
                "every host, and choose a free port that the others can reach with --master-port"
            ) from error
    return Outcome()


@contextmanager
def _quiet_torchrun(log: Path) -> Iterator[None]:
    """Send what torchrun's launcher logs to a file: its table of errors would bury the traceback."""
    logger = logging.getLogger("torch.distributed")
    handler = logging.FileHandler(log, delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    before, propagated = logger.handlers, logger.propagate
    logger.handlers, logger.propagate = [handler], False
    try:
        yield
    finally:
        logger.handlers, logger.propagate = before, propagated
        handler.close()


@contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Put back the signal handlers that torchrun replaces."""
    names = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = {name: signal.getsignal(name) for name in names}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
