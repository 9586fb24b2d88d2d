"""Models with a sharded or sampled softmax over split tables: after some steps the parameters of one process."""

import pytest
import torch
from torch import Tensor, nn

import models
import tulle
from models import WORDS, batches, build
from ranks import on_ranks
from tulle.errors import ModelError, PlanError
from tulle.softmax import SampledSoftmax, ShardedSoftmax
from tulle.tables import RowSplit, split_of
from tulle.tables.split import mark

WIDTH = 6
STEPS = 6
TOLERANCE = 1e-12


class Plain(nn.Module):
    """What a user has before: a tied output layer and a cross entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor, *drawn: Tensor) -> Tensor:
        """Mean loss of predicting each next word of `[samples, length]`."""
        hidden = torch.tanh(self.mix(self.words(ids[:, :-1])))
        return self.loss(hidden, ids[:, 1:], *drawn)

    def loss(self, hidden: Tensor, target: Tensor) -> Tensor:
        logits = nn.functional.linear(hidden, self.words.weight).flatten(0, 1)
        return nn.functional.cross_entropy(logits, target.flatten(), label_smoothing=0.1)


class Tied(Plain):
    """The same with the softmax where the rows live."""

    def __init__(self) -> None:
        super().__init__()
        self.softmax = ShardedSoftmax(weight=self.words.weight, label_smoothing=0.1)

    def loss(self, hidden: Tensor, target: Tensor) -> Tensor:
        return self.softmax(hidden, target)


class Sampled(Plain):
    """With an output table of its own, of which a sample is scored."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, sparse=True)
        self.softmax = SampledSoftmax(nn.Embedding(WORDS, WIDTH, sparse=True), samples=15)

    def loss(self, hidden: Tensor, target: Tensor, *drawn: Tensor) -> Tensor:
        return self.softmax(hidden, target, *drawn)


class TiedSampled(Sampled):
    """With one table for both."""

    def __init__(self) -> None:
        super().__init__()
        self.softmax = SampledSoftmax(self.words, samples=15)


def train(model, optimizers, data) -> None:
    for batch in data:
        loss = model(*batch) if isinstance(batch, tuple) else model(batch)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def check_against_one_process(kind, recipe, plan, *, reference_kind=None, lookahead=False) -> None:
    mesh = tulle.init(data=-1)
    data = batches(STEPS, 4 * mesh.size)
    reference = build(reference_kind or kind, seed=1)
    train(reference, recipe(reference), data)
    model = build(kind, seed=1)
    model, optimizers = tulle.distribute(model, recipe(model), mesh, plan=plan)
    shares = [ids.chunk(mesh.size)[mesh.rank] for ids in data]
    train(model, optimizers, tulle.lookahead(shares) if lookahead else shares)
    check_parts(model, reference)
    for name, parameter in model.named_parameters():
        assert (split_of(parameter) is not None) == (name in plan and mesh.size > 1)


def check_parts(model: nn.Module, reference: nn.Module) -> None:
    """Each parameter is this rank's part of the reference's."""
    theirs = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        split = split_of(parameter)
        expected = theirs[name] if split is None else split.take(theirs[name])
        worst = (parameter - expected).abs().max().item() / max(1e-3, expected.abs().max().item())
        assert worst < TOLERANCE, f"{name} differs by {worst:.1e}"


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("recipe", [models.momentum, models.adam, models.adagrad], ids=lambda recipe: recipe.__name__)
def test_a_tied_sharded_softmax_is_the_output_layer_that_it_replaces(recipe):
    check_against_one_process(Tied, recipe, {"words.weight": "rows"}, reference_kind=Plain)


@on_ranks(2, 3)
@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("kind", [Sampled, TiedSampled], ids=lambda kind: kind.__name__)
def test_a_sampled_softmax_trains_over_split_tables(kind, lookahead):
    plan = dict.fromkeys(["words.weight", *(["softmax.table.weight"] if kind is Sampled else [])], "rows")
    check_against_one_process(kind, models.adagrad, plan, lookahead=lookahead)


@on_ranks(2)
def test_gradients_that_add_up_are_finite_where_each_is():
    mesh = tulle.init(data=-1)
    model = build(Tied, seed=1)
    tulle.distribute(model, models.adam(model), mesh, plan={"words.weight": "rows"}, check_finite=True)
    for ids in batches(2, 4 * mesh.size):
        model(ids.chunk(mesh.size)[mesh.rank]).backward()


@on_ranks(2, 3)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_gradient_of_a_bias_of_half_precision_is_finite_where_that_of_one_process_is(dtype):
    mesh = tulle.init(data=-1)
    softmax = ShardedSoftmax(WORDS, WIDTH, bias=True).to(dtype)
    tulle.distribute(softmax, torch.optim.SGD(softmax.parameters(), lr=0.1), mesh, plan={"weight": "rows"})
    hidden, target = torch.zeros(2, WIDTH, dtype=dtype), torch.tensor([0, 1])
    (softmax(hidden, target) * 60_000).backward()
    bias = torch.zeros(WORDS, requires_grad=True)
    with torch.no_grad():
        bias.copy_(softmax.bias)
    (torch.nn.functional.cross_entropy(bias.expand(2, -1), target) * 60_000).backward()
    assert torch.allclose(softmax.bias.grad.float(), bias.grad, rtol=1e-2)


@on_ranks(2)
def test_ranks_may_give_targets_in_unlike_integers():
    mesh = tulle.init(data=-1)
    softmax = build(lambda: ShardedSoftmax(WORDS, WIDTH), 0)
    hidden, target = torch.ones(2, WIDTH, dtype=torch.float64), torch.tensor([0, 1])
    expected = softmax(hidden, target)
    tulle.distribute(softmax, torch.optim.SGD(softmax.parameters(), lr=0.1), mesh, plan={"weight": "rows"})
    assert torch.allclose(softmax(hidden, target.int() if mesh.rank else target), expected, rtol=TOLERANCE)


@on_ranks(2)
@pytest.mark.parametrize("kind", [Tied, TiedSampled], ids=lambda kind: kind.__name__)
def test_columns_are_refused_before_training(kind):
    model = build(kind, seed=1)
    with pytest.raises(PlanError, match=r"splits 'words.weight' by columns, but a softmax over it needs whole rows"):
        tulle.distribute(model, models.adagrad(model), tulle.init(data=-1), plan={"words.weight": "columns"})


@on_ranks(2, 3)
def test_negatives_that_are_part_of_the_batch_travel_ahead():
    mesh = tulle.init(data=-1)
    words = batches(STEPS, 4 * mesh.size)
    reference, model = build(Sampled, seed=1), build(Sampled, seed=1)
    data = [(ids, reference.softmax.sampler.draw(step)) for step, ids in enumerate(words)]
    train(reference, models.adagrad(reference), data)
    model, optimizers = tulle.distribute(model, models.adagrad(model), mesh, plan="rows")
    shares = [(ids.chunk(mesh.size)[mesh.rank], drawn) for ids, drawn in data]
    train(model, optimizers, tulle.lookahead(shares))
    check_parts(model, reference)


class OwnTable(Plain):
    """With an output table that no embedding looks up in, and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.softmax = ShardedSoftmax(WORDS, WIDTH, bias=True)

    def loss(self, hidden: Tensor, target: Tensor) -> Tensor:
        return self.softmax(hidden, target)


@on_ranks(2, 3)
def test_a_softmax_with_a_table_of_its_own_is_split_too():
    check_against_one_process(OwnTable, models.adam, {"softmax.weight": "rows"})


@on_ranks(2)
def test_a_rank_without_tokens_may_have_hidden_states_without_a_graph():
    mesh = tulle.init(data=-1)
    reference, model = build(Tied, 0), build(Tied, 0)
    tulle.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), mesh, plan="rows")
    hidden, target = torch.randn(4, WIDTH, dtype=torch.float64, requires_grad=True), torch.arange(4)
    reference.softmax(hidden, target).backward()
    expected, hidden.grad = hidden.grad, None
    model.softmax.reduction = "sum"
    if mesh.rank == 0:
        model.softmax(hidden, target).backward()
        assert torch.allclose(hidden.grad / 4, expected, rtol=TOLERANCE)
    else:
        model.softmax(hidden.new_zeros(0, WIDTH), target[:0]).backward()


@on_ranks(2, 3)
def test_more_classes_than_there_are_are_refused_on_all_ranks_if_one_asks_for_them():
    axis = tulle.init(data=-1)["data"]
    softmax = ShardedSoftmax(5, WIDTH)
    rows = RowSplit("few", 5, WIDTH, axis)
    softmax.weight.data = rows.take(softmax.weight.detach())
    mark(softmax.weight, rows)
    assert len(softmax.top_k(torch.ones(2, WIDTH), 5)[1].unique()) == 5
    with pytest.raises(ModelError, match=r"top_k was given k=6, expected a number of its 5 classes"):
        softmax.top_k(torch.ones(2, WIDTH), 6 if axis.rank == 1 else 5)
