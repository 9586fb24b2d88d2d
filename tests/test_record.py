"""Under `tulle run` each rank writes one line a step, with what was logged in the step that it belongs to."""

import copy
import json
import math
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import models
import tulle
from models import Words, batches, build
from ranks import on_ranks
from tulle import record
from tulle.comm import traffic
from tulle.errors import DataError
from tulle.sync import SCHEMES

SECONDS = ("step_s", "forward_s", "backward_s", "optimizer_s", "wait_s", *record.WAITS)
FIELDS = {"kind", "step", "at", *SECONDS, "bytes_sent", "messages", "traffic", "memory_peak_bytes"}


@contextmanager
def recording(folder: Path, *, timeline: bool = False) -> Iterator[None]:
    """What the launcher sets for a rank, until the end of its process."""
    rank, size = dist.get_rank(), dist.get_world_size()
    launch = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "localhost", "MASTER_PORT": 1, "TULLE_RUN_DIR": folder}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (launch | ({"TULLE_TIMELINE": 1} if timeline else {})).items():
            patch.setenv(name, str(value))
        record.current.cache_clear()
        traffic.take_labels()  # the process has run other tests
        traffic.take_spans()
        try:
            yield
        finally:
            recorder = record.current()
            assert recorder is not None
            recorder.close()
            record.current.cache_clear()
            traffic.is_tracing = False


def lines(folder: Path, kind: str = "step") -> list[dict]:
    """What this rank has written."""
    text = (folder / f"rank-{dist.get_rank()}.jsonl").read_text(encoding="utf-8")
    return [line for line in map(json.loads, text.splitlines()) if line["kind"] == kind]


def nothing(step: int, model: torch.nn.Module) -> None:
    pass


def train(steps: int, *, before=nothing, after=nothing, checkpoint: Path | None = None):
    """Train `Words` with 4 samples a rank, and call `before` and `after` around each update."""
    mesh = tulle.init(data=-1)
    model = build(Words, 0)
    model, optimizers = tulle.distribute(model, models.sparse_adam_and_adam(model), mesh)
    if checkpoint is not None:
        tulle.load(checkpoint, model, optimizers)
    for step, ids in enumerate(batches(steps, 4 * mesh.size), start=1):
        model(ids.chunk(mesh.size)[mesh.rank]).backward()
        before(step, model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        after(step, model)
    return model, optimizers


@on_ranks(1, 2)
def test_a_step_has_its_fields_and_they_fit_together(tmp_path):
    with recording(tmp_path):
        train(4)
    steps = lines(tmp_path)
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    for line in steps:
        assert set(line) == FIELDS | {"loss"}, "a model that returns one scalar is recorded with it"
        assert all(line[name] >= 0 for name in SECONDS)
        assert line["forward_s"] + line["backward_s"] + line["optimizer_s"] <= line["step_s"] * 1.001
        assert sum(line[name] for name in record.WAITS) <= line["wait_s"] * 1.001
        assert all(line[name] <= line[name.replace("wait_", "")] * 1.001 for name in record.WAITS)
        assert line["memory_peak_bytes"] > 1_000_000
        assert math.isfinite(line["loss"])
    assert [line["at"] for line in steps] == sorted(line["at"] for line in steps)


@on_ranks(2)
def test_what_was_waited_for_before_the_record_began_is_no_part_of_its_first_step(tmp_path):
    traffic.wait_s += 1e6
    try:
        with recording(tmp_path):
            train(1)
    finally:
        traffic.wait_s -= 1e6
    assert lines(tmp_path)[0]["wait_s"] < 1e3


@on_ranks(2)
def test_traffic_is_by_table_and_adds_up(tmp_path):
    with recording(tmp_path):
        train(3)
    for step, line in enumerate(lines(tmp_path), start=1):
        assert {"words.weight", "tags.weight", "dense gradients"} <= set(line["traffic"])
        words = line["traffic"]["words.weight"]
        ids = batches(3, 8)[step - 1].chunk(2)[dist.get_rank()]
        assert words["rows"] == len(set(ids.flatten().tolist()) - {0}), "distinct rows, without padding"
        assert words["scheme"] in SCHEMES
        assert line["traffic"]["dense gradients"]["scheme"] == "all_reduce"
        if step > 1:  # what was sent before the first step belongs to it
            in_all = sum(entry["bytes_sent"] for entry in line["traffic"].values())
            assert in_all == pytest.approx(line["bytes_sent"], abs=len(line["traffic"]))
            assert line["bytes_sent"] > 0
            assert line["messages"] > 0
            assert line["wait_s"] > 0


@on_ranks(1, 2)
def test_what_is_logged_belongs_to_its_step(tmp_path):
    def before(step, model):
        tulle.log(loss=torch.tensor(10.0 * step), tokens=3, before=step)
        tulle.log(tokens=torch.tensor(4))

    def after(step, model):
        tulle.log(tokens=1, after=torch.tensor(step + 0.5), total_steps=9)

    with recording(tmp_path):
        train(3, before=before, after=after)
    for line in lines(tmp_path):
        step = line["step"]
        assert line["loss"] == 10.0 * step
        assert line["tokens"] == 8, "tokens of several calls add up"
        assert line["total_steps"] == 9
        assert line["values"] == {"before": step, "after": step + 0.5}


@on_ranks(1)
def test_an_evaluation_between_two_steps_ends_none(tmp_path):
    def evaluate(step, model):
        model.eval()
        with torch.no_grad():
            valid_loss = model(batches(1, 4)[0])
        model.train()
        tulle.log(valid_loss=valid_loss)

    with recording(tmp_path):
        train(3, after=evaluate)
    steps = lines(tmp_path)
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert all("valid_loss" in line["values"] for line in steps)
    assert all(line["loss"] != line["values"]["valid_loss"] for line in steps), "the loss is that of the training"


@on_ranks(1)
def test_the_loss_of_a_step_is_the_mean_of_those_that_its_micro_batches_log(tmp_path):
    @tulle.step(micro_batches=4)
    def train_step(model, batch):
        loss = model(batch)
        loss.backward()
        tulle.log(loss=loss, tokens=batch.numel())
        return loss

    with recording(tmp_path):
        mesh = tulle.init(data=-1)
        model = build(Words, 0)
        model, [optimizer] = tulle.distribute(model, models.sgd(model), mesh)
        means = []
        for ids in batches(2, 4):
            means.append(train_step(model, ids).mean().item())
            optimizer.step()
    assert [line["loss"] for line in lines(tmp_path)] == pytest.approx(means, rel=1e-12)
    assert [line["tokens"] for line in lines(tmp_path)] == [ids.numel() for ids in batches(2, 4)]


@on_ranks(1)
def test_micro_batches_are_one_step_and_its_forwards_add_up(tmp_path):
    with recording(tmp_path):
        mesh = tulle.init(data=-1)
        model = build(Words, 0)
        model, [optimizer] = tulle.distribute(model, models.sgd(model), mesh)
        for ids in batches(2, 4):
            for part in ids.chunk(4):
                model(part).backward()
            optimizer.step()
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]


@on_ranks(1)
def test_texts_have_lines_of_their_own(tmp_path):
    def after(step, model):
        if step == 2:
            tulle.log(samples="ein Hut\n→ a hat", bleu=12.5)

    with recording(tmp_path):
        train(3, after=after)
    assert lines(tmp_path, "text") == [{"kind": "text", "step": 2, "name": "samples", "text": "ein Hut\n→ a hat"}]
    assert [line.get("values") for line in lines(tmp_path)] == [None, {"bleu": 12.5}, None]


@on_ranks(1)
def test_values_of_a_run_without_steps_are_kept(tmp_path):
    with recording(tmp_path):
        tulle.log(bleu=30.0)
    assert lines(tmp_path, "values") == [{"kind": "values", "step": 1, "values": {"bleu": 30.0}}]


@on_ranks(1)
def test_a_process_that_a_script_forks_writes_nothing_when_it_ends(tmp_path):
    with recording(tmp_path):
        train(2)
        recorder = record.current()
        child = os.fork()
        if not child:
            recorder.close()  # as at the end of a process
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert [line["step"] for line in lines(tmp_path)] == [1], "the second is open still"
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]


@on_ranks(1)
def test_a_finished_step_is_on_the_disk_when_the_next_forward_begins(tmp_path):
    seen = []

    def before(step, model):
        seen.append(len(lines(tmp_path)))

    with recording(tmp_path):
        train(3, before=before)
    assert seen == [0, 1, 2], "a run that is killed loses its open step only"


@on_ranks(1, 2)
def test_mesh_and_plan_are_written_by_rank_0(tmp_path):
    with recording(tmp_path):
        train(2)
    dist.barrier()
    mesh = json.loads((tmp_path / "mesh.json").read_text())
    assert mesh["axes"] == {"data": dist.get_world_size()}
    assert (mesh["backend"], mesh["device"]) == ("gloo", "cpu")
    plan = tulle.Plan.load(tmp_path / "plan.json")
    assert [table.name for table in plan.tables] == ["words.weight", "tags.weight", "never.weight"]
    if dist.get_world_size() > 1:
        assert plan.schemes["words.weight"] != "auto", "the file has what the first gradients chose"


@on_ranks(1, 2)
def test_counting_goes_on_after_a_checkpoint(tmp_path):
    model, optimizers = train(1)
    tulle.save(tmp_path / "checkpoint.pt", model, optimizers, step=7)
    with recording(tmp_path):
        train(2, checkpoint=tmp_path / "checkpoint.pt")
    with recording(tmp_path):
        train(1, checkpoint=tmp_path / "checkpoint.pt")
    assert [line["step"] for line in lines(tmp_path)] == [8, 9, 8], "a resumed run appends"


@on_ranks(1, 2)
def test_the_timeline_is_a_chrome_trace(tmp_path):
    with recording(tmp_path, timeline=True):
        train(2)
    events = json.loads((tmp_path / f"timeline-rank-{dist.get_rank()}.json").read_text())["traceEvents"]
    names = [event["name"] for event in events]
    assert names.count("forward") == names.count("backward") == 2
    assert {"SparseAdam.step", "Adam.step"} <= set(names)
    assert ("wait: dense gradients" in names) == (dist.get_world_size() > 1)
    at_us = [line["at"] * 1e6 for line in lines(tmp_path)]
    for event in events:
        assert {"name", "ph", "pid", "tid", "ts", "dur", "args"} <= set(event)
        assert (event["ph"], event["pid"]) == ("X", dist.get_rank())
        assert event["dur"] >= 0
        assert at_us[0] - 60e6 < event["ts"] < at_us[-1] + 60e6, "on the clock of 1970, which ranks share"


@on_ranks(1)
def test_without_a_timeline_none_is_written(tmp_path):
    with recording(tmp_path):
        train(1)
    assert not list(tmp_path.glob("timeline*"))


@on_ranks(1, 2)
def test_outside_tulle_run_nothing_is_hooked_and_log_does_nothing():
    assert record.current() is None
    model, optimizers = train(1, before=lambda step, model: tulle.log(loss=1.0, tokens=3, text="nobody reads it"))
    assert not model._forward_hooks
    assert {hook.__module__ for hook in model._forward_pre_hooks.values()} <= {"tulle.distribute.adopted"}
    assert not any(one._optimizer_step_post_hooks for one in optimizers)


@on_ranks(1)
def test_a_copy_of_the_model_is_not_recorded(tmp_path):
    def average(step, model):
        copied = copy.deepcopy(model)  # an average of the weights, say
        copied.train()
        copied(batches(1, 4)[0])
        tulle.log(after=step)

    with recording(tmp_path):
        train(2, after=average)
    assert [line["values"] for line in lines(tmp_path)] == [{"after": 1}, {"after": 2}]


@on_ranks(1)
def test_a_model_that_was_pickled_under_tulle_run_loads_without_it(tmp_path):
    with recording(tmp_path):
        model, _ = train(1)
        pickled = pickle.dumps(model)
    assert record.current() is None
    loaded = pickle.loads(pickled)
    ids = batches(1, 4)[0]
    assert torch.equal(loaded(ids), model(ids))


@on_ranks(1, 2)
def test_without_distribute_a_logged_loss_ends_a_step(tmp_path):
    with recording(tmp_path):
        for step in (1, 2, 3):
            tulle.log(loss=torch.tensor(12.0 / step), tokens=5, total_steps=3)
            tulle.log(after=step)
    steps = lines(tmp_path)
    assert [(line["step"], line["loss"], line["tokens"]) for line in steps] == [(1, 12.0, 5), (2, 6.0, 5), (3, 4.0, 5)]
    assert [line["values"] for line in steps] == [{"after": 1}, {"after": 2}, {"after": 3}]
    assert all(line["step_s"] >= 0 for line in steps)


@on_ranks(1)
def test_a_number_is_recorded_as_it_was_when_it_was_logged(tmp_path):
    def after(step, model):
        total = torch.tensor(float(step), requires_grad=True)
        tulle.log(total=total, narrow=np.float32(0.5), absent=None)
        total.detach().zero_()

    with recording(tmp_path):
        train(2, after=after)
    assert [line["values"] for line in lines(tmp_path)] == [{"total": step, "narrow": 0.5} for step in (1.0, 2.0)]


@on_ranks(1)
def test_what_is_no_number_is_refused_where_it_is_logged(tmp_path):
    with recording(tmp_path):
        with pytest.raises(DataError, match=r"given loss=a tensor of shape \[3\], expected one number"):
            tulle.log(loss=torch.ones(3))
        with pytest.raises(DataError, match=r"given accuracy=\[1\], expected one number"):
            tulle.log(accuracy=[1])


@on_ranks(1)
def test_a_forward_that_raises_is_not_the_end_of_the_record(tmp_path):
    def raise_once(step, model):
        if step == 1:
            with pytest.raises(Exception, match="range"):
                model(torch.full((1, 3), 10**6))

    with recording(tmp_path):
        train(3, after=raise_once)
    assert all({"loss", "backward_s"} <= line.keys() and line["forward_s"] > 0 for line in lines(tmp_path))


def test_a_rank_that_slurm_started_has_a_record_of_its_own(tmp_path, monkeypatch):
    for name, value in {"PROCID": "1", "NTASKS": "2", "JOB_NODELIST": "n[1-2]"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("TULLE_RUN_DIR", str(tmp_path))
    record.current.cache_clear()
    try:
        tulle.log(loss=1.0)
        record.current().close()
    finally:
        record.current.cache_clear()
    assert [path.name for path in tmp_path.glob("*.jsonl")] == ["rank-1.jsonl"]


@on_ranks(1)
def test_a_profile_of_a_resumed_run_ends_after_as_many_steps_of_its_own(tmp_path):
    with pytest.MonkeyPatch.context() as patch, recording(tmp_path):
        patch.setenv(record.STOP_AFTER, "2")
        recorder = record.current()
        assert recorder is not None
        recorder.resume(100)
        tulle.log(loss=1.0)
        with pytest.raises(SystemExit):
            tulle.log(loss=1.0)
    assert [line["step"] for line in lines(tmp_path)] == [101, 102]
