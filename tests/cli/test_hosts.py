"""A machine finds itself in `--hosts`, or is told how to say where it is."""

import socket

import pytest

from tulle.cli.hosts import is_this_host, own_place, parse_hosts
from tulle.cli.launch import place_on_hosts
from tulle.cli.options import split
from tulle.cli.usage import UsageError


def test_a_list_of_hosts_is_read_with_or_without_blanks():
    assert parse_hosts("node1, node2,10.0.0.3") == ["node1", "node2", "10.0.0.3"]


def test_an_empty_name_in_the_list_is_refused():
    with pytest.raises(UsageError, match="has an empty name, expected a list such as --hosts node1,node2"):
        parse_hosts("node1,,node2")


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", socket.gethostname()])
def test_this_machine_knows_its_names_and_addresses(host):
    assert is_this_host(host)


@pytest.mark.parametrize("host", ["240.0.0.1", "no-such-host.invalid"])  # RFC 1112, RFC 2606: nobody's
def test_another_machine_is_not_this_one(host):
    assert not is_this_host(host)


@pytest.mark.parametrize(
    ("own", "what"), [([], "none of --hosts a,b is this machine"), (["a", "b"], "more than one of --hosts a,b")]
)
def test_a_place_that_is_not_clear_is_asked_for(own, what):
    with pytest.raises(UsageError, match=rf"{what}.*say which it is with --node-rank, from 0 to 1"):
        own_place(["a", "b"], is_own=lambda host: host in own)


def place(words, hosts, processes="2"):
    parts = split([*words, "train.py"], {})
    place_on_hosts(parts, hosts, processes)
    return parts.torchrun


def test_the_first_host_is_the_rendezvous():
    torchrun = place(["--node-rank", "1"], ["a", "b"])
    assert (torchrun.nnodes, torchrun.node_rank, torchrun.master_addr) == ("2", 1, "a")
    assert torchrun.nproc_per_node == "2"


def test_a_rendezvous_that_was_given_stays():
    assert place(["--node-rank", "1", "--master-addr", "c"], ["a", "b"]).master_addr == "c"


@pytest.mark.parametrize(
    ("words", "processes", "message"),
    [
        (["--nnodes", "3", "--node-rank", "0"], "2", "--nnodes 3 and --hosts with 2 names: leave out --nnodes"),
        (["--node-rank", "2"], "2", "--node-rank is 2, expected 0 to 1 for 2 hosts"),
        (["--nproc-per-node", "2"], "2", "--processes and --nproc-per-node say the same: leave one out"),
        (["--nproc-per-node", "some"], None, "--nproc-per-node some: Unsupported nproc_per_node value"),
        ([], "0", "--processes is '0', expected a number from 1 up, or auto"),
        ([], "-2", "--processes is '-2', expected a number from 1 up, or auto"),
    ],
)
def test_options_that_contradict_each_other_are_refused(words, processes, message):
    with pytest.raises(UsageError, match=message):
        place(words, ["a", "b"], processes)
