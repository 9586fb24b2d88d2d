"""The timelines of the ranks become one, in order, each under its name."""

import json
import logging

from tulle.cli.timeline import merge


def write(run, rank, *events):
    (run / f"timeline-rank-{rank}.json").write_text(json.dumps({"traceEvents": list(events)}))


def event(name, ts, **more):
    return {"name": name, "ph": "X", "ts": ts, "dur": 1, "pid": 77, "tid": 1, **more}


def test_events_are_sorted_and_belong_to_their_rank(tmp_path):
    write(tmp_path, 10, event("forward", 5), event("backward", 9))
    write(
        tmp_path, 2, event("forward", 7), {"name": "thread_name", "ph": "M", "pid": 77, "tid": 1, "args": {"name": "x"}}
    )
    merged = merge(tmp_path)
    assert merged == tmp_path / "timeline.json"
    events = json.loads(merged.read_text())["traceEvents"]
    assert [(e["ts"], e["pid"]) for e in events if e["ph"] == "X"] == [(5, 10), (7, 2), (9, 10)]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {2: "rank 2", 10: "rank 10"}
    assert [e["pid"] for e in events if e["name"] == "thread_name"] == [2]


def test_without_timelines_there_is_nothing_to_merge(tmp_path):
    assert merge(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_a_timeline_that_was_torn_is_left_out_and_said(tmp_path, caplog):
    write(tmp_path, 0, event("forward", 1))
    (tmp_path / "timeline-rank-1.json").write_text('{"traceEvents": [')
    with caplog.at_level(logging.WARNING):
        merge(tmp_path)
    assert "timeline-rank-1.json is not a whole timeline" in caplog.text
