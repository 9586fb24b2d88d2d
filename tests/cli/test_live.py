"""What a person sees while it runs: a table on a terminal, plain lines elsewhere."""

import io
import json

import pytest
from rich.console import Console

from tulle.cli import live
from tulle.cli.live import LiveView, PlainView, rank_table, status_line
from tulle.cli.progress import RunProgress


@pytest.fixture
def progress(tmp_path):
    """Four ranks after step 12 of 300."""
    found = RunProgress(tmp_path)
    for rank in range(4):
        record = {"kind": "step", "step": 12, "step_s": 0.5, "wait_s": 0.05 * rank, "bytes_sent": 1_234_567}
        numbers = {"loss": 3.25, "tokens": 2048, "total_steps": 300}
        (tmp_path / f"rank-{rank}.jsonl").write_text(json.dumps(record | numbers) + "\n")
    found.update()
    return found


def console(**more):
    return Console(file=io.StringIO(), width=90, height=30, **more)


def shown(renderable):
    screen = console()
    screen.print(renderable)
    return [line.split() for line in screen.file.getvalue().splitlines()]


def test_the_table_has_a_row_for_each_rank(progress):
    rows = shown(rank_table(progress))
    assert rows[0] == ["rank", "step", "loss", "tokens/s", "sent/step", "waiting"]
    assert rows[1] == ["0", "12", "3.25", "4,096", "1.2", "MB", "0%"]
    assert rows[4] == ["3", "12", "3.25", "4,096", "1.2", "MB", "30%"]


def test_the_table_says_how_many_ranks_have_no_room(progress):
    rows = shown(rank_table(progress, room=3))
    assert [row[0] for row in rows] == ["rank", "0", "1", "2", "+1"]


def test_the_table_fits_any_terminal(progress):
    assert [row[0] for row in shown(rank_table(progress, room=-5))] == ["rank", "0", "+3"]


def test_the_status_line_has_the_numbers_of_the_run(progress):
    assert status_line(progress) == "[tulle] step 12 of 300 · loss 3.25 · 16,384 tokens/s"


def test_a_status_line_without_numbers_has_the_step(tmp_path):
    found = RunProgress(tmp_path)
    (tmp_path / "rank-0.jsonl").write_text('{"kind": "step", "step": 2}\n')
    found.update()
    assert status_line(found) == "[tulle] step 2"


def test_on_a_terminal_lines_appear_above_the_table(progress):
    screen = console(force_terminal=True, color_system=None)
    view = LiveView(screen)
    view.show_progress(progress)
    view.show_line("valid loss [3.2]")
    view.close()
    text = screen.file.getvalue()
    assert "step 12 of 300" in text
    assert text.index("sent/step") < text.index("valid loss [3.2]")


def test_elsewhere_a_status_line_comes_every_ten_seconds(progress, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(live.time, "monotonic", lambda: clock[0])
    output, status = console(), console()
    view = PlainView(output, status)
    for seconds in (105.0, 109.9, 110.0, 110.25, 119.0, 120.5, 151.0, 151.25):  # what is overdue is said once
        clock[0] = seconds
        view.show_progress(progress)
    view.show_line("of rank 0 [with brackets]")
    view.close()
    assert status.file.getvalue().count("[tulle] step 12 of 300") == 3
    assert output.file.getvalue() == "of rank 0 [with brackets]\n"


def test_lines_that_nobody_reads_any_more_do_not_end_the_watching(progress):
    class Left(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    view = PlainView(Console(file=Left()), console())
    view.show_line("of rank 0")
    view.close()
