"""Tables whose gradients come together travel as one; one that comes much earlier does not wait for the others."""

import pytest
import torch
from torch import Tensor, nn

import models
import tulle
from gigabit import give_network
from models import build, worst_difference
from ranks import on_ranks
from tulle.comm import traffic
from tulle.engine import engine_of
from tulle.engine.tables import TableSync

SOON_S = 20.0
ROWS, WIDTH = 50, 8
STEPS = 3


class Translator(nn.Module):
    """Two tables with a layer between them, as an encoder and a decoder have."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.source = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.encoder = nn.Sequential(nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH))
        self.target = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.out = nn.Linear(WIDTH, 1)
        self.before_source: list[object] = []
        """Called in backward when all gradients but the source table's have come."""

    def forward(self, ids: Tensor) -> Tensor:
        """Mean loss of a batch `[samples, length]`."""
        looked_up = self.source(ids)
        for call in self.before_source:
            looked_up.register_hook(call)
        return torch.tanh(self.out(self.encoder(looked_up) + self.target(ids.flip(0)))).mean()


class Recommender(nn.Module):
    """Categorical features side by side, one table each."""

    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        self.features = nn.ModuleList(nn.EmbeddingBag(ROWS + k, width, sparse=True) for k, width in enumerate(widths))
        self.out = nn.Linear(sum(widths), 1)

    def forward(self, ids: Tensor) -> Tensor:
        """Mean loss of a batch `[samples, bag]`, whose bags every feature has, rotated."""
        looked_up = [feature(ids.add(k) % ROWS) for k, feature in enumerate(self.features)]
        return torch.tanh(self.out(torch.cat(looked_up, dim=1))).pow(2).mean()


def batch(rank: int, step: int) -> Tensor:
    """`[16, 3]` row numbers, other ones on each rank and in each step."""
    return torch.randint(ROWS, (16, 3), generator=torch.Generator().manual_seed(100 * rank + step))


def names(model: nn.Module) -> list[list[str]]:
    """The tables of each group, in the order in which groups travel."""
    return [[slot.name for slot in group.slots] for group in engine_of(model).reducer.groups]


def distributed(kind, mesh: tulle.Mesh, plan: str = "allgather") -> tuple[nn.Module, torch.optim.Optimizer]:
    give_network(mesh["data"])
    model = build(kind, 0)
    model, [optimizer] = tulle.distribute(model, models.sgd(model), mesh, plan=plan)
    return model, optimizer


def step_together(model: nn.Module, optimizer: torch.optim.Optimizer, mesh: tulle.Mesh, step: int) -> int:
    """One step; the messages that this rank sent."""
    before = traffic.total.messages
    model(batch(mesh.rank, step)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return traffic.total.messages - before


def train_alone(kind, ranks: int, steps: int) -> nn.Module:
    reference = build(kind, 0)
    [optimizer] = models.sgd(reference)
    for step in range(steps):
        (sum(reference(batch(rank, step)) for rank in range(ranks)) / ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    return reference


def large() -> Translator:
    return Translator(20_000)  # 1.3 MB of float64 a layer lie between the tables


def small() -> Translator:
    return Translator(4)


def one_feature() -> Recommender:
    return Recommender([WIDTH])


def many_features() -> Recommender:
    return Recommender([WIDTH] * 26)


def features_of_two_widths() -> Recommender:
    return Recommender([WIDTH, 2 * WIDTH] * 13)


@on_ranks(2, 3)
def test_a_table_with_a_large_layer_between_it_and_the_next_travels_during_backward():
    mesh = tulle.init(data=-1)
    model, optimizer = distributed(large, mesh)
    step_together(model, optimizer, mesh, 0)
    assert names(model) == [["target.weight"], ["source.weight"]]
    first, last = engine_of(model).reducer.groups
    seen: list[bool] = []

    def wait_for_the_first(_: Tensor) -> None:
        # Backward stands still in here on every rank, and the sum comes all the same.
        [total], _ = first._summed._future.result(SOON_S)
        seen.append(len(total.indices) > 0 and last._summed is None)

    model.before_source.append(wait_for_the_first)
    for step in range(1, STEPS):
        step_together(model, optimizer, mesh, step)
    assert seen == [True] * (STEPS - 1)
    assert worst_difference(model, train_alone(large, mesh.size, STEPS))[0] < 1e-12


@on_ranks(2)
def test_a_lookup_that_is_done_again_in_backward_tells_nothing_where_packets_have_just_ended():
    """As checkpointing does it: on a rank that has the sums already, and on one that has not."""
    mesh = tulle.init(data=-1)
    model, optimizer = distributed(large, mesh, "auto")
    for step in range(2):
        step_together(model, optimizer, mesh, step)
    first, _ = engine_of(model).reducer.groups
    assert first._packet is not None
    seen: list[bool] = []

    def look_up_again(_: Tensor) -> None:
        _, following = first._summed._future.result(SOON_S)
        with torch.enable_grad():
            model.source(batch(mesh.rank, 2)), model.target(batch(mesh.rank, 2))
        seen.append(following is None and first._settled is None)

    model.before_source.append(look_up_again)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TableSync, "packet", lambda sync, slots, last: None)
        step_together(model, optimizer, mesh, 2)
    assert seen == [True]
    assert first._packet is None
    assert worst_difference(model, train_alone(large, mesh.size, 3))[0] < 1e-12


@on_ranks(2)
def test_tables_with_little_between_them_wait_for_one_another():
    mesh = tulle.init(data=-1)
    model, optimizer = distributed(small, mesh)
    step_together(model, optimizer, mesh, 0)
    assert names(model) == [["target.weight", "source.weight"]]
    [group] = engine_of(model).reducer.groups
    seen: list[tuple[bool, int]] = []
    model.before_source.append(lambda _: seen.append((group._summed is None, group.missing)))
    for step in range(1, STEPS):
        step_together(model, optimizer, mesh, step)
    assert seen == [(True, 1)] * (STEPS - 1)
    assert worst_difference(model, train_alone(small, mesh.size, STEPS))[0] < 1e-12


@on_ranks(3)
def test_many_tables_side_by_side_cost_the_messages_of_one():
    mesh = tulle.init(data=-1)
    for plan in ("allgather", "densify", "contiguous", "balanced", "recursive_doubling"):
        sent = {}
        for kind in (one_feature, many_features, features_of_two_widths):
            model, optimizer = distributed(kind, mesh, plan)
            sent[kind] = [step_together(model, optimizer, mesh, step) for step in range(STEPS)][-1]
            assert len(names(model)) == 1
            assert worst_difference(model, train_alone(kind, mesh.size, STEPS))[0] < 1e-12, plan
        assert sent[many_features] == sent[one_feature], plan
        # Rows of two widths do not fit into one message; what is announced, confirmed and dense still does.
        assert sent[one_feature] < sent[features_of_two_widths] < 2 * sent[one_feature], plan


@on_ranks(2)
def test_each_of_the_tables_that_travel_as_one_is_counted_by_its_share():
    mesh = tulle.init(data=-1)
    model, optimizer = distributed(many_features, mesh)
    step_together(model, optimizer, mesh, 0)
    traffic.take_labels()
    step_together(model, optimizer, mesh, 1)
    labels = traffic.take_labels()
    for k in range(26):
        rows = len(batch(mesh.rank, 1).unique())  # every feature rotates the same
        assert labels[f"features.{k}.weight"].bytes_sent == pytest.approx(rows * (8 * WIDTH + 4), abs=rows * 4)


@on_ranks(3)
def test_tables_that_travel_as_one_get_one_scheme_and_each_tells_its_own_rows():
    mesh = tulle.init(data=-1)
    model, optimizer = distributed(features_of_two_widths, mesh, "auto")
    step_together(model, optimizer, mesh, 0)
    choices = engine_of(model).ledger.choices
    assert len(choices) == 26
    for width in (0, 1):
        of_width = [choices[f"features.{k}.weight"] for k in range(width, 26, 2)]
        assert len({choice.scheme for choice in of_width}) == 1
        assert all("as one with 12 other tables" in choice.reason for choice in of_width)
        assert [choice.characteristics.num_rows for choice in of_width] == [*range(ROWS + width, ROWS + 26, 2)]
        [seconds] = {cost.seconds for choice in of_width for name, cost in choice.candidates if name == "allgather"}
        assert seconds > 0
    observed = {seen.table: bytes_of(seen.candidates) for seen in engine_of(model).ledger.take_observations()}
    assert observed == {name: bytes_of(choice.candidates) for name, choice in choices.items()}


def bytes_of(candidates):
    """Of each scheme; in packets, which the next step may have, gathering takes other seconds."""
    return {name: cost.bytes for name, cost in candidates}


class Sometimes(Recommender):
    """Leaves out the last feature in some steps."""

    is_whole = True

    def forward(self, ids: Tensor) -> Tensor:
        """As a recommender's; what is left out counts as zeros."""
        features = self.features if self.is_whole else self.features[:-1]
        looked_up = torch.cat([feature(ids.add(k) % ROWS) for k, feature in enumerate(features)], dim=1)
        return torch.tanh(nn.functional.linear(looked_up, self.out.weight[:, : looked_up.shape[1]])).pow(2).mean()


def some_features() -> Sometimes:
    return Sometimes([WIDTH] * 3)


@on_ranks(2)
def test_a_table_that_comes_later_joins_those_that_have_a_scheme():
    mesh = tulle.init(data=-1)
    model, optimizer = distributed(some_features, mesh, "auto")
    for step, (is_whole, chosen) in enumerate([(False, 2), (True, 3), (False, 3), (True, 3)]):
        model.is_whole = is_whole
        step_together(model, optimizer, mesh, step)
        choices = engine_of(model).ledger.choices
        assert len(choices) == chosen, step
        assert {name for name, _ in engine_of(model).schemes().values()} == {choices["features.0.weight"].scheme}
