"""The pure parts of `benchmarks/end-to-end`: what is trained, how time is taken, and what is made of the results."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy
import pytest
import torch
from torch.nn.functional import cross_entropy

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
FOLDERS = [BENCHMARKS / name for name in ("sparse-sync/peers", "sparse-sync", "end-to-end")]


@pytest.fixture(autouse=True)
def benchmark_on_path(monkeypatch):
    """Its modules have plain names (`job`, `tables`): they are forgotten again, so that no other test meets them."""
    before = set(sys.modules)
    for folder in FOLDERS:
        monkeypatch.syspath_prepend(str(folder))
    yield
    for name in set(sys.modules) - before:
        if {*FOLDERS} & {*Path(getattr(sys.modules[name], "__file__", None) or "/").parents}:
            del sys.modules[name]


def small(name):
    """A workload of two ranks and three steps, and the smallest model of its kind."""
    import networks
    from job import TableShape, Workload

    counts = {"lm": 2, "translation": 3, "recommender": 3}
    generator = numpy.random.default_rng(0)
    tables = tuple(TableShape(f"table{number}", 40, 8) for number in range(counts[name]))
    tokens = networks.SENTENCE * 2 if name == "translation" else 2 * networks.WINDOW
    drawn = tuple(generator.integers(0, 40, (2, 3, tokens), dtype=numpy.int32) for _ in tables)
    networks.SIZES[name] = networks.Size(hidden=4, samples=0 if name == "recommender" else 10)
    return Workload(name, tables, drawn)


KINDS = ("lm", "translation", "recommender")


# What is trained


@pytest.mark.parametrize("kind", KINDS)
def test_dense_and_sparse_gradients_train_the_same_model(kind):
    import course
    import networks

    losses = []
    for sparse in (False, True):
        workload = small(kind)
        model = networks.build_model(workload, sparse=sparse)
        step = course.training_step(model, networks.make_optimizer(model))
        losses.append([step(networks.batch(workload, 1, number)).item() for number in range(3)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert len(set(losses[0])) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_have_batches_of_their_own_and_negatives_in_common(kind):
    import networks

    workload = small(kind)
    mine, others = (networks.batch(workload, rank, 0) for rank in (0, 1))
    assert not any(torch.equal(one, other) for one, other in zip(mine, others, strict=True))
    if kind != "recommender":
        negatives = networks.draw(40, 10, 0)
        for sought in (mine[-1], others[-1]):
            assert torch.equal(sought[: len(negatives)], negatives)


def test_the_sampled_loss_is_the_exact_one_where_every_row_is_drawn():
    import networks

    states, output = torch.randn(5, 8), networks.make_table(6, 8, sparse=True)
    targets = torch.tensor([0, 5, 2, 2, 1])
    sought = torch.cat([torch.arange(6), targets])
    found = networks.sampled_loss(states, sought, output, times=100_000)
    torch.testing.assert_close(found, cross_entropy(states @ output.weight.T, targets, reduction="none"))


def test_chances_are_those_with_which_rows_are_drawn():
    import networks

    drawn = torch.cat([networks.draw(50, 20, number) for number in range(4000)]).bincount(minlength=50) / 4000
    expected = networks.log_chance(torch.arange(50), 50, 20).exp()
    torch.testing.assert_close(drawn, expected, atol=0.03, rtol=0)


def test_padding_of_translations_counts_for_nothing():
    import networks
    from texts import fitted

    assert fitted([5, 0, 7]) == [5, 1, 7, *[networks.PAD] * (networks.SENTENCE - 3)]
    assert fitted([*range(1, 99)]) == [*range(1, networks.SENTENCE + 1)]
    workload = small("translation")
    model = networks.build_model(workload, sparse=False)
    source, target, sought = networks.batch(workload, 0, 0)
    sought[-10:] = networks.PAD  # the words that end the last sentence
    loss = model(source, target, sought)
    target[-1, -9:] = 7  # what follows them is predicted, and does not count
    assert model(source, target, sought).item() == pytest.approx(loss.item(), rel=1e-6)


# How time is taken


def test_steps_that_are_timed_stand_between_two_barriers_and_no_other(monkeypatch):
    import course
    import job

    events = []
    request = job.Request(small("lm"), steps=3, warmup=2)
    session = job.Session("some-way", 0, 2, (request,), Path())
    trained = course.Course(
        step=lambda batch: events.append("step") or torch.tensor(1.5), finish=lambda: events.append("finish")
    )
    timing, losses = course.train(session, request, trained, lambda: events.append("barrier"))
    assert events == ["step"] * 2 + ["barrier"] + ["step"] * 3 + ["finish", "barrier", "step"]
    assert losses == [1.5] * 6
    assert len(timing.seconds) == 1


# What is made of the results


def _run(step_s, *, losses=(3.0, 2.0), **more):
    return {
        "step_s": [step_s],
        "local_step_s": [0.5],
        "sent_bytes_per_step": {"mean": 2e6, "most": 3e6},
        "peak_resident_bytes": 10**9,
        "versions": {"torch": "2"},
        "more": {"losses": [*losses], "units_per_step": 100, **more},
    }


def _way(name, run, error=None):
    about = {"is_peer": not name.startswith("tulle"), "is_sharded": name == "split", "about": "moves"}
    return {**about, "workloads": {"lm": run} if run else {}, "errors": {"lm": error} if error else {}}


def _setting(*rounds):
    described = {"about": "text", "rows": 10, "tables": 2, "width": 8}
    machine = {"processor": "one", "cores": 4, "kernel": "6", "python": "3", "command": "run"}
    return {
        "hosts": 2,
        "rate": "1gbit",
        "measured_rate": {"there": 9e8},
        "left_out": [],
        "machine": machine,
        "workloads": {"lm": described},
        "rounds": [{name: _way(name, *runs) for name, runs in one.items()} for one in rounds],
    }


def test_the_headline_is_held_against_the_best_peer_within_a_round():
    import tables

    one = {"tulle-auto": (_run(1.0),), "fast": (_run(2.0),), "slow": (_run(9.0),), "split": (_run(1.5),)}
    other = {"tulle-auto": (_run(2.0),), "fast": (_run(6.0),), "slow": (_run(9.0),)}
    said = tables.headline([_setting(one, other)])
    assert "| 75 (50 to 100) | fast | 33 (17 to 50) | **2.50** (2.00 to 3.00) |" in said
    assert "| split (sharded) | 67 (67 to 67) | **1.50** (1.50 to 1.50) |" in said
    assert "slow" not in said


def test_a_way_that_fails_and_one_that_was_not_asked_are_told_apart():
    import tables

    rounds = _setting({"tulle-auto": (_run(1.0),), "broken": (None, "a\nsegfault | here"), "other": (None,)})["rounds"]
    assert tables.way_row(rounds, "broken", "lm")[:2] == ["broken", "failed: segfault / here"]
    assert tables.way_row(rounds, "other", "lm") is None
    assert "other" not in tables.workload_table(rounds, "lm")


def test_hidden_is_what_nobody_waited_for():
    import tables

    assert tables.hidden_share(_run(1.0, under_way_s=4.0, waited_s=1.0)) == 0.75
    assert tables.hidden_share(_run(1.0, under_way_s=0.0, waited_s=0.0)) is None
    assert tables.hidden_share(_run(1.0)) is None


def test_every_plan_that_was_taken_is_told_once():
    import tables

    runs = [_run(1.0, schemes={"a": scheme, "b": "ring"}) for scheme in ("rows", "rows", "ring")]
    assert tables.kept([*runs, _run(1.0)]) == "rows, ring"


def test_losses_tell_a_way_that_is_not_kept_in_step():
    import course
    import networks

    import tables

    workload = small("lm")

    def losses(ranks):
        model = networks.build_model(workload, sparse=False)
        step = course.training_step(_MeanOfRanks(model, ranks), networks.make_optimizer(model))
        return [step([networks.batch(workload, rank, number) for rank in ranks]).item() for number in range(3)]

    together = _run(1.0, losses=losses([0, 1]))
    rounded = _run(1.0, losses=[loss * (1 + 1e-6) for loss in losses([0, 1])])
    alone = _run(1.0, losses=losses([0]))
    assert tables.agreement(_setting({"one": (together,), "two": (rounded,)})["rounds"], "lm").startswith("All ways")
    ways = {"one": (together,), "two": (rounded,), "three": (alone,)}
    assert "not those of the other ways: three" in tables.agreement(_setting(ways)["rounds"], "lm")


class _MeanOfRanks(torch.nn.Module):
    """Trains on the mean of the ranks' losses, and gives rank 0's."""

    def __init__(self, model, ranks):
        super().__init__()
        self.model, self.ranks = model, ranks

    def forward(self, *batches):
        losses = [self.model(*batch) for batch in batches]
        mean = torch.stack(losses).mean()
        return losses[0].detach() + mean - mean.detach()


def test_the_report_is_written_from_results(tmp_path):
    from job import write_json

    import tables

    results, readme = tmp_path / "results", tmp_path / "README.md"
    write_json(results / "2x1gbit.json", _setting({"tulle-auto": (_run(1.0),), "peer": (_run(math.pi),)}))
    readme.write_text("# Title\n<!-- results: begin --><!-- results: end -->\nend\n")
    tables.write_tables(results, tmp_path)
    assert "| peer | 32 (32 to 32) | **3.14**" in readme.read_text()
    assert "All ways have the same losses" in readme.read_text()
    with pytest.raises(SystemExit, match="measure first"):
        tables.write_tables(tmp_path / "nowhere", tmp_path)


def test_only_the_recommender_is_trained_by_torchrec():
    import contenders

    ways = {way.name: way for way in contenders.our_ways(["tulle-dense", "tulle-rows-lookahead"])}
    assert [way.is_dense for way in ways.values()] == [True, False]
    assert [way.is_sharded for way in ways.values()] == [False, True]
    assert contenders.trains(ways["tulle-dense"], "lm")
    torchrec = contenders.Way("torchrec-row-wise", Path(), Path())
    assert [contenders.trains(torchrec, name) for name in ("lm", "recommender")] == [False, True]
