"""Who gives no sample is told of tables whose dense gradients are most of what travels."""

import logging

import pytest
from torch import nn

from tulle.distribute.choosing import say_what_is_dense


class Towers(nn.Module):
    def __init__(self, *, sparse=False, tied=False, twice=False):
        super().__init__()
        self.users, self.items = nn.Embedding(20_000, 64, sparse=sparse), nn.EmbeddingBag(9_000, 64, sparse=sparse)
        self.out = nn.Linear(64, 20_000, bias=False)
        if tied:
            self.out.weight = self.users.weight
        else:
            self.out = nn.Linear(64, 1)
        if twice:
            self.friends = nn.Embedding(20_000, 64)
            self.friends.weight = self.users.weight


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (Towers(), "the gradients of users.weight, items.weight are dense, 7 of 7 MB"),
        (Towers(twice=True), "the gradients of users.weight, items.weight are dense, 7 of 7 MB"),
        (Towers(sparse=True), ""),
        (Towers(tied=True), ""),
        (nn.Embedding(10, 4), ""),
        (nn.Linear(3000, 3000), ""),
    ],
    ids=["dense", "looked up by two", "sparse", "tied", "small", "no table"],
)
def test_what_is_dense_and_much_is_told(model, told, caplog):
    with caplog.at_level(logging.INFO, logger="tulle"):
        say_what_is_dense(model)
    assert caplog.text.count("\n") == bool(told)
    assert told in caplog.text
