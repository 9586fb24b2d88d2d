"""A process finds its place among the others in what torchrun, Slurm or nobody left in the environment."""

import pytest

from tulle.environment import Launch, check_alone, detect, first_host
from tulle.errors import MeshError

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_TASKS_PER_NODE": "4(x2)",
    "SLURM_JOB_ID": "123456",
    "SLURM_JOB_NODELIST": "gpu[04-05]",
}


def without(environment: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in names}


def test_torchruns_variables_are_read():
    assert detect(TORCHRUN) == Launch("torchrun", 5, 8, 1, 4, "node1", 29500)


def test_torchruns_local_variables_may_be_absent():
    launch = detect(without(TORCHRUN, "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    assert (launch.local_rank, launch.local_size) == (launch.rank, 1), "so that ranks of a host take other GPUs"


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_missing_variable_of_torchrun_is_named(missing):
    found = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name != missing]
    with pytest.raises(MeshError, match=f"has {', '.join(found)} but not {missing}: start the script with `tulle run`"):
        detect(without(TORCHRUN, missing))


def test_an_address_alone_starts_nothing():
    # A shell profile may export it for other programs.
    assert detect({"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}).launcher == "alone"


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"])
@pytest.mark.parametrize("value", ["", "two", "1.5"])
def test_a_variable_that_is_no_number_is_named(name, value):
    with pytest.raises(MeshError, match=f"variable {name} is {value!r}, expected a whole number"):
        detect(TORCHRUN | {name: value})


@pytest.mark.parametrize("rank", ["8", "-1"])
def test_a_rank_beyond_the_world_is_refused_before_anybody_waits_for_it(rank):
    with pytest.raises(MeshError, match=f"has RANK={rank} and WORLD_SIZE=8, expected ranks from 0"):
        detect(TORCHRUN | {"RANK": rank})


def test_slurms_variables_are_read():
    assert detect(SLURM) == Launch("slurm", 5, 8, 1, 4, "gpu04", 20_000 + 3456)


def test_a_job_step_on_some_of_the_nodes_meets_on_its_own_first_one():
    assert detect(SLURM | {"SLURM_STEP_NODELIST": "gpu05"}).address == "gpu05"


def test_an_address_and_a_port_that_are_given_win():
    launch = detect(SLURM | {"MASTER_ADDR": "head", "MASTER_PORT": "1234"})
    assert (launch.address, launch.port) == ("head", 1234)


def test_ranks_that_slurm_deals_out_in_turn_have_the_hosts_where_they_are():
    in_turn = [{"SLURM_PROCID": f"{rank}", "SLURM_LOCALID": f"{rank // 2}"} for rank in range(4)]
    known = [SLURM | one | {"SLURM_NODEID": f"{rank % 2}"} for rank, one in enumerate(in_turn)]
    assert [detect(one).host_of(rank) for rank, one in enumerate(known)] == [0, 1, 0, 1]
    assert detect(SLURM).host_of(5) == detect(TORCHRUN).host_of(5) == 4, "that of the first process"


def test_torchrun_within_a_slurm_job_wins():
    assert detect(SLURM | TORCHRUN).launcher == "torchrun"


@pytest.mark.parametrize("environment", [{}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, {"SLURM_PROCID": "0"}])
def test_one_process_is_alone(environment):
    assert detect(environment) == Launch("alone", 0, 1, 0, 1, "", 0)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node3", "node3"),
        ("node3,node4", "node3"),
        ("node[3]", "node3"),
        ("gpu[007-012,15],login1", "gpu007"),
        ("gpu[15,007-012]", "gpu15"),
        ("a-b[1-2]", "a-b1"),
        ("gpu[01-04]-ib,gpu09-ib", "gpu01-ib"),
        ("10.0.0.[1-4]", "10.0.0.1"),
        ("rack[1-2]node[3-4]", "rack1node3"),
    ],
)
def test_the_first_of_a_slurm_node_list_is_found(nodes, first):
    assert first_host(nodes) == first


@pytest.mark.parametrize("nodes", ["", "[1-2]", ","])
def test_a_node_list_that_is_none_is_shown(nodes):
    with pytest.raises(MeshError, match=r"SLURM_JOB_NODELIST is '.*', expected a list of hosts .*: set MASTER_ADDR"):
        first_host(nodes)


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_processes_that_mpirun_started_do_not_train_each_for_itself(name):
    check_alone({name: "1"})
    with pytest.raises(MeshError, match=f"mpirun started 4 processes \\({name}\\), which tulle does not join"):
        check_alone({name: "4"})
