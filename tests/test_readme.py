"""The README keeps its word: its code runs, alone and on two processes, and its commands are there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """The fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def run(folder: Path, *command: str) -> str:
    """Run a command in `folder` and return what it printed."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """The README's first block, as the file that the text calls it."""
    path = tmp_path / "train.py"
    path.write_text(blocks("python")[0], encoding="utf-8")
    return path


def test_its_code_runs_alone(script):
    assert run(script.parent, sys.executable, "train.py") == ""


def test_its_code_runs_on_two_processes_and_reports_what_the_readme_shows(script):
    printed = run(
        script.parent, sys.executable, "-m", "tulle", "run", "--processes", "2", "--run-dir", "run", "train.py"
    )
    shown = blocks("text")[0]
    assert "[tulle] table 0.weight:" in printed
    for word in re.findall(r"^ {2}(\S.*?) {2,}", shown, flags=re.MULTILINE):  # the summary's left column
        assert word in printed
    assert (script.parent / "run" / "report.html").is_file()


def test_its_make_targets_are_there():
    wanted = set(re.findall(r"^make (\w+)", "\n".join(blocks("console")), flags=re.MULTILINE))
    known = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert wanted
    assert wanted <= known


def test_its_links_lead_somewhere():
    links = re.findall(r"\]\((?!https?://)([^)#]+)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
