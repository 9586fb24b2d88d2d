"""`tulle simulate` says what a plan would do on clusters of any size, in tables, as JSON and as a timeline."""

import json
import time
from dataclasses import replace

import pytest
import torch

pytest.importorskip("typer")
from tulle.cli.app import execute
from tulle.cli.units import bandwidth, duration
from tulle.cli.usage import UsageError
from tulle.cost import Network
from tulle.plan import Plan, TablePlan, best_plan
from tulle.workload import Cluster, Machine, ModuleProfile, OptimizerProfile, Profile, TableProfile


@pytest.fixture
def job(tmp_path):
    """A plan with its profile beside it: a table of words, and a body of 4 MB."""
    generator = torch.Generator().manual_seed(0)
    chances = 1.0 / torch.arange(1, 5_001)
    batches = [torch.multinomial(chances, 600, replacement=True, generator=generator).unique() for _ in range(8)]
    stream = tuple(tuple(batches[first : first + 4]) for first in (0, 4))
    table = TableProfile("embedding.weight", 5_000, 64, 4, True, ("rows", "columns"), "embedding", stream, 600.0)
    modules = (
        ModuleProfile("embedding", 1e-3, 2e-3, activations_bytes=10_000),
        ModuleProfile("body", 4e-3, 8e-3, parameters_bytes=4_000_000, reads={"embedding": 150_000}),
    )
    network = Network(5e-4, 1e8, sum_bytes_per_s=5e9, copy_bytes_per_s=5e9, number_s=1e-8)
    cluster = Cluster(4, 1, Machine(1e11, 1e10), network, probed_ranks=4)
    profile = Profile("Words", 16, modules, (table,), OptimizerProfile(2.0, 1e-10), cluster, 16e-3)
    profile.save(tmp_path / "profile.json")
    plan = Plan({"data": 4}, (TablePlan("embedding.weight", 5_000, 64, "balanced", "given"),))
    plan.save(tmp_path / "plan.json")
    return tmp_path


def simulated(job, capsys, *options):
    assert execute(["simulate", str(job / "plan.json"), *options, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_plan_is_carried_to_a_larger_cluster(job, capsys):
    network = ["--bandwidth", "100Gbit", "--latency", "2us"]
    found = simulated(job, capsys, "--hosts", "30", "--processes-per-host", "4", *network)
    [point] = found["points"]
    assert (point["ranks"], point["mesh"], point["batch"]) == (120, {"data": 120}, 16 * 120)
    assert point["bandwidth_bytes_per_s"] == 12.5e9
    assert point["step_s"] >= 15e-3  # what one rank computes
    parts = ("computing_s", "communicating_s", "idle_s")
    assert sum(point[part] for part in parts) == pytest.approx(point["step_s"])
    [table] = found["tables"]
    assert table["ranks"] == 120
    assert table["recorded_batches"] == 8
    assert 0.6 * 5_000 < table["union_rows"] < 5_000
    assert table["exponent"] == pytest.approx(1.0, abs=0.15)


def test_a_sweep_has_a_row_for_each_cluster(job, capsys):
    found = simulated(job, capsys, "--sweep", "hosts=1,2,8", "--sweep", "bandwidth=1Gbit,10Gbit")
    rows = [(point["hosts"], point["bandwidth_bytes_per_s"]) for point in found["points"]]
    assert rows == [(1, 1.25e8), (1, 1.25e9), (2, 1.25e8), (2, 1.25e9), (8, 1.25e8), (8, 1.25e9)]
    assert [point["batch"] for point in found["points"]] == [16, 16, 32, 32, 128, 128]
    slow, fast = found["points"][-2:]
    assert slow["efficiency"] < fast["efficiency"] < 1
    downward = simulated(job, capsys, "--sweep", "hosts=8,2,1", "--bandwidth", "1Gbit")["points"]
    assert [point["efficiency"] for point in downward] == [one["efficiency"] for one in found["points"][::2]][::-1]


def test_a_cluster_without_enough_memory_is_told_of(job, capsys):
    profile = Profile.load(job / "profile.json")
    plan = Plan.load(job / "plan.json")
    replace(plan, tables=(replace(plan.tables[0], scheme="rows"),)).save(job / "plan.json")
    whole, split = simulated(job, capsys, "--sweep", "hosts=1,4")["points"]
    assert whole["memory_bytes"] - split["memory_bytes"] > 5_000 * 64 * 4 / 2
    assert not whole["lacks_memory"], "nobody said how much there is"
    machine = replace(profile.cluster.machine, memory_bytes=split["memory_bytes"])
    replace(profile, cluster=replace(profile.cluster, machine=machine)).save(job / "profile.json")
    points = simulated(job, capsys, "--sweep", "hosts=1,4")["points"]
    assert [point["lacks_memory"] for point in points] == [True, False]
    assert execute(["simulate", str(job / "plan.json"), "--sweep", "hosts=1,4"]) == 0
    assert "Not enough memory on a rank: with 1 rank." in capsys.readouterr().out


def test_strong_scaling_shares_out_one_batch(job, capsys):
    found = simulated(job, capsys, "--sweep", "hosts=1,8", "--strong", "--batch", "64")
    one, eight = found["points"]
    assert one["batch"] == eight["batch"] == 64
    assert eight["computing_s"] < 0.3 * one["computing_s"]
    assert found["scaling"] == "strong"
    assert execute(["simulate", str(job / "plan.json"), "--sweep", "hosts=1,80", "--strong", "--batch", "64"]) == 1
    assert "a step of 64 samples is too small for 80 replicas on 80 ranks" in capsys.readouterr().err


def test_noise_and_stragglers_make_ranks_wait(job, capsys):
    options = ["--hosts", "16", "--bandwidth", "100Gbit", "--latency", "2us"]
    [fair] = simulated(job, capsys, *options)["points"]
    [foul] = simulated(job, capsys, *options, "--noise", "0.1", "--stragglers", "0.1:1.5")["points"]
    assert foul["step_s"] > 1.2 * fair["step_s"]
    assert foul["idle_s"] > fair["idle_s"]
    assert foul["computing_s"] + foul["communicating_s"] + foul["idle_s"] == pytest.approx(foul["step_s"])


def test_stragglers_are_counted_and_less_than_half_a_rank_is_none(job, capsys):
    options = ["--sweep", "hosts=2,100", "--stragglers"]
    found = simulated(job, capsys, *options, "0.01:1.5")
    assert [point["stragglers"] for point in found["points"]] == [0, 1]
    assert execute(["simulate", str(job / "plan.json"), *options, "0.01:1.5"]) == 0
    shown = capsys.readouterr().out
    assert "slow" in shown.splitlines()[0]
    assert "No rank is slow where the share of stragglers is less than half a rank." in shown
    two, many = simulated(job, capsys, *options, "0.25:1.5")["points"]
    assert (two["stragglers"], many["stragglers"]) == (1, 25), "a half is a rank"
    [fair] = simulated(job, capsys, "--hosts", "2")["points"]
    assert two["step_s"] > fair["step_s"] + 0.4 * 15e-3, "half as long again computes what took 15 ms"
    assert "stragglers" not in fair


def test_a_loop_without_lookahead_waits_until_rows_are_told(job, capsys):
    plan = Plan.load(job / "plan.json")
    replace(plan, tables=(replace(plan.tables[0], scheme="rows"),)).save(job / "plan.json")
    plain, ahead, late = (simulated(job, capsys, *words) for words in ([], ["--lookahead"], ["--no-lookahead"]))
    assert plain == late, "the profile has seen none"
    assert [found["lookahead"] for found in (plain, ahead)] == [False, True]
    assert plain["points"][0]["step_s"] > ahead["points"][0]["step_s"] + 2 * 5e-4
    assert (
        plain["points"][0]["standing_by_kind_s"]["rows"] > ahead["points"][0]["standing_by_kind_s"]["rows"] + 2 * 5e-4
    )
    assert execute(["simulate", str(job / "plan.json")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Rows of split tables are told in forward, which waits for that" in shown
    seen = replace(Profile.load(job / "profile.json"), lookahead=True)
    seen.save(job / "profile.json")
    assert simulated(job, capsys) == ahead


def test_the_table_is_for_people(job, capsys):
    assert execute(["simulate", str(job / "plan.json"), "--sweep", "hosts=4,8"]) == 0
    shown = capsys.readouterr().out
    assert "hosts" in shown
    assert "Weak scaling: 16 samples a rank and step" in shown
    assert "embedding.weight" in shown
    assert execute(["simulate", str(job / "plan.json"), "--hosts", "1", "--strong", "--batch", "1"]) == 0
    shown = capsys.readouterr().out
    assert "Strong scaling: 1 sample a step" in shown
    assert "On 1 rank of axis data; 8 recorded batches, and" in shown


def test_a_narrow_terminal_cuts_no_number(job, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    assert execute(["simulate", str(job / "plan.json"), "--sweep", "hosts=4,400"]) == 0
    told = capsys.readouterr().out
    assert "…" not in told
    assert "5,000 x 64" in told


def test_a_folder_gets_forecast_and_timeline(job, capsys):
    assert execute(["simulate", str(job / "plan.json"), "--hosts", "8", "--out", str(job / "out")]) == 0
    capsys.readouterr()
    forecast = json.loads((job / "out" / "forecast.json").read_text())
    assert forecast["points"][0]["hosts"] == 8
    events = json.loads((job / "out" / "timeline.json").read_text())["traceEvents"]
    assert {"compute", "dense", "sparse", "update"} <= {event.get("cat") for event in events}


def test_a_folder_that_cannot_be_written_is_named(job, capsys):
    (job / "out" / "timeline.json").mkdir(parents=True)
    assert execute(["simulate", str(job / "plan.json"), "--hosts", "8", "--out", str(job / "out")]) == 2
    assert f"--out {str(job / 'out')!r} cannot be written: Is a directory" in capsys.readouterr().err


def test_stages_of_a_plan_stay_and_replicas_grow(job, capsys):
    plan = replace(Plan.load(job / "plan.json"), mesh={"pipe": 2, "data": 2}, micro_batches=2)
    replace(plan, stages={"embedding": 0, "body": 1}).save(job / "plan.json")
    found = simulated(job, capsys, "--hosts", "10")
    assert found["points"][0]["mesh"] == {"pipe": 2, "data": 5}
    assert execute(["simulate", str(job / "plan.json"), "--hosts", "5"]) == 1
    assert "simulate a multiple of 2 ranks" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--bandwidth", "100"], "--bandwidth '100' is no bandwidth, expected a number with its unit: 100Gbit"),
        (["--latency", "2 lightyears"], "--latency '2 lightyears' is no time"),
        (["--sweep", "hosts=1", "--sweep", "hosts=2"], "--sweep is given twice for one name: hosts=1, hosts=2"),
        (["--hosts", "3", "--sweep", "hosts=1,2"], "--hosts is given, and --sweep hosts=...: give one of them"),
        (["--sweep", "colour=1"], "expected NAME=A,B,... with a name of hosts, processes-per-host, bandwidth, latency"),
        (["--sweep", "hosts=1,many"], "--sweep hosts 'many' is no number of things"),
        (["--stragglers", "1.5"], "--stragglers '1.5': expected SHARE:FACTOR"),
        (["--stragglers", "0.1:1e400"], "--stragglers '0.1:1e400': expected SHARE:FACTOR"),
        (["--bandwidth", "1e400Gbit"], "--bandwidth '1e400Gbit' is no bandwidth"),
        (["--latency", "1e400s"], "--latency '1e400s' is no time"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused(job, capsys, options, text):
    assert execute(["simulate", str(job / "plan.json"), *options]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--hosts", "100000000"], "100,000,000 hosts x 1 processes are 100,000,000 ranks, of which 1,000,000 at most"),
        (["--sweep", "processes-per-host=1,9999999"], "4 hosts x 9,999,999 processes are 39,999,996 ranks"),
        (["--noise", "1e308"], "noise of 1e+308: a coefficient of variation such as 0.05 is needed, at most 100"),
    ],
)
def test_what_would_never_end_or_fit_is_refused(job, capsys, options, text):
    assert execute(["simulate", str(job / "plan.json"), *options]) == 1
    assert text in capsys.readouterr().err


def test_a_plan_without_a_profile_is_not_enough(job, capsys):
    (job / "profile.json").unlink()
    assert execute(["simulate", str(job / "plan.json")]) == 1
    assert "give --profile, or put" in capsys.readouterr().err


def test_a_plan_for_another_model_is_refused(job, capsys):
    profile = Profile.load(job / "profile.json")
    best = best_plan(profile, profile.cluster)
    other = replace(best.tables[0], rows=9)
    for tables, told in (((), "of which the plan says nothing"), ((other,), "9 x 64 planned")):
        replace(best, tables=tables).save(job / "plan.json")
        assert execute(["simulate", str(job / "plan.json")]) == 1
        assert told in capsys.readouterr().err


def test_a_plan_that_names_modules_or_tables_of_another_model_is_refused(job, capsys):
    profile = Profile.load(job / "profile.json")
    best = best_plan(profile, profile.cluster)
    staged = replace(best, mesh={"pipe": 2, "data": 2})
    stages = {"embedding": 0, "body": 1}
    for plan, told in (
        (replace(staged, stages=stages | {"tail": 1}), "the plan's stages name 'tail', which that has not"),
        (replace(best, mesh={"model": 4}, tensor_parallel=("h.0",)), "the plan's tensor_parallel name 'h.0'"),
        (replace(best, tables=(*best.tables, replace(best.tables[0], name="items"))), "the plan has 'items' among"),
    ):
        plan.save(job / "plan.json")
        assert execute(["simulate", str(job / "plan.json")]) == 1
        assert told in capsys.readouterr().err
    replace(staged, stages=stages).save(job / "plan.json")
    simulated(job, capsys)
    assert execute(["simulate", str(job / "plan.json"), "--hosts", "1"]) == 1
    assert "axes have 2 ranks ({'pipe': 2}), which does not divide the 1 of 1 host x 1" in capsys.readouterr().err


def test_a_plan_that_names_its_model_is_for_no_other(job, capsys):
    best = ["plan", str(job / "profile.json"), "--anew", "-o", str(job / "plan.json")]
    assert execute(best) == 0
    capsys.readouterr()
    simulated(job, capsys)
    replace(Profile.load(job / "profile.json"), model="Others").save(job / "profile.json")
    assert execute(["simulate", str(job / "plan.json")]) == 1
    assert "it was made for 'Words', the profile is of 'Others'" in capsys.readouterr().err


def test_a_plan_can_name_its_profile(job, capsys):
    (job / "profile.json").rename(job / "measured.json")
    named = json.loads((job / "plan.json").read_text()) | {"profile": "measured.json"}
    (job / "plan.json").write_text(json.dumps(named))
    assert simulated(job, capsys)["model"] == "Words"


def test_units_are_those_of_networks():
    assert bandwidth("1Gbit") == bandwidth("0.125 GB/s") == bandwidth("125MB") == 1.25e8
    assert duration("1500ns") == duration("1.5us") == duration("1.5 µs") == pytest.approx(1.5e-6)
    with pytest.raises(UsageError):
        bandwidth("0Gbit")


def test_twelve_hundred_ranks_take_seconds(job, capsys):
    begin_s = time.process_time()
    found = simulated(job, capsys, "--hosts", "300", "--processes-per-host", "4", "--noise", "0.05")
    assert found["points"][0]["ranks"] == 1200
    assert time.process_time() - begin_s < 30
