"""Files that are no plan, or no profile, are refused with the cause and its place."""

import functools
import json
import math
import operator
import re

import pytest

from profiles import profile_of
from tulle import Plan
from tulle.cost import Network
from tulle.errors import PlanError
from tulle.sync import SCHEMES
from tulle.workload import Profile


@pytest.mark.parametrize("kind", [Plan, Profile])
def test_a_file_that_is_missing_is_named_once(kind, tmp_path):
    path = tmp_path / "no.json"
    told = re.escape(f"cannot read a {kind.__name__.lower()} from {str(path)!r}: No such file or directory")
    with pytest.raises(PlanError, match=told) as raised:
        kind.load(path)
    assert str(raised.value).count("no.json") == 1


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b'{"format": 1', b"\xff\xfe", b"not JSON", b"[" * 10**5],
    ids=lambda content: repr(content[:16]),
)
def test_a_file_that_is_no_json_is_named(content, tmp_path):
    (tmp_path / "plan.json").write_bytes(content)
    with pytest.raises(PlanError, match=r"cannot read a plan from '.*plan.json': "):
        Plan.load(tmp_path / "plan.json")


def test_a_folder_is_no_plan(tmp_path):
    with pytest.raises(PlanError, match=r"cannot read a plan from .*[Dd]irectory"):
        Plan.load(tmp_path)


def test_a_run_folder_is_no_profile_but_has_one(tmp_path):
    with pytest.raises(PlanError, match=r"cannot read a profile from .*[Dd]irectory.*: give the profile.json that"):
        Profile.load(tmp_path)


NETWORK = {"latency_s": 3e-4, "bandwidth_bytes_per_s": 1.2e9}
TABLE = {"name": "words.weight", "rows": 8000, "width": 256, "scheme": "allgather", "density": 0.1, "candidates": []}
GOOD = {"format": 1, "mesh": {"data": 4}, "bucket_bytes": 1024, "network": NETWORK, "tables": [TABLE]}


def test_the_json_that_the_next_tests_break_is_good():
    assert Plan.from_json(GOOD).schemes == {"words.weight": "allgather"}
    assert Plan.from_json(GOOD).network == Network(3e-4, 1.2e9), "what an older version did not measure costs nothing"


@pytest.mark.parametrize(
    ("parsed", "cause"),
    [
        ([], r"it is \[\], expected an object of a Plan"),
        ("auto", "it is 'auto', expected an object of a Plan"),
        ({}, "format is not there"),
        (GOOD | {"format": 2}, "format is 2, expected 1"),
        (GOOD | {"mesh": 4}, "mesh is 4, expected an object of numbers by name"),
        (GOOD | {"mesh": {"data": "four"}}, "mesh.data is 'four', expected a whole number from 1"),
        (GOOD | {"mesh": {"data": 2.5}}, "mesh.data is 2.5"),
        (GOOD | {"mesh": {"data": True}}, "mesh.data is True"),
        (GOOD | {"bucket_bytes": 0}, "bucket_bytes is 0, expected a whole number from 1"),
        (GOOD | {"bucket_bytes": None}, "bucket_bytes is None"),
        (GOOD | {"bucket_bytes": math.inf}, "bucket_bytes is inf"),
        (GOOD | {"micro_batch": 8}, "'micro_batch' is no entry of a Plan: it has .*, micro_batches, "),
        (GOOD | {"tables": [TABLE | {"placement": "rows"}]}, r"'placement' at tables\[0\] is no entry of a TablePlan"),
        (GOOD | {"tables": 3}, "tables is 3, expected a list of objects of a TablePlan"),
        (GOOD | {"tables": [TABLE, "words.weight"]}, r"tables\[1\] is 'words.weight', expected an object"),
        (
            GOOD | {"tables": [TABLE | {"scheme": "zen"}]},
            rf"tables\[0\].scheme: unknown scheme 'zen', .* auto, rows, columns, {', '.join(SCHEMES)}",
        ),
        (GOOD | {"tables": [TABLE | {"rows": "many"}]}, r"tables\[0\].rows is 'many', expected a whole number from 0"),
        (GOOD | {"tables": [{"name": "words.weight"}]}, r"tables\[0\].rows is not there"),
        (
            GOOD | {"tables": [TABLE | {"candidates": [{"scheme": "allgather"}]}]},
            r"tables\[0\].candidates\[0\].bytes is not there",
        ),
        (GOOD | {"tables": [TABLE | {"characteristics": 3}]}, r"tables\[0\].characteristics is 3"),
        (GOOD | {"network": {"latency_s": 3e-4}}, "network.bandwidth_bytes_per_s is not there"),
        (GOOD | {"network": NETWORK | {"latency_s": "fast"}}, "network.latency_s is 'fast', expected a number from 0"),
        (GOOD | {"network": NETWORK | {"latency_s": -1e-3}}, "network.latency_s is -0.001, expected a number from 0"),
        (
            GOOD | {"network": NETWORK | {"bandwidth_bytes_per_s": 0}},
            "network.bandwidth_bytes_per_s is 0, expected a number above 0",
        ),
        (
            GOOD | {"network": NETWORK | {"inside": NETWORK | {"all_reduce_bytes_per_s": -1.0}}},
            "network.inside.all_reduce_bytes_per_s is -1.0, expected a number above 0",
        ),
        (GOOD | {"network": NETWORK | {"local_ranks": 0}}, "network.local_ranks is 0, expected a whole number from 1"),
        (GOOD | {"network": NETWORK | {"speed": 1}}, "'speed' at network is no entry of a Network"),
        (GOOD | {"tables": [TABLE | {"density": "high"}]}, r"tables\[0\].density is 'high', expected a number from 0"),
        (GOOD | {"tables": [TABLE | {"density": 7}]}, r"tables\[0\].density is 7, expected a number from 0 to 1"),
        (
            GOOD | {"tables": [TABLE | {"characteristics": {"overlap_ratio": 7}}]},
            r"tables\[0\].characteristics.overlap_ratio is 7, expected a number from 0 to 1",
        ),
        (
            GOOD | {"tables": [TABLE | {"measured": {"bytes": 1, "messages": 1, "seconds": math.inf}}]},
            r"tables\[0\].measured.seconds is inf, expected a number from 0",
        ),
        (GOOD | {"wire_dtype": "fp4"}, "unknown wire_dtype 'fp4'"),
        (GOOD | {"offers": "none"}, "offers is 'none', expected a list of strings"),
        (GOOD | {"stages": {"h.0": "last"}}, "stages.h.0 is 'last', expected a whole number from 0"),
        (GOOD | {"stages": {"h.0": 1.7}}, "stages.h.0 is 1.7, expected a whole number from 0"),
        (GOOD | {"micro_batches": 0}, "micro_batches is 0, expected a whole number from 1"),
        (GOOD | {"micro_batches": "8"}, "micro_batches is '8'"),
        (
            GOOD | {"pipeline_schedule": "zigzag"},
            "the pipeline_schedule 'zigzag', expected one of 1f1b, eager-1f1b, zb-h1, gpipe",
        ),
        (GOOD | {"memory": "small"}, "memory: it is 'small', expected an object of a Memory"),
        (GOOD | {"memory": {"precision": "int3"}}, "memory: .*the precision 'int3', expected None or bf16 or fp16"),
        (GOOD | {"memory": {"full_shard": True, "shard_optimizer": True}}, "full_shard and shard_optimizer"),
        (GOOD | {"memory": {"full_shard": "false"}}, "full_shard='false', expected True, False or 'host'"),
        (GOOD | {"memory": {"recompute": [1]}}, r"memory: recompute is \[1\], expected a list of strings"),
        (GOOD | {"memory": {"recomputed": ["h.0"]}}, "'recomputed' is no entry of a Memory"),
        (GOOD | {"prediction": 3}, "prediction is 3, expected an object of a Prediction"),
        (GOOD | {"prediction": {"step_s": 0.0}}, "prediction.step_s is 0.0, expected a time"),
    ],
)
def test_json_that_is_no_plan_is_refused_with_the_cause(parsed, cause, tmp_path):
    (tmp_path / "plan.json").write_text(json.dumps(parsed))
    with pytest.raises(PlanError, match=rf"plan.json' is not a plan .*{cause}.*: write it with Plan.save"):
        Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("path", "value", "cause"),
    [
        (("format",), 2, "format is 2, expected 1"),
        (("batch",), 0, "batch is 0, expected a whole number from 1"),
        (("modules",), [], r"modules is \[\], expected one module or more"),
        (("modules", 1, "forward_s"), math.nan, r"modules\[1\].forward_s is nan, expected a number from 0"),
        (("modules", 1, "reads"), {"embed": -5}, r"modules\[1\].reads.embed is -5, expected a whole number from 0"),
        (("modules", 1, "split"), {"share": 2}, r"modules\[1\].split.share is 2, expected a number from 0 to 1"),
        (("modules", 1, "flops"), 3, r"'flops' at modules\[1\] is no entry of a ModuleProfile"),
        (("step_s",), -1.0, "step_s is -1.0, expected a number from 0"),
        (("fixed_share",), 1.5, "fixed_share is 1.5, expected a number from 0 to 1"),
        (("lookahead",), "yes", "lookahead is 'yes', expected true or false"),
        (("optimizer", "state_share"), None, "optimizer.state_share is None, expected a number from 0"),
        (("tables", 0, "rows"), "many", r"tables\[0\].rows is 'many', expected a whole number from 0"),
        (("tables", 0, "rows"), 10, r"tables\[0\].stream\[0\]\[0\] has rows that are not distinct, .* and below 10"),
        (
            ("tables", 0, "module"),
            "nowhere",
            r"tables\[0\].module is 'nowhere', expected one of the modules: embed, ",
        ),
        (
            ("tables", 0, "placements"),
            ["cubes"],
            r"tables\[0\].placements is .*, expected some of rows, columns",
        ),
        (("tables", 0, "stream"), [["AAAA"]], r"tables\[0\].stream\[0\] cannot be read \("),
        (("cluster", "hosts"), 0, "cluster.hosts is 0, expected a whole number from 1"),
        (("cluster", "machine", "flop_per_s"), 0.0, "cluster.machine.flop_per_s is 0.0, expected a number above 0"),
        (("cluster", "machine", "slowdown"), 0.5, "cluster.machine.slowdown is 0.5, expected a number from 1"),
        (("cluster", "across", "latency_s"), -1.0, "cluster.across.latency_s is -1.0, expected a number from 0"),
        (("networks",), {"data": {"latency_s": 1e-3}}, "networks.data.bandwidth_bytes_per_s is not there"),
    ],
)
def test_json_that_is_no_profile_is_refused_with_the_cause(path, value, cause, tmp_path):
    parsed = json.loads(json.dumps(profile_of().to_json()))
    *outer, last = path
    functools.reduce(operator.getitem, outer, parsed)[last] = value
    (tmp_path / "profile.json").write_text(json.dumps(parsed))
    with pytest.raises(PlanError, match=rf"cannot read a profile from .*{cause}"):
        Profile.load(tmp_path / "profile.json")


def test_a_profile_in_a_plans_place_is_named_and_a_plan_in_a_profiles(tmp_path):
    profile_of().save(tmp_path / "profile.json")
    with pytest.raises(PlanError, match=r"profile.json' is a profile, expected a plan: make one of it with tulle plan"):
        Plan.load(tmp_path / "profile.json")
    Plan.from_json(GOOD).save(tmp_path / "plan.json")
    with pytest.raises(PlanError, match=r"plan.json' is a plan, expected a profile: make one with tulle profile"):
        Profile.load(tmp_path / "plan.json")
