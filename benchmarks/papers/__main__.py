"""Figures of five papers, reproduced with tulle's planner, cost functions and simulator: `python benchmarks/papers`.

Writes for each paper a page, its raw numbers as JSON and a plot a figure; needs no cluster and no network.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import densifying
import embrace
import mesh_tensorflow
import sagemaker
import zen
from drawing import draw
from evidence import Reproduction
from telling import compared, markdown, remarks

HERE = Path(__file__).parent
PAPERS: dict[str, Callable[[], Reproduction]] = {
    one.__name__: one.reproduce for one in (densifying, embrace, zen, mesh_tensorflow, sagemaker)
}


def main() -> None:
    """Reproduce what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=[*PAPERS], help="one paper")
    parser.add_argument("--json", action="store_true", help="print raw numbers instead of tables")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder for pages, plots and raw numbers")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    found = {name: reproduce() for name, reproduce in PAPERS.items() if options.only in (None, name)}
    for one in found.values():
        save(one, options.out)
    if options.json:
        json.dump({name: one.to_json() for name, one in found.items()}, sys.stdout, indent=1)
        return
    for one in found.values():
        print("\n".join([f"## {one.citation}", "", *compared(one.rows), "", *remarks(one), ""]))


def save(found: Reproduction, folder: Path) -> None:
    """Write one paper's page, numbers and plots."""
    (folder / f"{found.name}.md").write_text(markdown(found), encoding="utf-8")
    (folder / f"{found.name}.json").write_text(json.dumps(found.to_json(), indent=1) + "\n", encoding="utf-8")
    for panel in found.panels:
        draw(panel, folder / f"{found.name}-{panel.name}.svg")


if __name__ == "__main__":
    main()
