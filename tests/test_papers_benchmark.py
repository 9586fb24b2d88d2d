"""`benchmarks/papers`: the papers' own curves are met, tulle does no worse, and stored results are the code's."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

PAPERS = Path(__file__).parents[1] / "benchmarks" / "papers"


@pytest.fixture(autouse=True)
def papers_on_path(monkeypatch):
    """Its modules have plain names (`evidence`, `zen`): they are forgotten again, so that no other test meets them."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(PAPERS))
    yield
    for name in set(sys.modules) - before:
        if PAPERS in Path(getattr(sys.modules[name], "__file__", None) or "/").parents:
            del sys.modules[name]


# Densifying


def test_gather_and_reduce_scale_as_the_paper_says():
    import densifying_job as paper

    found = {
        n: paper.weak_efficiency(paper.weak(n), way(paper.weak(n)))
        for n, way in ((16, paper.gather), (32, paper.gather), (1200, paper.reduce))
    }
    assert found == pytest.approx({16: 84, 32: 75, 1200: 91}, rel=0.02)  # fitted
    reduced = paper.weak_efficiency(paper.weak(32), paper.reduce(paper.weak(32)))
    assert reduced == pytest.approx(95, rel=0.05)  # not fitted


def test_a_slower_network_would_not_meet_the_papers_curve():
    import densifying_job as paper

    slower = paper.weak(1200, paper.Fitted(all_reduced_bytes_per_s=0.8e9))
    assert paper.weak_efficiency(slower, paper.reduce(slower)) < 0.95 * 91


def test_buffers_are_as_large_as_the_papers():
    import densifying_job as paper

    assert 64 * paper.weak(64).slices_bytes == pytest.approx(11.4e9, rel=0.01)
    assert pytest.approx(139e6, rel=0.01) == paper.TABLE_BYTES


def test_the_plan_scales_weakly_and_strongly_at_least_as_the_paper():
    import densifying_job as paper

    many = paper.weak(1200)
    assert paper.weak_efficiency(many, paper.planned(many)) >= 91
    base_s, most_s = (paper.strong(n).seconds(paper.planned(paper.strong(n))) for n in (32, 400))
    assert paper.strong_efficiency(most_s, 400, base_s) >= 65


# Zen


@pytest.mark.parametrize(("growth", "rounds", "balanced"), [(1.0, 4.0, 2.0), (16.0, 15.0, 17.0)])
def test_zens_equations_hold_at_full_and_at_no_overlap(growth, rounds, balanced):
    """In units of 2 d M: with full overlap HC sends log n, BP less than 2; without any n - 1 and (n - 1)(1 + 1 / n)."""
    from elements import Elements

    density = 0.01
    densities = [density * (1 + (growth - 1) * i / 15) for i in range(16)]
    tables = Elements(1.0, densities, skewness=1.0)
    assert tables.hierarchical / (2 * density) == pytest.approx(rounds)
    assert tables.balanced / (2 * density) == pytest.approx(15 / 16 * balanced)


def test_gathering_loses_to_all_reduce_from_one_by_density_on():
    import zen

    assert zen.crossing(zen.NMT, lambda one: one.allgather) == pytest.approx(1 / zen.NMT.density, abs=1)


def test_skewed_owners_never_send_more_than_all():
    from elements import Elements

    assert Elements(1.0, [0.1, 0.2], skewness=100.0).blocks == pytest.approx(1.0)  # as an all-reduce of two


def test_the_fitted_law_densifies_as_the_nmt_case_study_says():
    import zen

    study = zen.one_gpu_a_machine(zen.NMT, 128)
    assert 1 - study.balanced / study.all_reduce == pytest.approx(0.36, abs=0.01)


# Mesh-TensorFlow


def test_models_have_as_many_parameters_as_the_papers():
    import mesh_tensorflow as paper

    ours = [paper.LanguageModel(one.scale).billions for one in paper.TRAINED]
    assert ours == pytest.approx([one.billions for one in paper.TRAINED], rel=0.03)


def test_the_largest_model_gets_the_papers_rules_on_its_mesh():
    import mesh_tensorflow as paper

    largest = paper.TRAINED[-1]
    assert paper.is_theirs(paper.best(largest.scale, largest.mesh), largest)


# SageMaker


def test_sagemakers_cut_puts_every_module_on_one_of_its_devices():
    import sagemaker
    from tree_cut import TreeCut

    for model in sagemaker.MODELS.values():
        stages = TreeCut(model).cut(8)
        assert set(stages) == {leaf.name for leaf in model.leaves}
        assert set(stages.values()) <= set(range(8))


def test_the_exact_partition_is_never_slower_than_sagemakers():
    import sagemaker
    from tree_cut import TreeCut

    for model in sagemaker.MODELS.values():
        theirs, ours = TreeCut(model, 0.2).cut(4), sagemaker.exact(model, 4)
        assert sagemaker.slowest(model, ours) <= sagemaker.slowest(model, theirs) * (1 + 1e-9)


# All


def test_a_deviation_is_told_with_its_cause_only_if_it_is_large():
    from evidence import Known, Published, Role, Row, explain_deviation

    row = Row("speed", 3.0, "x", Published(2.0, "table 1", Known.READ), Role.CHECKED)
    assert explain_deviation(row, cause="noise") == "speed: 3 x against 2 x (+50%). Likely cause: noise."
    assert "noise" not in explain_deviation(row, cause="noise", tolerance=0.5)


def test_every_fitted_row_has_a_constant_that_was_fitted():
    for path in PAPERS.glob("results/*.json"):
        found = json.loads(path.read_text())
        is_fitted = any(constant["is_fitted"] for constant in found["constants"])
        assert is_fitted == any(row["role"] == "fitted" for row in found["rows"]), path.name


@pytest.mark.slow
@pytest.mark.parametrize("paper", ["densifying", "embrace", "zen", "mesh_tensorflow", "sagemaker"])
def test_stored_results_are_what_the_code_gives(paper):
    import importlib

    fresh = importlib.import_module(paper).reproduce().to_json()
    stored = json.loads((PAPERS / "results" / f"{paper}.json").read_text())
    assert [row["what"] for row in stored["rows"]] == [row["what"] for row in fresh["rows"]]
    assert [row["ours"] for row in stored["rows"]] == pytest.approx([row["ours"] for row in fresh["rows"]], rel=0.01)
