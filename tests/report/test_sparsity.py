"""The section on sparsity: what is drawn, what is said, and when it is not there."""

import json
import re
from pathlib import Path

import pytest
from fake_run import Fake, make_run, write_json
from fake_sparsity import observation
from test_page import HOSTILE, page_of

HEADING = "Sparsity of the tables' gradients"
OBSERVED = (1, 2, 4, 8, 16, 32)


def observed_run(folder: Path, tables: dict[str, float], *, ranks: int = 4, steps: int = 40) -> Path:
    run = make_run(folder, Fake(ranks=ranks, steps=steps))
    with (run / "rank-0.jsonl").open("a") as log:
        for step in OBSERVED:
            for name, density in tables.items():
                log.write(json.dumps(observation(step, name, ranks=ranks, density=density)) + "\n")
    return run


def chart(html: str, name: str, drawing: str = "wide") -> str:
    start = html.index(f'<g id="{name}-{drawing}-figure_1"')
    return html[start : html.index("</svg>", start)]


def test_four_charts_and_a_table_of_numbers(tmp_path: Path) -> None:
    tables = {"source.weight": 0.05, "target.weight": 0.11}
    html, page = page_of(observed_run(tmp_path / "demo", tables))
    for text in (
        f"{HEADING} As observed in 6 steps on 4 ranks.",
        "Density over the steps",
        "Overlap between ranks",
        "Skew over contiguous parts",
        "Part 1 of target.weight holds 53% of the touched rows: skewness 2.1, where 1 is even and 4 the worst.",
        "Densification over the number of ranks",
        "".join(("27%", "3.0", "2.1", "allgather")),  # cells of one row
    ):
        assert text in page.text
    for name in ("density", "skewness", "densification"):
        drawn = chart(html, name)
        assert "var(--teal)" in drawn, "source.weight has the colour of its bytes"
        assert "#0000" not in drawn
    assert len(re.findall(r"fill: var\(--blue\)", chart(html, "overlap"))) == 2 * 4 * 3, "the diagonal is blank"
    assert chart(html, "overlap", "narrow") != chart(html, "overlap")


def test_without_an_observation_there_is_no_section(tmp_path: Path) -> None:
    _, page = page_of(make_run(tmp_path / "run", Fake(ranks=2, steps=9)))
    assert HEADING not in page.text


def test_one_process_is_told_that_it_has_no_other_rank(tmp_path: Path) -> None:
    _, page = page_of(make_run(tmp_path / "bare", Fake(ranks=1, steps=9)))
    assert "One process has no other rank to overlap with, so nothing was observed." in page.text
    html, page = page_of(observed_run(tmp_path / "observed", {"source.weight": 0.05}, ranks=1))
    assert "With one process there is no other rank to overlap with" in page.text
    assert chart(html, "density")
    assert "overlap-wide" not in html
    assert "Overlap between ranks" not in page.text
    assert "overlap 27%" not in page.text


def test_of_many_tables_the_largest_are_drawn_and_all_are_listed(tmp_path: Path) -> None:
    tables = {f"fields.{number}.weight": 0.4 * 0.8**number for number in range(26)}
    html, page = page_of(observed_run(tmp_path / "run", tables, ranks=2))
    assert "Drawn are the 6 of 26 tables whose touched rows hold the most bytes" in page.text
    assert "14 more tables" in page.text
    assert all(name in page.text for name in tables)
    assert chart(html, "overlap").count("fields.") == 6


def test_densities_far_apart_are_drawn_over_decades(tmp_path: Path) -> None:
    _, page = page_of(observed_run(tmp_path / "run", {"a.weight": 0.5, "b.weight": 0.001}))
    assert "% of a table's rows, logarithmic" in page.text
    _, page = page_of(observed_run(tmp_path / "alike", {"a.weight": 0.5, "b.weight": 0.05}))
    assert "logarithmic" not in page.text


@pytest.mark.parametrize("ranks", [2, pytest.param(17, marks=pytest.mark.slow), 64, 65])
def test_any_number_of_ranks_is_drawn(tmp_path: Path, ranks: int) -> None:
    html, page = page_of(observed_run(tmp_path / "run", {"a.weight": 0.05, "b.weight": 0.06}, ranks=ranks, steps=3))
    assert ("only the mean over all pairs is recorded" in page.text) == (ranks > 64)
    assert ("a cell is the mean of several" in page.text) == (16 < ranks <= 64)
    if ranks <= 64:
        cells = min(ranks, 16)
        assert len(re.findall(r"fill: var\(--blue\)", chart(html, "overlap"))) >= 2 * cells * (cells - 1)
    assert len(html) < 2_000_000


def test_tables_of_the_users_naming_are_escaped(tmp_path: Path) -> None:
    html, page = page_of(observed_run(tmp_path / "run", {HOSTILE: 0.05, "$x_^2": 0.06, "损失": 0.07}))
    assert "<script" not in html
    assert "script" not in page.elements
    assert "损失" in page.text


def test_an_odd_line_is_said_and_breaks_nothing(tmp_path: Path) -> None:
    run = observed_run(tmp_path / "run", {"source.weight": 0.05})
    with (run / "rank-0.jsonl").open("a") as log:
        log.write(json.dumps(observation(64) | {"parts": None}) + "\n" + json.dumps(observation(128))[:99])
    _, page = page_of(run)
    assert "One line about sparsity was not understood and left out." in page.text
    assert "One half-written line was skipped" in page.text


def test_the_choice_has_measured_beside_predicted(tmp_path: Path) -> None:
    _, page = page_of(observed_run(tmp_path / "run", {"source.weight": 0.05}))
    assert "densification 3.0, skewness 2.1" in page.text
    # Scheme, time predicted and measured, bytes predicted and measured, messages.
    assert re.search(r"allgather2\.5 ms2\.7 ms6\d\d kB6\d\d kB6 balanced3\.1 ms–6\d\d kB–6", page.text)


def test_a_plan_alone_explains_its_choice_too(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", Fake(ranks=2, steps=9, traffic=False))
    plan = json.loads((run / "plan.json").read_text())
    plan["tables"][0] |= {
        "measured": {"bytes": 840_000, "messages": 6, "seconds": 0.0026},
        "characteristics": {
            "density": 0.07,
            "overlap_ratio": 0.3,
            "densification_ratio": 1.7,
            "skewness_ratio": 1.4,
        },
    }
    plan["tables"][1] |= {"measured": None, "characteristics": None}
    write_json(run / "plan.json", plan)
    _, page = page_of(run)
    assert "7.0% of the rows a step, overlap 30%, densification 1.7, skewness 1.4" in page.text
    assert "".join(("allgather", "2.5 ms", "2.6 ms", "834 kB", "840 kB", "6")) in page.text
    assert HEADING not in page.text


def test_tables_on_different_numbers_of_ranks_are_drawn_together(tmp_path: Path) -> None:
    run = observed_run(tmp_path / "run", {"a.weight": 0.05})
    with (run / "rank-0.jsonl").open("a") as log:
        log.write(json.dumps(observation(64, "b.weight", ranks=2)) + "\n")
        log.write(json.dumps(observation(64, "c.weight", ranks=1)) + "\n")
    html, page = page_of(run)
    assert "on 4 ranks" in page.text
    assert "b.weight" in chart(html, "overlap")
    assert "c.weight" not in chart(html, "overlap")


def test_a_table_that_no_rank_touched_is_drawn(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", Fake(ranks=2, steps=9))
    nothing = {"rows_per_rank": [0, 0], "density": 0.0, "overlap_ratio": 0.0, "parts": [0.0, 0.0], "measured_s": None}
    with (run / "rank-0.jsonl").open("a") as log:
        log.write(json.dumps(observation(8, ranks=2) | nothing) + "\n")
    _, page = page_of(run)
    assert "source.weight8,000 × 2560%0% to 0%0%1.7" in page.text
