"""The plan may offer a sharded softmax; it names the layer, what it costs, and what to write."""

import torch
from torch import nn

from tulle.softmax.offer import MANY_ROWS, offers


def test_a_large_output_layer_is_offered_with_its_sizes():
    [text] = offers(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 100_000)), ranks=4)
    assert text.startswith("1 (Linear 8 x 100,000): each rank holds 3.2 MB of it")
    assert "tulle.ShardedSoftmax(100_000, 8, bias=True)" in text
    assert "holds 0.8 MB a rank" in text


def test_a_tied_layer_is_offered_however_small():
    model = nn.ModuleDict({"words": nn.Embedding(50, 4), "out": nn.Linear(4, 50, bias=False)})
    assert offers(model, ranks=2) == []
    model.out.weight = model.words.weight
    [text] = offers(model, ranks=2)
    assert "out (Linear 4 x 50, tied to words)" in text
    assert "tulle.ShardedSoftmax(weight=words.weight)" in text


def test_nothing_is_offered_for_layers_that_choose_among_few_or_are_frozen():
    assert offers(nn.Linear(8, MANY_ROWS - 1), ranks=2) == []
    assert offers(nn.Linear(8, MANY_ROWS).requires_grad_(requires_grad=False), ranks=2) == []


def test_an_offer_changes_nothing():
    model = nn.Sequential(nn.Linear(4, MANY_ROWS))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    offers(model, ranks=2)
    assert type(model[0]) is nn.Linear
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
