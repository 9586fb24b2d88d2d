"""Every legal layout of a model gives one process's loss, gradients and optimizer steps."""

import math
import random
from itertools import product

import pytest
import torch
from named_models import MODELS, LanguageModel, is_legal, legal_layouts, run, worst_difference

import tulle
from ranks import run_on_ranks
from tulle import named as tn

TOLERANCE = 1e-12


def agree(model, sizes, layouts):
    """The layouts that differ from one process, and by how much."""
    torch.set_num_threads(1)
    mesh = tulle.init(**sizes)
    expected = run(MODELS[model])
    wrong = {}
    for rules in layouts:
        with tn.use(mesh, rules):
            difference = worst_difference(run(MODELS[model]), expected)
        if not difference < TOLERANCE:
            wrong[str(tn.Layout(rules))] = difference
    return len(layouts), wrong


def all_agree(model, sizes, layouts, deadline_s=120.0):
    results = run_on_ranks(
        math.prod(sizes.values()), agree, model=model, sizes=sizes, layouts=layouts, deadline_s=deadline_s
    )
    assert all(wrong == {} for _, wrong in results), results[0]


@pytest.mark.parametrize("model", MODELS)
def test_a_layout_is_legal_if_no_two_dimensions_that_meet_share_an_axis(model):
    legal = {tn.Layout(rules) for rules in legal_layouts(MODELS[model], {"model": 2})}
    for number, chosen in enumerate(product([False, True], repeat=len(MODELS[model].dims))):
        if number % 29 == 0:
            rules = {dim.name: "model" for dim, split in zip(MODELS[model].dims, chosen, strict=True) if split}
            assert is_legal(MODELS[model], {"model": 2}, rules) == (tn.Layout(rules) in legal)


def test_every_layout_of_the_language_model_over_two_ranks_agrees():
    all_agree("language model", {"model": 2}, legal_layouts(LanguageModel, {"model": 2}))


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("sizes", [{"model": 2}, {"model": 4}], ids=str)
def test_every_layout_over_one_axis_agrees(model, sizes):
    all_agree(model, sizes, legal_layouts(MODELS[model], sizes))


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_every_layout_over_two_axes_agrees(model):
    sizes = {"data": 2, "model": 2}
    layouts = legal_layouts(MODELS[model], sizes)
    for first in range(0, len(layouts), 100):
        all_agree(model, sizes, layouts[first : first + 100])


def over_both_axes(model):
    """The legal layouts over 2 x 2 that split a dimension over both axes together."""
    layouts = legal_layouts(MODELS[model], {"data": 2, "model": 2}, together=2)
    return [rules for rules in layouts if any("+" in axes for axes in rules.values())]


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_every_layout_that_splits_a_dimension_over_both_axes_agrees(model):
    layouts = over_both_axes(model)
    for first in range(0, len(layouts), 100):
        all_agree(model, {"data": 2, "model": 2}, layouts[first : first + 100])


@pytest.mark.parametrize("model", MODELS)
def test_some_layouts_that_split_a_dimension_over_both_axes_agree(model):
    all_agree(model, {"data": 2, "model": 2}, random.Random(0).sample(over_both_axes(model), 4))


@pytest.mark.parametrize("model", MODELS)
def test_some_layouts_over_two_axes_agree(model):
    layouts = legal_layouts(MODELS[model], {"data": 2, "model": 2})
    all_agree(model, {"data": 2, "model": 2}, random.Random(0).sample(layouts, 8))


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_some_layouts_over_three_axes_agree(model):
    sizes = {"data": 2, "model": 2, "more": 2}
    layouts = legal_layouts(MODELS[model], sizes)
    drawn = random.Random(0).sample(layouts, 30)
    for first in range(0, len(drawn), 10):  # eight ranks share few cores
        all_agree(model, sizes, drawn[first : first + 10])
