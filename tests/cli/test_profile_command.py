"""`tulle profile` ends a script after some steps and shows what was observed."""

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from profiles import profile_of
from tulle.cli import main
from tulle.cli.profile import costs_table, looks_table, modules_table
from tulle.profiling.measure import NOWHERE
from tulle.report import read
from tulle.report.characteristics import observed_tables
from tulle.workload import ModuleProfile, OptimizerProfile, Profile

pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # torchrun's

# Records what a script that trains a table would, without training: the commands are under test here.
SCRIPT = """
import json, os, shutil, sys
rank, run = int(os.environ["RANK"]), os.environ["TULLE_RUN_DIR"]
if rank == 0: shutil.copy("made.json", f"{run}/{os.environ['TULLE_PROFILE']}")
every, steps = int(os.environ["TULLE_OBSERVE_EVERY"]), int(os.environ["TULLE_STOP_AFTER"])
def cost(scheme, sent, seconds): return {"scheme": scheme, "bytes": sent, "messages": 2, "seconds": seconds}
with open(f"{run}/rank-{rank}.jsonl", "a") as file:
    for step in range(1, steps + 1):
        file.write(json.dumps({"kind": "step", "step": step, "at": 1e12, "step_s": 0.1}) + "\\n")
        if rank == 0 and step % every == 0:
            schemes = [cost("densify", 9e6, 0.009), cost("ring", 2e6, 0.004), cost("allgather", 1e6, 0.002),
                       cost("block", 3e6, 0.005)]
            file.write(json.dumps({"kind": "characteristics", "step": step, "table": "words.weight",
                "num_rows": 32000, "width": 512, "value_bytes": 4, "rows_per_rank": [1000, 1100],
                "density": 0.03 + step / 1000, "overlap_ratio": 0.27, "overlap": [[1.0, 0.27], [0.27, 1.0]],
                "densification_curve": [1.0, 1.7], "densification_ratio": 1.7, "skewness_ratio": 1.9,
                "parts": [0.95, 0.05], "scheme": "allgather", "candidates": schemes,
                "measured_s": 0.0022, "measured_bytes": 1.1e6, "network": None}) + "\\n")
if "--fail" in sys.argv: raise ValueError("bad batch")
raise SystemExit(0)
"""
SILENT = 'import os; run, rank = os.environ["TULLE_RUN_DIR"], os.environ["RANK"]; open(f"{run}/rank-{rank}.jsonl", "w")'


@pytest.fixture
def profile(tmp_path, monkeypatch, capsys, one_thread):
    """Profile a script on two ranks; return exit code, stdout, stderr and the run folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")

    def start(script, *options, arguments=(), processes=2):
        (tmp_path / "train.py").write_text(script)
        profile_of(0).save(tmp_path / "made.json")
        code = main(
            ["profile", "--processes", str(processes), "--run-dir", "out", *options, "train.py", *arguments],
        )
        output = capsys.readouterr()
        return code, output.out, output.err, tmp_path / "out"

    return start


def test_a_profile_shows_each_table_and_where_the_report_lies(profile):
    code, out, err, run = profile(SCRIPT, "--every", "10", "--steps", "30")
    assert (code, "Traceback" in err) == (0, False)
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "words.weight 32,000 x 512 4.0% to 6.0% 27% 1.7 1.9" in lines
    assert lines.index("● allgather 2 ms 2.2 ms 1 MB 1.1 MB") == lines.index("words.weight") + 1
    assert lines.index("ring 4 ms – 2 MB –") == lines.index("words.weight") + 2
    assert "densify" not in out, "the dearest of four candidates is left to the report"
    assert "Report: out/report.html" in lines
    assert "Sparsity of the tables" in (run / "report.html").read_text()


def test_the_script_learns_how_often_and_how_long(profile):
    said = 'import os; print(os.environ["TULLE_OBSERVE_EVERY"], os.environ["TULLE_STOP_AFTER"])'
    assert profile(said)[1].startswith("10 50\n")
    assert profile(said, "--every", "3", "--steps", "7")[1].startswith("3 7\n")
    assert profile(said, "--steps", "4")[1].startswith("4 4\n"), "a short profile observes its last step"


def test_json_is_one_object(profile):
    code, out, _, run = profile(SCRIPT, "--json", "--steps", "20")
    assert code == 0
    found = json.loads(out)
    assert (found["steps"], found["failure"], found["run"]) == (20, None, str(run))
    table = found["tables"]["words.weight"]
    assert (table["scheme"], table["overlap_ratio"], table["measured"]["seconds"]) == ("allgather", 0.27, 0.0022)
    assert [one["scheme"] for one in table["candidates"]] == ["allgather", "ring", "block", "densify"]


def test_a_script_that_fails_is_reported_as_by_run(profile):
    code, out, err, _ = profile(SCRIPT, "--steps", "5", arguments=["--fail"])
    assert code == 1
    assert "ValueError: bad batch" in err
    assert "words.weight" not in out


def test_a_script_without_tables_is_told_how_they_are_observed(profile):
    code, out, _, _ = profile(SILENT)
    assert code == 1, "no profile was made"
    assert "nn.Embedding(..., sparse=True)" in " ".join(out.split())


def test_one_process_is_told_that_it_needs_more(profile):
    code, out, _, _ = profile(SILENT, processes=1)
    assert code == 1
    assert "One process has nobody to synchronize with" in " ".join(out.split())


def test_a_profile_of_another_script_in_the_same_folder_is_not_taken_for_this_ones(profile):
    assert profile(SCRIPT)[0] == 0
    code, out, err, run = profile(SILENT, "--json")
    assert (code, json.loads(out)["profile"]) == (1, None)
    assert "No steps were recorded" in err
    assert (run / "previous-profile.json").exists()


@pytest.mark.parametrize("words", [["--steps", "0"], ["--every", "0"], ["--steps", "many"]])
def test_numbers_that_cannot_be_are_refused(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    assert main(["profile", *words, "train.py"]) == 2
    assert words[0] in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.parametrize("width", [80, 100, 200])
def test_the_tables_fit_the_terminal(tmp_path, width):
    line = {
        "kind": "characteristics", "step": 8, "table": "encoder.layers.0.embeddings.words.weight",
        "num_rows": 10_131_227, "width": 128, "rows_per_rank": [1] * 8, "density": 1.2e-7, "overlap_ratio": 0.5,
        "densification_curve": [1.0] * 8, "densification_ratio": 1.0, "skewness_ratio": 8.0, "parts": [0.125] * 8,
        "scheme": "recursive_doubling", "measured_s": 0.0123, "measured_bytes": 123_456_789,
        "candidates": [{"scheme": "recursive_doubling", "bytes": 123_456_789, "messages": 3, "seconds": 0.0119}],
    }  # fmt: skip
    (tmp_path / "rank-0.jsonl").write_text(json.dumps(line) + "\n")
    tables = observed_tables(read(tmp_path))
    output = io.StringIO()
    console = Console(file=output, width=width, soft_wrap=True)
    for table in (looks_table(tables), costs_table(tables)):
        console.print(table)
    text = output.getvalue()
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text, "nothing is cut"
    for number in ("10,131,227 x 128", "12 ms", "123 MB", "50%", "8.0"):
        assert number in text


@pytest.mark.parametrize("width", [80, 200])
def test_the_modules_fit_the_terminal(width):
    modules = [
        ModuleProfile(f"encoder.layers.{n}.attention.key_value", n / 1e3, n / 1e3, 1e9, 10**6) for n in range(20)
    ]
    found = Profile("Net", 8, tuple(modules), (), OptimizerProfile(2.0, 1e-9), NOWHERE, 0.5, 10**9)
    output = io.StringIO()
    Console(file=output, width=width).print(modules_table(found))
    text = output.getvalue()
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text, "nothing is cut"
    assert "8 others" in text
    assert "step of 500 ms" in text
    assert "lookahead" not in text
    assert str(modules_table(replace(found, lookahead=True)).caption).endswith("The loop goes through tulle.lookahead.")


TRAINS = """
import torch, tulle
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(500, 8, sparse=True), nn.Linear(8, 1)

    def forward(self, ids):
        return self.out(self.words(ids)).pow(2).mean()

mesh = tulle.init()
torch.manual_seed(0)
model = Model()
optimizers = [torch.optim.SparseAdam(model.words.parameters()), torch.optim.SGD(model.out.parameters(), lr=0.1)]
model, optimizers = tulle.distribute(model, optimizers, mesh)
generator = torch.Generator().manual_seed(mesh["data"].rank)
for _ in range(1000):
    model(torch.randint(0, 500, (64,), generator=generator)).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
raise AssertionError("the profile should have ended it")
"""


def test_a_script_that_trains_is_observed_and_ended(profile):
    code, out, err, run = profile(TRAINS, "--json", "--every", "2", "--steps", "8")
    assert code == 0, err
    found = json.loads(out)
    assert (found["steps"], found["failure"]) == (8, None)
    assert [module["name"] for module in found["modules"]] == ["words", "out"]
    profile_made = Profile.load(run / "profile.json")
    assert (found["profile"], found["step_s"]) == (str(run / "profile.json"), profile_made.step_s)
    assert [len(step) for step in profile_made.tables[0].stream] == [2, 2, 2], "ranks of three steps"
    table = found["tables"]["words.weight"]
    assert (table["rows"], table["width"], table["ranks"]) == (500, 8, 2)
    # 64 draws of 500 rows: 1 - (1 - 1/500)^64 = 12.0% of the rows, of which two ranks share about as many.
    assert table["density"] == pytest.approx(0.12, rel=0.15)
    assert table["lowest_density"] <= table["density"] <= table["highest_density"]
    assert table["overlap_ratio"] == pytest.approx(0.12, abs=0.1)
    assert table["densification_ratio"] == pytest.approx(2 - 0.12, abs=0.1)
    assert 1 <= table["skewness_ratio"] < 1.5
    assert table["scheme"] in {one["scheme"] for one in table["candidates"]}
    assert table["predicted"]["seconds"] > 0
    assert table["measured"]["seconds"] > 0
    assert table["measured"]["bytes"] == pytest.approx(table["predicted"]["bytes"], rel=0.1)
    assert "Sparsity of the tables" in (run / "report.html").read_text()
