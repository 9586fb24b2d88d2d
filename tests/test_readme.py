"""README and guides keep their word: code runs or can be pasted, commands are there, links lead somewhere."""

import ast
import builtins
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md"), *(ROOT / "benchmarks").glob("*/README.md")]


def blocks(language: str, text: str = README) -> list[str]:
    """The fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def unmade(code: str) -> set[str]:
    """Names that a program uses and nothing in it makes."""
    used, made = set(), set(dir(builtins))
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.Name(name, ast.Load()):
                used.add(name)
            case ast.Name(name) | ast.arg(name) | ast.FunctionDef(name) | ast.ClassDef(name):
                made.add(name)
            case ast.alias(name, other):
                made.add((other or name).split(".")[0])
    return used - made


def anchors(text: str) -> set[str]:
    """What links to headings of a page say behind `#`."""
    headings = re.findall(
        r"^#+ (.*)", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), flags=re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def dead_links(page: Path) -> list[str]:
    """The links of a page that lead nowhere, to files or to headings."""
    dead = []
    for link in re.findall(r"\]\((?!https?://)([^)\s]+)\)", page.read_text(encoding="utf-8")):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
            dead.append(f"{page.relative_to(ROOT)}: {link}")
    return dead


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


def test_links_of_all_pages_lead_somewhere(tmp_path):
    assert [link for page in PAGES for link in dead_links(page)] == []
    assert anchors("# By hand\n## `Plan`, and more") == {"by-hand", "plan-and-more"}


@pytest.mark.parametrize("page", [page.name for page in PAGES if page.parent == ROOT / "docs"])
def test_the_code_of_a_guide_can_be_pasted_from_top_to_bottom(page):
    code = "\n".join(blocks("python", (ROOT / "docs" / page).read_text(encoding="utf-8")))
    assert unmade(code) == set()
    assert unmade(code + "\nprint(nothing_makes_this)") == {"nothing_makes_this"}
