"""The page of a forecast shows every cluster and every rank's timeline, and needs no other file."""

import re

import pytest

pytest.importorskip("matplotlib")
from tulle.report.forecast import bars, lanes, render
from tulle.simulate import Step, Task, run, telling_ranks, trace

STEP = Step(
    {"pipe": 2, "data": 2},
    (
        Task("forward <embedding>", "device", 1.0, stage=0),
        Task("send", "link", 0.5, (0,), stage=0, kind="pipe"),
        Task("forward head", "device", 1.0, (1,), stage=1),
        Task("something new", "link", 1.0, (2,), axis="data", kind="quantum"),
    ),
)


def point(ranks, step_s, **more):
    return {
        "hosts": ranks,
        "processes_per_host": 1,
        "ranks": ranks,
        "bandwidth_bytes_per_s": 1.25e8,
        "latency_s": 5e-5,
        "batch": 8 * ranks,
        "step_s": step_s,
        "computing_s": 1.0,
        "standing_by_kind_s": {"idle": 0.25, "dense": step_s - 1.25},
        "sent_bytes": 1_000_000,
        "samples_per_s": 8 * ranks / step_s,
        "efficiency": 1.25 / step_s,
        **more,
    }


def found(*points):
    table = {
        "name": "embedding.weight",
        "rows": 1000,
        "width": 8,
        "ranks": points[-1]["ranks"],
        "recorded_batches": 4,
        "density": 0.1,
        "overlap_ratio": 0.5,
        "densification_ratio": 3.0,
        "union_rows": 300,
        "exponent": 1.0,
    }
    return {"plan": "plan.json", "model": "Net", "scaling": "weak", "points": list(points), "tables": [table]}


def test_the_page_shows_every_cluster_and_stands_alone():
    page = render(found(point(1, 1.25), point(8, 2.0)), trace(run(STEP), telling_ranks(run(STEP))))
    for text in ("Net on 8 ranks", "8 hosts", "1 Gbit/s", "2,000 ms", "62%", "embedding.weight", "rank 2"):
        assert text in page
    assert not re.search(r'(?:src|href)="(?!#)', page), "no outer reference"
    assert "forward &lt;embedding&gt;" in page


def test_bars_are_as_long_as_steps_take():
    short, long = bars([point(1, 1.25), point(8, 2.0)])
    assert [segment.percent for segment in short.segments] == [pytest.approx(50.0), pytest.approx(12.5)]
    assert [segment.percent for segment in long.segments] == [
        pytest.approx(50.0),
        pytest.approx(37.5),
        pytest.approx(12.5),
    ]
    assert [segment.colour for segment in long.segments] == ["blue", "orange", "line"]


def test_lanes_are_those_of_devices_and_links():
    shown = lanes(trace(run(STEP), [0, 2]))
    assert [(lane.name, lane.resource) for lane in shown] == [
        ("rank 0", "device"),
        ("rank 0", "link"),
        ("rank 2", "device"),
        ("rank 2", "link"),
    ]
    send, new = shown[1].pieces
    assert (send.left, send.percent, send.colour) == (pytest.approx(100 / 3.5), pytest.approx(50 / 3.5), "plum")
    assert new.label == "something new: 1,000 ms"


def test_one_cluster_has_no_curve():
    assert "Scaling</h2>" not in render(found(point(8, 2.0)), trace(run(STEP), [0]))
