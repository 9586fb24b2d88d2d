"""Many models on one machine, by `tulle.distribute` beside what torch has: `python benchmarks/one-machine`.

Each model trains some steps of each way in turn, in processes of its own. Results are saved after each: the command may
be ended at any time, and goes on with those that are missing.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "memory"))  # that of the processes it starts, too

# ruff: noqa: E402
import transformers
from many import MODELS
from sections import SECTIONS, run
from spawned import machine, row_of

RANKS = 2


def main() -> None:
    """Run all models of all sections, save after each, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--sections", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--turns", type=int, default=8, help="of each way (%(default)s)")
    parser.add_argument("--out", type=Path, default=HERE / "results.json", help="where results are, and go")
    options = parser.parse_args()
    kept: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {"rows": []}
    rows: list[dict[str, Any]] = kept["rows"]
    for section in options.sections:
        for name in options.models:
            if not any((row["section"], row["model"]) == (section, name) for row in rows):
                rows.append(row_of(run, RANKS, section, name, options.turns))
                print(f"| {section}: {name} |{cells(rows[-1])}", file=sys.stderr, flush=True)
                where = machine() | {"transformers": transformers.__version__}
                options.out.write_text(json.dumps({"machine": where, "rows": rows}, indent=1) + "\n")
    for sections in (("replicas", "full sharding"), ("split layers", "stages")):
        print(table(rows, sections))


def table(rows: list[dict[str, Any]], sections: Sequence[str]) -> str:
    """What some sections found, a line a model: milliseconds a step of both ways, and their ratio."""
    heads = [f" {', '.join(SECTIONS[section])}, ms | ratio |" for section in sections]
    lines = ["\n| model |" + "".join(heads), "|---|" + "---|---|" * len(sections)]
    for name in MODELS:
        mine = [next((row for row in rows if (row["model"], row["section"]) == (name, one)), None) for one in sections]
        if any(mine):
            lines.append(f"| {name} |" + "".join(map(cells, mine)))
    return "\n".join(lines)


def cells(row: dict[str, Any] | None) -> str:
    """Medians of turns, and the median of the ratios of turns beside each other; or what a way raised."""
    if row is None:
        return " | |"
    if "error" in row:
        return f" {row['error'].split(':')[0]} | |"
    base, ours = (row[way] for way in SECTIONS[row["section"]])
    ratio = median(mine / theirs for mine, theirs in zip(ours, base, strict=True))
    return f" {1e3 * median(base):.0f}, {1e3 * median(ours):.0f} | {ratio:.2f} |"


if __name__ == "__main__":
    main()
