"""The page: complete alone, escaped, and drawn for every kind of run."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from fake_run import Fake, fail, make_run, write_json, write_lines

from tulle.errors import DataError
from tulle.report import write
from tulle.report.breakdown import traffic_bars
from tulle.report.folder import read
from tulle.report.panels import bytes_panel

HOSTILE = '<script>alert("tulle")</script>'


class Reader(HTMLParser):
    """Collects what a browser would load, every text and all ids; unclosed elements are an error."""

    VOID = frozenset({"meta", "br", "wbr", "path", "use", "rect", "link", "img"})

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: list[str] = []
        self.elements: list[str] = []
        self.text = ""
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "srcset", "action", "data"):
                self.links.append(value or "")
            if name == "id":
                self.ids.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def page_of(folder: Path, **options: Path) -> tuple[str, Reader]:
    html = write(folder, **options).read_text(encoding="utf-8")
    reader = Reader()
    reader.feed(html)
    assert reader.open == []
    reader.text = " ".join(reader.text.split())
    return html, reader


def outer_references(html: str) -> list[str]:
    """What a browser would fetch for this page: all that does not point into the page itself."""
    page = Reader()
    page.feed(html)
    targets = page.links + re.findall(r"url\(([^)]*)\)", html) + re.findall(r"https?:|@import", html)
    loading = [element for element in page.elements if element in ("script", "link", "img", "iframe", "base")]
    return loading + [target for target in targets if not (target.startswith("#") and target[1:] in page.ids)]


def test_the_page_needs_no_other_file(tmp_path: Path) -> None:
    html, page = page_of(make_run(tmp_path / "demo"))
    assert page.links, "the charts refer to their own markers"
    assert outer_references(html) == []
    assert len(page.ids) == len(set(page.ids))
    assert "var(--blue)" in html
    assert "#0000" not in html, "a colour that stands for one of the page's was not replaced"


@pytest.mark.parametrize(
    "outer",
    [
        '<a href="http://tulle">',
        '<img src="logo.png">',
        "<style>@import 'a.css'</style>",
        '<i style="background: url(a.png)">',
        '<use href="#absent"/>',
    ],
)
def test_an_outer_reference_would_be_found(outer: str) -> None:
    assert outer_references(f"<!doctype html><body>{outer}") != []


def test_the_page_shows_what_ran_and_its_key_figures(tmp_path: Path) -> None:
    _, page = page_of(make_run(tmp_path / "demo"))
    for text in (
        "examples/01_translate.py --steps 300 ran as 4 processes on localhost with 4 cores, mesh data=4 (gloo, cpu)",
        "with tulle 0.1.0, torch 2.13.0, Python 3.11.7, started on 21 November 2026, 02:00 UTC. It trained 300 steps.",
        "Final loss",
        "BLEU 26.8",
        "Tokens a second",
        "Peak memory 821 MB",
        "went into waiting for communication",
        "dense gradients all_reduce, 12 messages 7.3 MB",
        "source.weight allgather 8,000 rows × 256, 5.2% of the rows a step",
        "5.2% of the rows are touched in a step",
        "axis data: 310 µs latency, 1.2 GB/s",
        "after step 300",
        "Klicken Sie auf Einfügen",
        "learning_rate",
    ):
        assert text in page.text


def test_a_comparison_draws_the_other_curve_and_says_the_difference(tmp_path: Path) -> None:
    one = make_run(tmp_path / "one", Fake(ranks=1))
    html, page = page_of(make_run(tmp_path / "four", Fake(ranks=4)), compare=one)
    assert "baseline: 1 process" in page.text
    assert "this run: 4 processes" in page.text
    assert "Over 300 common steps the two curves are identical." in page.text
    assert "times the baseline's" in page.text
    assert loss_chart(html).count("var(--orange)") == 1
    _, page = page_of(make_run(tmp_path / "noisy", Fake(ranks=4, noise=0.1)), compare=one)
    assert re.search(r"differ by [\d.]+% on average and by at most [\d.]+% \(step \d+\)", page.text)


def test_without_a_comparison_there_is_no_other_curve(tmp_path: Path) -> None:
    html, page = page_of(make_run(tmp_path / "four"))
    assert "baseline" not in page.text
    assert "var(--orange)" not in loss_chart(html)


def loss_chart(html: str) -> str:
    start = html.index('<g id="loss-wide-figure_1"')
    return html[start : html.index("</svg>", start)]


def test_what_users_wrote_is_escaped(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "demo", Fake(ranks=2, steps=3))
    for name in ("run.json", "mesh.json", "plan.json"):
        (folder / name).write_text(hostile((folder / name).read_text()))
    fail(folder, error=HOSTILE)
    with (folder / "rank-0.jsonl").open("a") as log:
        traffic = {HOSTILE: {"scheme": HOSTILE, "bytes_sent": 5, "messages": 1}}
        log.write(json.dumps({"kind": "step", "step": 4, "step_s": 1, "traffic": traffic, "values": {HOSTILE: 1}}))
        log.write("\n" + json.dumps({"kind": "text", "step": 4, "name": HOSTILE, "text": HOSTILE}))
        log.write("\n" + json.dumps({"kind": "text", "step": 4, "name": "samples", "text": f"{HOSTILE}\ta\tb"}))
    html, page = page_of(folder)
    assert "<script" not in html
    assert "script" not in page.elements
    assert page.text.lower().count(HOSTILE) >= 10


def hostile(text: str) -> str:
    for word in ("examples/01_translate.py", "localhost", "gloo", "source.weight", "Tied to"):
        text = text.replace(word, json.dumps(HOSTILE)[1:-1])
    return text


def test_failures_come_first_with_their_traceback(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "demo", Fake(steps=87))
    fail(folder, 0, at=2.0, error="CommunicationError: rank 2 failed first")
    fail(folder, 2, at=1.0)
    _, page = page_of(folder)
    assert "Failed first: rank 2 after step 87 IndexError: row 8123 is out of range" in page.text
    assert "then rank 0: CommunicationError: rank 2 failed first" in page.text
    assert page.text.index("Traceback (most recent call last)") < page.text.index("Final loss")


def test_missing_loss_tokens_and_traffic_are_said_with_the_mend(tmp_path: Path) -> None:
    bare = Fake(ranks=2, steps=40, loss=False, tokens=False, traffic=False, texts=False, plan=False)
    _, page = page_of(make_run(tmp_path / "bare", bare))
    for text in (
        "No loss was recorded. Call tulle.log(loss=loss)",
        "No tokens were recorded. Call tulle.log(tokens=…)",
        "steps/s",
        "No traffic was recorded. Give the model and its optimizer to tulle.distribute",
        "No plan was recorded.",
    ):
        assert text in page.text


@pytest.mark.parametrize(
    "steps", [1, 2, *(pytest.param(steps, marks=pytest.mark.slow) for steps in (6, 89, 91)), 90, 401]
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_short_and_longer_runs_are_drawn(tmp_path: Path, ranks: int, steps: int) -> None:
    _, page = page_of(make_run(tmp_path / "run", Fake(ranks=ranks, steps=steps)))
    assert f"It trained {steps} step" in page.text
    assert ("One process sends nothing." in page.text) == (ranks == 1)


def test_a_run_that_failed_before_its_first_step_is_drawn(tmp_path: Path) -> None:
    write_json(tmp_path / "run.json", {"command": ["train.py"], "processes": 2})
    fail(tmp_path, 1)
    _, page = page_of(tmp_path)
    assert "It recorded no step." in page.text
    assert "Failed: rank 1" in page.text


def test_a_diverged_loss_is_said(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", Fake(ranks=1, steps=9, texts=False))
    log = folder / "rank-0.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for line in lines[6:]:
        line["loss"] = float("nan")
    log.write_text("\n".join(map(json.dumps, lines)))
    _, page = page_of(folder)
    assert "Final loss not finite" in page.text
    assert "not finite in 3 steps, first in step 7" in page.text


def test_what_is_sent_at_the_start_only_is_told_apart(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", Fake(ranks=2, steps=20))
    for rank in range(2):
        log = folder / f"rank-{rank}.jsonl"
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        lines[0]["traffic"]["initial parameters"] = {"scheme": "", "bytes_sent": 8_200_000, "messages": 1}
        write_lines(log, lines)
    _, page = page_of(folder)
    assert "At the start only, a rank sent in all: initial parameters 8.2 MB." in page.text
    assert "initial parameters 1 message" not in page.text


def test_one_large_step_leaves_the_others_their_scale(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", Fake(ranks=2, steps=20))
    for rank in range(2):
        log = folder / f"rank-{rank}.jsonl"
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        lines[0]["traffic"]["network probe"] = {"scheme": "", "bytes_sent": 345_000_000, "messages": 1}
        write_lines(log, lines)
    panel = bytes_panel(read(folder))
    assert "Step 1 sent 355 MB and reaches beyond the chart." in panel.caption
    assert max(map(float, re.findall(r">([0-9.]+)</text>", panel.chart.narrow))) <= 20, "steps, and MB of the others"


def test_tables_whose_scheme_was_given_share_one_table(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", Fake(ranks=2, steps=3))
    plan = json.loads((folder / "plan.json").read_text())
    given = {"rows": 50, "width": 16, "scheme": "rows", "reason": "given", "density": None, "candidates": []}
    plan["tables"] = [given | {"name": f"tables.{number}.weight"} for number in range(20)]
    write_json(folder / "plan.json", plan)
    _, page = page_of(folder)
    assert "50 × 16" in page.text
    assert "12 more tables" in page.text
    assert "marks the scheme that was chosen" not in page.text


def test_ranks_without_records_are_said(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", Fake(ranks=4, steps=9))
    (folder / "rank-2.jsonl").unlink()
    _, page = page_of(folder)
    assert "3 of 4 ranks left records in this folder." in page.text


def test_steps_without_times_are_drawn(tmp_path: Path) -> None:
    lines = [{"kind": "step", "step": step, "loss": 10.0**step} for step in range(1, 31)]
    write_lines(tmp_path / "rank-0.jsonl", lines)
    _, page = page_of(tmp_path)
    assert "No time was recorded for any step." in page.text
    assert "1e+30" in page.text


def test_names_that_matplotlib_would_read_as_formulas_are_drawn(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", Fake(ranks=1, steps=9))
    with (folder / "rank-0.jsonl").open("a") as log:
        log.write(json.dumps({"kind": "step", "step": 10, "step_s": 1, "values": {"$x_": 1.0, "损失": 2.0}}))
    _, page = page_of(folder)
    assert "$x_" in page.text
    assert "损失" in page.text


def test_a_long_run_stays_small(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "long", Fake(ranks=2, steps=5000, noise=0.3))
    html, _ = page_of(folder)
    assert len(html) < 1_000_000


def test_the_same_run_gives_the_same_page(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "demo", Fake(steps=30))
    first = write(folder, output=tmp_path / "a.html").read_bytes()
    assert write(folder, output=tmp_path / "b.html").read_bytes() == first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "b.html", "demo"]


def test_an_output_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "demo", Fake(ranks=1, steps=1))
    with pytest.raises(
        DataError, match=r"the report cannot be written to .*nowhere.*Give a file in a folder that exists"
    ):
        write(folder, output=tmp_path / "nowhere" / "report.html")


def test_small_traffic_shares_one_bar(tmp_path):
    run = read(make_run(tmp_path))
    for log in run.ranks:
        small = np.full(len(log.steps), 8.0)
        log.traffic.update({("row counts", ""): small, ("agreement", ""): small})
        log.traffic_messages.update({("row counts", ""): small, ("agreement", ""): small})
    *others, last = traffic_bars(run)
    assert (last.name, last.detail, last.value) == ("others", "agreement, row counts", "16 B")
    assert all(bar.name not in ("row counts", "agreement") for bar in others)


def test_an_output_that_is_a_folder_is_named(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "demo", Fake(ranks=1, steps=1))
    with pytest.raises(DataError, match=r"is a folder, expected a file for the report: .*report\.html"):
        write(folder, output=tmp_path)


def test_commands_on_the_page_can_be_typed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = make_run(tmp_path / "runs" / "a run", Fake(ranks=1, steps=1))
    write_json(folder / "run.json", {"command": ["train.py", "--layout", "batch:data, heads:model"]})
    _, page = page_of(folder)
    assert "train.py --layout 'batch:data, heads:model' ran as" in page.text
    assert "draw it again with tulle report 'runs/a run' ." in page.text.replace("'runs/a run'.", "'runs/a run' .")
