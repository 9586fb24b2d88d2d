"""Tables are the parameters that lookups read; what is computed is none, and is not computed to find that out."""

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tulle.admission import check_replicated_tables
from tulle.lookups import explain_lookups
from tulle.placing import tables_of
from tulle.profiling import trained_tables
from tulle.softmax import offers
from tulle.tables import table_modules


class Doubled(nn.Module):
    """Counts how often it was asked, as a spectral norm moves its vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def forward(self, weight: Tensor) -> Tensor:
        self.asked += 1
        return 2 * weight


def test_a_weight_that_is_computed_is_not_asked_for():
    model = nn.ModuleDict({"words": nn.Embedding(9, 2), "shared": nn.Embedding(9, 2), "computed": nn.Embedding(9, 2)})
    model["shared"].weight = model["words"].weight
    model["out"] = nn.Linear(2, 9)
    for name in ("computed", "out"):
        parametrize.register_parametrization(model[name], "weight", Doubled())
    rules = [module for module in model.modules() if isinstance(module, Doubled)]
    before = [rule.asked for rule in rules]
    assert [(name, table) for name, _, table in table_modules(model)] == [
        ("words", model["words"].weight),
        ("shared", model["words"].weight),
    ]
    assert [*trained_tables(model)] == [*tables_of(model)] == ["words.weight"]
    check_replicated_tables(model, [])
    explain_lookups(model, rank=0)
    assert offers(model, ranks=2) == []
    assert [rule.asked for rule in rules] == before
    model["computed"](torch.tensor([1]))
    assert [rule.asked for rule in rules] != before, "the count can tell"
