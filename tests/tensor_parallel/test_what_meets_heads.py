"""What is whole on every rank, and trained perhaps, meets heads where it is made: tables of biases, temperatures."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from split_layers import model_axis
from split_training import check_exact, numbers, split, square
from torch import nn
from torch.nn import functional

from ranks import on_ranks
from tulle import tensor_parallel
from tulle.errors import ModelError

WIDTH, HEADS, LENGTH = 16, 4, 5


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads, self.head_dim = HEADS, WIDTH // HEADS
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def three(self, x):
        layers = (self.q_proj, self.k_proj, self.v_proj)
        return [one(x).view(*x.shape[:2], -1, self.head_dim).transpose(1, 2) for one in layers]

    def given(self, attended):
        return self.out_proj(attended.transpose(1, 2).flatten(2))


class Temperature(Attends):
    """As XCiT's and Restormer's, one number a head; and one for all."""

    def __init__(self):
        super().__init__()
        self.temperature, self.scale = nn.Parameter(numbers(HEADS, 1, 1, seed=3)), nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        query, key, value = self.three(x)
        scores = query @ key.transpose(-1, -2) * self.temperature.exp() / self.scale
        return self.given(scores.softmax(-1) @ value)


class Table(nn.Module):
    """As Swin's biases by positions next to each other."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(numbers(2 * LENGTH - 1, HEADS, seed=4))
        places = torch.arange(LENGTH)
        self.register_buffer("index", places[:, None] - places[None, :] + LENGTH - 1)

    def forward(self):
        bias = self.table[self.index.view(-1)].view(LENGTH, LENGTH, -1)
        return bias.permute(2, 0, 1).contiguous().unsqueeze(0)


class OfATable(Attends):
    def __init__(self):
        super().__init__()
        self.bias_of_positions = Table()

    def forward(self, x):
        query, key, value = self.three(x)
        bias = self.bias_of_positions()
        return self.given(functional.scaled_dot_product_attention(query, key, value, attn_mask=bias, dropout_p=0.0))


class AddedInPlace(Attends):
    """As BEiT's, a table of the module itself; with dropout of what is attended to."""

    def __init__(self):
        super().__init__()
        self.inner, self.drop = Table(), nn.Dropout(0.0)
        self.table = self.inner.table
        self.register_buffer("index", self.inner.index)
        del self.inner

    def bias(self):
        return self.table[self.index.view(-1)].view(LENGTH, LENGTH, -1).permute(2, 0, 1)

    def forward(self, x):
        query, key, value = self.three(x)
        scores = query @ key.transpose(-1, -2)
        scores += self.bias()
        return self.given(self.drop(scores).softmax(-1) @ value)


class BesideFeatures(Attends):
    """As conformers': biases of queries, next to their features; and a scale of these."""

    def __init__(self):
        super().__init__()
        self.bias_u, self.scale = nn.Parameter(numbers(HEADS, WIDTH // HEADS, seed=5)), nn.Parameter(torch.ones(4))

    def forward(self, x):
        query, key, value = self.three(x)
        query = ((query.transpose(1, 2) + self.bias_u) * self.scale).transpose(1, 2)
        return self.given((query @ key.transpose(2, 3)).softmax(-1) @ value)


class Slopes(Attends):
    """As ALiBi's, in a buffer that checkpoints have, and learned from what all ranks compute."""

    def __init__(self):
        super().__init__()
        self.register_buffer("slopes", numbers(HEADS, 1, 1, seed=6))
        self.of_input = nn.Linear(WIDTH, HEADS)

    def forward(self, x):
        query, key, value = self.three(x)
        learned = self.of_input(x.mean(1)).tanh()[:, :, None, None]
        distances = torch.arange(x.shape[1]).view(1, 1, -1)
        scores = query @ key.transpose(-1, -2) + distances * self.slopes + learned
        return self.given(scores.softmax(-1) @ value)


class AtLeast(Attends):
    """As XGLM's: no score is less than a number that a tensor says."""

    def forward(self, x):
        query, key, value = self.three(x)
        scores = torch.max(query @ key.transpose(-1, -2), torch.full((), -0.25, dtype=torch.float64))
        return self.given(scores.softmax(-1) @ value)


class Block(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, x):
        return x + self.attention(x.tanh())


def loss(model, step):
    return square(model(numbers(3, LENGTH, WIDTH, seed=step)))


@on_ranks(2, 4)
@pytest.mark.parametrize("kind", [Temperature, OfATable, AddedInPlace, BesideFeatures, Slopes, AtLeast])
def test_each_rank_takes_what_belongs_to_its_heads(kind):
    torch.manual_seed(0)
    model = Block(kind()).double()
    check_exact(model, loss)
    assert split(model)[1] == ["attention.out_proj"]
    assert {name.split(".")[1] for name in tensor_parallel.placements(model)} <= {
        *("q_proj", "k_proj", "v_proj", "out_proj", "of_input")
    }


class SeenElsewhere(Temperature):
    """The same parameter is in what all ranks compute."""

    def forward(self, x):
        return super().forward(x) * self.temperature.mean()


class ByAMethod(Temperature):
    """A method adds to heads, and to what is whole."""

    def warmed(self, x):
        return x * self.temperature

    def forward(self, x):
        query, key, value = self.three(x)
        whole = self.warmed(x.unsqueeze(1)).mean(1)
        return self.given(self.warmed(query @ key.transpose(-1, -2)).softmax(-1) @ value) + whole


def warmed(x, temperature):
    return x * temperature


class ByAFunction(Temperature):
    def forward(self, x):
        query, key, value = self.three(x)
        return self.given(warmed(query @ key.transpose(-1, -2), self.temperature).softmax(-1) @ value)


@on_ranks(2)
@pytest.mark.parametrize("kind", [ByAMethod, ByAFunction, SeenElsewhere])
def test_code_that_is_for_wholes_too_leaves_it_to_its_layers(kind):
    torch.manual_seed(0)
    model = Block(kind()).double()
    check_exact(model, loss)
    assert split(model) == ([], [])


def scaled(places, beta, longest):
    return (1 + beta * torch.log(1 + places / longest))[:, None]


class OfAConfiguration(Attends):
    """As Ministral's: queries are scaled by their places, as a dictionary of numbers says."""

    def __init__(self, scales):
        super().__init__()
        self.config = SimpleNamespace(scales=scales)

    def forward(self, x, places):
        query, key, value = self.three(x)
        query = query * scaled(places, self.config.scales.get("beta"), self.config.scales.get("longest"))
        return self.given((query @ key.transpose(-1, -2) + 0.1 * places[:, None]).softmax(-1) @ value)


class OfPlaces(Block):
    def forward(self, x):
        return x + self.attention(x.tanh(), torch.arange(LENGTH, dtype=x.dtype))


@on_ranks(2)
@pytest.mark.parametrize(("beta", "rows"), [(0.3, 1), (torch.tensor(0.3), 0)])
def test_a_dictionary_of_numbers_has_no_tensor(beta, rows):
    torch.manual_seed(0)
    model = OfPlaces(OfAConfiguration({"beta": beta, "longest": 3})).double()
    check_exact(model, loss)
    assert len(split(model)[1]) == rows


class OfArrays(Attends):
    def __init__(self):
        super().__init__()
        self.slopes = [np.ones((HEADS, 1, 1))]

    def forward(self, x):
        query, key, value = self.three(x)
        return self.given((query @ key.transpose(-1, -2) * self.slopes[0]).softmax(-1) @ value)


def of_five():
    found = Temperature()
    found.temperature = nn.Parameter(torch.ones(1, 1, 1, 1, 1))
    return found


@on_ranks(2)
@pytest.mark.parametrize(("kind", "said"), [(of_five, "5 dimensions"), (OfArrays, "a ndarray")])
def test_what_is_no_tensor_of_as_many_dimensions_is_refused(kind, said):
    model = tensor_parallel.apply(Block(kind()).double(), model_axis(), smallest_bytes=0)
    assert split(model)[1] == ["attention.out_proj"]
    with pytest.raises(ModelError, match=f"attention: what meets its heads is of {said}, expected"):
        model(numbers(3, LENGTH, WIDTH, seed=0))
