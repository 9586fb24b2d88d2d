"""The sampled softmax: what it computes, that ranks draw alike, and that it trains as one process does."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tulle
from models import worst_difference
from ranks import on_ranks
from tulle.errors import ModelError
from tulle.softmax import SampledSoftmax, ShardedSoftmax
from tulle.softmax.negatives import LogUniform

ROWS, WIDTH, SAMPLES = 60, 5, 25
IGNORED = -100


class LanguageModel(nn.Module):
    """A word follows from the one before it."""

    def __init__(self, *, is_tied: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.mix = nn.Linear(WIDTH, WIDTH)
        table = self.words if is_tied else nn.Embedding(ROWS, WIDTH, sparse=True)
        self.softmax = SampledSoftmax(table, samples=SAMPLES)

    def forward(self, ids: Tensor) -> Tensor:
        """Mean loss of `[samples, length]`."""
        return self.softmax(torch.tanh(self.mix(self.words(ids[:, :-1]))), ids[:, 1:])


def layer() -> tuple[SampledSoftmax, Tensor, Tensor]:
    torch.manual_seed(1)
    softmax = SampledSoftmax(nn.Embedding(ROWS, WIDTH, sparse=True), samples=SAMPLES).double()
    return softmax, torch.randn(30, WIDTH, dtype=torch.float64, requires_grad=True), torch.randint(ROWS, (30,))


def test_the_loss_is_that_over_the_drawn_rows_and_the_target_each_once():
    softmax, hidden, target = layer()
    drawn = LogUniform(ROWS, SAMPLES).draw(0)
    losses = []
    for state, row in zip(hidden, target.tolist(), strict=True):
        rows = torch.tensor(sorted({*drawn.tolist(), row}))
        once = [math.log((k + 2) / (k + 1)) / math.log(ROWS + 1) for k in rows.tolist()]
        chances = torch.tensor([1 - (1 - p) ** SAMPLES for p in once], dtype=torch.float64)
        logits = softmax.table.weight[rows] @ state - chances.log()
        losses.append(nn.functional.cross_entropy(logits, (rows == row).nonzero().squeeze()))
    expected = torch.stack(losses).mean()
    expected.backward()
    gradients = hidden.grad.clone(), softmax.table.weight.grad.to_dense()
    hidden.grad = softmax.table.weight.grad = None
    loss = softmax(hidden, target)
    loss.backward()
    assert len({*drawn.tolist()} & {*target.tolist()}) > 3, "some targets are among the drawn rows"
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    for found, wanted in zip((hidden.grad, softmax.table.weight.grad.to_dense()), gradients, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-14)


def test_only_drawn_and_target_rows_get_a_gradient():
    softmax, hidden, target = layer()
    softmax(hidden, target).backward()
    touched = {*softmax.table.weight.grad.coalesce().indices()[0].tolist()}
    assert touched == {*LogUniform(ROWS, SAMPLES).draw(0).tolist(), *target.tolist()}


def test_sums_of_exponentials_are_right_on_average():
    logits = torch.linspace(-1, 1, ROWS, dtype=torch.float64).flip(0)
    sampler = LogUniform(ROWS, SAMPLES)
    sums = torch.tensor(
        [torch.exp(logits[rows] - sampler.log_chance(rows)).sum() for rows in map(sampler.draw, range(4000))]
    )
    error = sums.std() / len(sums) ** 0.5
    assert abs(sums.mean() - logits.exp().sum()) < 3 * error
    assert error < 0.01 * logits.exp().sum(), "so a chance that is 5% off would be seen"


def test_chances_are_those_of_the_draws():
    sampler = LogUniform(ROWS, SAMPLES)
    counts = torch.zeros(ROWS)
    for number in range(4000):
        counts[sampler.draw(number)] += 1
    chances = sampler.log_chance(torch.arange(ROWS)).exp()
    spread = (chances * (1 - chances) / 4000).sqrt()
    assert bool(((counts / 4000 - chances).abs() <= 4 * spread + 1e-9).all())


def test_evaluation_is_exact():
    softmax, hidden, target = layer()
    exact = ShardedSoftmax(weight=softmax.table.weight)(hidden, target)
    assert softmax(hidden, target) != exact
    assert softmax.eval()(hidden, target) == exact
    assert softmax.predict(hidden).tolist() == (hidden @ softmax.table.weight.T).argmax(1).tolist()


def test_draws_go_on_from_a_checkpoint():
    softmax, hidden, target = layer()
    losses = [softmax(hidden, target).item() for _ in range(4)]
    assert len({*losses}) == 4
    other, _, _ = layer()
    other(hidden, target)
    resumed, _, _ = layer()
    resumed.load_state_dict(other.state_dict())
    assert [resumed(hidden, target).item() for _ in range(3)] == losses[1:]


def test_ignored_targets_do_not_count():
    softmax, hidden, target = layer()
    some = target.clone()
    some[::2] = IGNORED
    drawn = LogUniform(ROWS, SAMPLES).draw(3)
    torch.testing.assert_close(softmax(hidden, some, drawn), softmax(hidden[1::2], target[1::2], drawn))


def test_under_autocast_the_loss_is_float32():
    softmax, hidden, target = layer()
    softmax = softmax.float()
    with torch.autocast("cpu", torch.bfloat16):
        loss = softmax(hidden.float(), target)
    assert loss.dtype == torch.float32
    loss.backward()
    assert softmax.table.weight.grad.dtype == torch.float32


@pytest.mark.parametrize(("states", "targets"), [(1, 5), (5, 1), (6, 5)])
def test_one_target_for_each_state_is_asked_for_in_training_too(states, targets):
    softmax, hidden, target = layer()
    message = rf"hidden states of shape \[{states}, 5\] and targets of shape \[{targets}\].*: one target for each state"
    with pytest.raises(ModelError, match=message):
        softmax(hidden[:states], target[:targets])


class Scaled(nn.Embedding):
    """Word vectors as translation models scale them."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 3


@pytest.mark.parametrize("table", [Scaled(ROWS, WIDTH), nn.Embedding(ROWS, WIDTH, scale_grad_by_freq=True)])
def test_a_table_whose_lookups_are_not_its_rows_is_refused(table):
    with pytest.raises(ModelError, match=r"given as table .*: training would not be .*a plain nn.Embedding"):
        SampledSoftmax(table, samples=SAMPLES)


@on_ranks(2)
def test_a_plain_table_takes_the_rows_of_one_that_scales_them():
    class Model(LanguageModel):
        def __init__(self) -> None:
            super().__init__()
            self.words = Scaled(ROWS, WIDTH, sparse=True, padding_idx=0)
            self.softmax.table.weight = self.words.weight

    mesh = tulle.init(data=-1)
    torch.manual_seed(2)
    model, reference = Model().double(), Model().double()
    reference.load_state_dict(model.state_dict())
    optimizers = [torch.optim.Adagrad(one.parameters(), lr=0.1) for one in (model, reference)]
    tulle.distribute(model, optimizers[0], mesh, plan="rows")
    for batch in torch.randint(ROWS, (3, 6, 4), generator=torch.Generator().manual_seed(5)):
        for one, optimizer, share in zip(
            (model, reference), optimizers, (batch.chunk(mesh.size)[mesh.rank], batch), strict=True
        ):
            one(share).backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, value in tulle.full_state_dict(model, everywhere=True).items():
        torch.testing.assert_close(value, reference.state_dict()[name], rtol=1e-12, atol=1e-12)


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("is_tied", [False, True])
def test_ranks_train_as_one_process_on_the_concatenated_batch(is_tied):
    mesh = tulle.init(data=-1)
    ids = torch.randint(ROWS, (5, 12, 6), generator=torch.Generator().manual_seed(5))

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(2)
        model = LanguageModel(is_tied=is_tied).double()
        return model, torch.optim.Adagrad(model.parameters(), lr=0.1)

    reference, its_optimizer = made()
    model, optimizer = tulle.distribute(*made(), mesh)
    for batch in ids:
        for one, its, share in (
            (model, optimizer, batch.chunk(mesh.size)[mesh.rank]),
            (reference, its_optimizer, batch),
        ):
            one(share).backward()
            its.step()
            its.zero_grad()
    difference, name = worst_difference(model, reference)
    assert difference < 1e-12, name
    assert int(model.softmax.draws) == len(ids)


def test_ranks_that_drew_apart_would_differ():
    """The twin: other negatives give other numbers, so the test above holds the draws too."""
    softmax, hidden, target = layer()
    sampler = LogUniform(ROWS, SAMPLES)
    one, other = (softmax(hidden, target, sampler.draw(number)) for number in (0, 1))
    assert abs(one - other) > 1e-6


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_rows_are_not_drawn_again_in_backward(use_reentrant):
    softmax, hidden, target = layer()
    loss = checkpoint(softmax, hidden, target, use_reentrant=use_reentrant)
    with pytest.raises(ModelError, match=r"called again in backward.* leave it out .* or give it drawn="):
        loss.backward()
    drawn = softmax.sampler.draw(0)
    checkpoint(softmax, hidden, target, drawn, use_reentrant=use_reentrant).backward()
    found, softmax.table.weight.grad = softmax.table.weight.grad.to_dense(), None
    softmax(hidden, target, drawn).backward()
    torch.testing.assert_close(found, softmax.table.weight.grad.to_dense(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("table", "samples", "message"),
    [
        (nn.Linear(4, 2), 3, "given a Linear as table and samples=3, expected an nn.Embedding"),
        (nn.Embedding(4, 2), 0, "samples=0, expected an nn.Embedding, .* and how many to draw, 1 at least"),
        (nn.Embedding(4, 2), 2.5, "samples=2.5, expected"),
    ],
)
def test_what_nothing_can_be_drawn_from_is_refused(table, samples, message):
    with pytest.raises(ModelError, match=message):
        SampledSoftmax(table, samples=samples)
