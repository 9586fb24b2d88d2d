"""A reproduction as Markdown and on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from evidence import Reproduction, Row, said


def markdown(found: Reproduction) -> str:
    """The page of one paper: numbers, plots, what they say, and all that was assumed."""
    lines = [
        f"# {found.citation}",
        "",
        *remarks(found),
        "",
        "## The paper's numbers and ours",
        "",
        *compared(found.rows),
    ]
    for panel in found.panels:
        lines += ["", f"![{panel.title}]({found.name}-{panel.name}.svg)"]
    for title, heads, cells in found.tables:
        lines += ["", f"## {title}", "", *table(heads, cells)]
    heads = ["constant", "value", "source"]
    constants = [
        (one.name, one.value, f"**fitted:** {one.source}" if one.is_fitted else one.source) for one in found.constants
    ]
    lines += ["", "## What is assumed", "", *table(heads, constants)]
    return "\n".join(lines) + "\n"


def remarks(found: Reproduction) -> list[str]:
    """What the numbers say, as a list."""
    return [f"- {remark}" for remark in found.remarks]


def compared(rows: Sequence[Row]) -> list[str]:
    """Published numbers beside ours."""
    cells: list[tuple[str, ...]] = []
    for row in rows:
        paper = (
            "" if row.paper is None else f"{'up to ' if row.paper.is_bound else ''}{said(row.paper.value, row.unit)}"
        )
        deviation = f"{row.deviation:+.0%}" if row.paper else ""
        source = f"{row.paper.where}, {row.paper.known}" if row.paper else ""
        cells.append((row.what, paper, said(row.ours, row.unit), deviation, str(row.role), source))
    return table(["", "paper", "ours", "deviation", "", "where in the paper"], cells)


def table(heads: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table."""
    rule = "|" + "---|" * len(heads)
    return [f"| {' | '.join(heads)} |", rule, *(f"| {' | '.join(row)} |" for row in cells)]
