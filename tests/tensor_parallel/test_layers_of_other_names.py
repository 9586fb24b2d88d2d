"""Layers of classes that nobody knows by name are split where their forward is that of torch's, or only calls it."""

import logging

import pytest
import torch
from split_training import check_exact, ids
from torch import nn
from torch.nn import functional

import tulle
from ranks import on_ranks
from tulle import tensor_parallel
from tulle.errors import ModelError
from tulle.mesh import Axis

WORDS = 10


class OwnFirstValues(nn.Linear):
    def reset_parameters(self):
        nn.init.normal_(self.weight, std=0.1)
        if self.bias is not None:
            nn.init.ones_(self.bias)


class ScaledWords(nn.Embedding):
    """As BART's and Gemma's, with the offset of positions that some have."""

    def forward(self, words, offset=0):
        return super().forward(words + offset) * torch.tensor(4.0).to(self.weight.dtype)


class Head(nn.Module):
    """As BERT's: the bias of its layer has a second name, which forward does not read."""

    def __init__(self, words):
        super().__init__()
        self.dense, self.norm = OwnFirstValues(8, 8), nn.LayerNorm(8)
        self.decoder = nn.Linear(8, WORDS)
        self.decoder.weight = words
        self.bias = self.decoder.bias

    def forward(self, hidden):
        return self.decoder(self.norm(self.dense(hidden).tanh()))


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = ScaledWords(WORDS, 8, padding_idx=0)
        self.head = Head(self.words.weight)

    def forward(self, words):
        return self.head(self.words(words, 1))


def words_loss(model, step):
    words = ids(2, 6, seed=step, words=WORDS - 1)
    return functional.cross_entropy(model(words).flatten(0, 1), words.flatten())


@on_ranks(2, 3)
def test_layers_of_other_names_and_a_head_that_names_its_bias_again_are_split():
    torch.manual_seed(0)
    model = LanguageModel().double()
    check_exact(model, words_loss, smallest_bytes=0)
    cut = tensor_parallel.placements(model)
    assert {name for name, _ in model.named_parameters(remove_duplicate=False)} - {*cut} == {
        "head.norm.weight",
        "head.norm.bias",
    }
    assert model.head.bias is model.head.decoder.bias
    state = model.state_dict()
    assert state["head.bias"].shape == state["head.decoder.bias"].shape == (WORDS,)


@on_ranks(2)
def test_a_second_name_is_refused_where_forward_reads_it():
    class Reads(Head):
        def forward(self, hidden):
            return super().forward(hidden) + self.bias

    model = nn.Sequential(nn.Embedding(WORDS, 8), Reads(nn.Parameter(torch.ones(WORDS, 8))))
    assert tensor_parallel.known(model, smallest_bytes=0, ranks=2) == ["0", "1.dense"]
    model[0].weight = model[1].decoder.weight
    assert tensor_parallel.known(model, smallest_bytes=0, ranks=2) == ["1.dense"]
    with pytest.raises(ModelError, match=r"1\.bias is tied to a parameter that was split, but the Reads stays whole"):
        tensor_parallel.apply(model, tulle.init(model=2)["model"], select=["1.decoder", "0"])


class PastSuper(nn.Embedding):
    def forward(self, words):
        return nn.Embedding.forward(self, words)


class ReadsRows(nn.Embedding):
    def forward(self, words):
        return super().forward(words) + self.weight.mean(0)


class ReadsAll(nn.Embedding):
    def forward(self, words):
        return super().forward(words) * sum(p.norm() for p in self.parameters())


class LooksUpPastForward(nn.Embedding):
    """As ProphetNet's positions, where a method that other modules call looks up, too."""

    def forward(self, words):
        return super().forward(words), words

    def look_up(self, words):
        return super().forward(words)


class Adapted(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.low = nn.Parameter(torch.ones(1))


class Squared(nn.Linear):
    def forward(self, input):
        return super().forward(input) ** 2


def test_what_may_compute_something_else_stays_whole():
    tables = [PastSuper(8, 4), ReadsRows(8, 4), ReadsAll(8, 4), LooksUpPastForward(8, 4)]
    layers = [*tables, Adapted(4, 8), Squared(4, 8), nn.LazyLinear(8)]
    assert tensor_parallel.known(nn.Sequential(*layers), smallest_bytes=0, ranks=2) == []


class Asks(nn.Module):
    """As T5's feed-forward networks, which ask whether a weight is a tensor, and its dtype."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 8)

    def forward(self, hidden):
        if isinstance(self.body.weight, torch.Tensor) and hidden.dtype != self.body.weight.dtype:
            hidden = hidden.to(self.body.weight.dtype)
        return self.body(hidden)


def test_to_ask_whether_a_weight_is_a_tensor_is_not_to_read_it():
    assert tensor_parallel.known(Asks(), smallest_bytes=0, ranks=2) == ["body"]


class Convolutions(nn.Module):
    """Has most of its parameters where nothing is known, and a layer that is."""

    def __init__(self, channels):
        super().__init__()
        self.body, self.head = nn.Conv1d(channels, channels, 3), nn.Linear(channels, 8)


@pytest.mark.parametrize(("channels", "select", "is_told"), [(16, None, True), (2, None, False), (16, ["head"], False)])
def test_a_model_that_is_whole_for_the_most_part_is_told_of(channels, select, is_told, caplog):
    axis = Axis("model", 0, 2, (0, 1), None, torch.device("meta"), 0.0)  # to cut sends nothing
    with caplog.at_level(logging.WARNING, "tulle"):
        tensor_parallel.apply(Convolutions(channels), axis, smallest_bytes=0, select=select)
    said = "but 85% of its parameters lie in large ones that stay whole on each of 2 ranks (Conv1d 85%): register"
    assert [said in message for message in caplog.messages] == [True] * is_told
