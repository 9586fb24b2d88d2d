"""Cross entropy of scores that are split over words is that of whole ones."""

import pytest
import torch
from split_layers import model_axis
from split_training import ids, numbers, square
from torch import nn
from torch.nn import functional

from ranks import on_ranks
from tulle import tensor_parallel
from tulle.errors import ModelError
from tulle.tensor_parallel.loss import CausalLoss


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_cross_entropy_of_split_scores_is_that_of_whole_ones(reduction, smoothing):
    axis = model_axis()
    scores, targets = 5 * numbers(7, 11, seed=0), ids(7, seed=1, words=11)
    targets[3] = -100
    whole = scores.clone().requires_grad_()
    part = scores.tensor_split(axis.size, 1)[axis.rank].clone().requires_grad_()
    options = {"reduction": reduction, "label_smoothing": smoothing}
    expected = functional.cross_entropy(whole, targets, **options)
    found = tensor_parallel.cross_entropy(part, targets, axis, words=11, **options)
    assert (found - expected).abs().max() < 1e-12
    square(expected).backward()
    square(found).backward()
    assert (part.grad - whole.grad.tensor_split(axis.size, 1)[axis.rank]).abs().max() < 1e-12
    with pytest.raises(ModelError, match=r"scores \[7, 12\] for 7 targets"):
        tensor_parallel.cross_entropy(numbers(7, 12, seed=0), targets, axis, words=11)


@on_ranks(2)
@pytest.mark.parametrize("count", [None, 5, torch.tensor(5)])
def test_the_loss_of_causal_models_is_a_mean_or_is_divided_by_what_the_trainer_counts(count):
    axis = model_axis()
    scores, labels = numbers(2, 4, 11, seed=0), ids(2, 4, seed=1, words=11)
    found = CausalLoss(axis)(scores.tensor_split(2, -1)[axis.rank], labels, 11, num_items_in_batch=count)
    reduction = "mean" if count is None else "sum"
    expected = functional.cross_entropy(scores[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction=reduction)
    torch.testing.assert_close(found, expected / (count or 1))


@on_ranks(2)
def test_what_is_no_word_is_refused_as_by_torch():
    axis = model_axis()
    words = tensor_parallel.apply(nn.Embedding(10, 4), axis, smallest_bytes=0)
    for other in (-1, 10, 13):
        with pytest.raises(IndexError, match="index out of range"):
            words(torch.tensor([1, other]))
        with pytest.raises(RuntimeError, match="out of bounds"):
            tensor_parallel.cross_entropy(numbers(2, 5, seed=0), torch.tensor([1, other]), axis, words=10)


@on_ranks(2)
def test_scores_of_half_precision_are_summed_in_float32():
    axis = model_axis()
    scores, targets = numbers(16, 4000, seed=0).bfloat16(), ids(16, seed=1, words=4000)
    found = tensor_parallel.cross_entropy(scores.tensor_split(2, 1)[axis.rank], targets, axis, words=4000)
    torch.testing.assert_close(found, functional.cross_entropy(scores.float(), targets), rtol=1e-5, atol=1e-6)
