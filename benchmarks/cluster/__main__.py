"""Runs a command on emulated hosts: `python benchmarks/cluster --hosts 8 --rate 1gbit -- COMMAND`."""

from __future__ import annotations

import argparse
import sys

from cluster import Cluster, ClusterError, RankError


def main() -> int:
    """Start the hosts, run, clean up; the exit code is that of the first rank that failed."""
    parser = argparse.ArgumentParser(prog="python benchmarks/cluster", description=__doc__)
    parser.add_argument("--hosts", type=int, default=4, help="how many hosts (%(default)s)")
    parser.add_argument("--rate", default="1gbit", help="of each link, each way: 1gbit, 250mbit, none (%(default)s)")
    parser.add_argument("--ranks-per-host", type=int, default=1, metavar="N", help="(%(default)s)")
    parser.add_argument("--timeout-s", type=float, metavar="SECONDS", help="end all ranks after so long")
    parser.add_argument("--measure", action="store_true", help="first show what the links really carry")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND ...", help="run once per rank")
    options = parser.parse_args()
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command and not options.measure:
        parser.error("give a command after --, or --measure")
    try:
        with Cluster(options.hosts, options.rate, options.ranks_per_host) as cluster:
            if options.measure:
                print(f"{options.hosts} hosts, {options.rate}: {cluster.measured_rate()}", file=sys.stderr)
            if command:
                cluster.run(command, timeout_s=options.timeout_s, echo=True)
    except KeyboardInterrupt:
        return 130
    except (ClusterError, ValueError) as error:
        print(f"cluster: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, RankError) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
