"""The page of `benchmarks/overhead` shows what its raw results say."""

import json
from types import ModuleType

from benchmark_modules import BENCHMARKS, load

FOLDER = BENCHMARKS / "overhead"


def command(monkeypatch) -> ModuleType:
    """The benchmark as a module."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return load("overhead")


def test_its_tables_are_of_the_raw_results(monkeypatch):
    overhead, page = command(monkeypatch), (FOLDER / "README.md").read_text(encoding="utf-8")
    results = json.loads((FOLDER / "results.json").read_text(encoding="utf-8"))
    timed = [entry for entry in results["times"] if len(entry["runs"]) > 1]  # of a single run the page says less
    rows = [*map(overhead.time_row, timed), *map(overhead.memory_row, results["memory"])]
    assert len(rows) > 10
    assert [row for row in rows if row not in page] == []
    timed[0]["runs"][0]["ratio"]["median"] = 9.0
    assert overhead.time_row(timed[0]) not in page
