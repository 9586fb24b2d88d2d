"""The engine on whole models: its order, its buffers, its tables' schemes, and ways to call a model."""

import copy
import gc
import logging
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import models
import tulle
from models import Words, batches, build, worst_difference
from ranks import on_ranks
from tulle.comm import traffic
from tulle.engine import engine_of
from tulle.errors import GradientError, ModelError
from tulle.sync.schemes import ALIKE


class Checkpointed(nn.Module):
    """Layers whose activations are computed again in backward."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.words = nn.Embedding(models.WORDS, models.WIDTH, sparse=True)
        self.layers = nn.ModuleList(nn.Linear(models.WIDTH, models.WIDTH) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        """Mean loss of a batch `[samples, length]`."""
        hidden = self.words(ids).mean(1)
        for layer in self.layers:
            hidden = checkpoint(lambda x, layer=layer: layer(x).tanh(), hidden, use_reentrant=self.use_reentrant)
        return hidden.pow(2).mean()


def train(model: nn.Module, mesh: tulle.Mesh | None, steps: int = 4) -> None:
    """A few steps of SGD on the whole batch, or on a rank's share of it."""
    [optimizer] = models.sgd(model)
    for ids in batches(steps, 12):
        model(ids.chunk(mesh.size)[mesh.rank] if mesh else ids).backward()
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_of_both_kinds_gives_the_numbers_of_one_process(use_reentrant):
    mesh = tulle.init(data=-1)
    reference = build(lambda: Checkpointed(use_reentrant=use_reentrant), 0)
    model, _ = tulle.distribute(copy.deepcopy(reference), dummy(reference), mesh)
    train(model, mesh)
    train(reference, None)
    assert worst_difference(model, reference)[0] < 1e-12


def dummy(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer over nothing of the model's: training makes its own."""
    del model
    return torch.optim.SGD([{"params": []}], lr=0.1)


@on_ranks(2)
def test_a_model_called_by_its_parts_is_kept_in_step():
    mesh = tulle.init(data=-1)
    model = build(Words, 0)
    model, _ = tulle.distribute(model, dummy(model), mesh)
    reference = build(Words, 0)
    ids = batches(1, 12)[0]
    model.out(model.words(ids.chunk(2)[mesh.rank]).mean(1)).mean().backward()
    reference.out(reference.words(ids).mean(1)).mean().backward()
    assert torch.allclose(model.words.weight.grad.to_dense(), reference.words.weight.grad.to_dense(), atol=1e-15)
    assert torch.allclose(model.out.weight.grad, reference.out.weight.grad, atol=1e-15)


class Normed(nn.Module):
    """Batch norm, whose statistics differ by rank, beside a buffer that never changes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("positions", torch.arange(10_000.0))

    def forward(self, x: Tensor) -> Tensor:
        """Mean square of the normalized batch."""
        return (self.norm(x) * self.norm.weight).pow(2).mean()


@on_ranks(2)
def test_buffers_that_forward_writes_follow_rank_0_and_others_do_not_travel():
    mesh = tulle.init(data=-1)
    model = Normed()
    model, _ = tulle.distribute(model, dummy(model), mesh)
    for step in range(3):
        torch.manual_seed(10 * step + mesh.rank)
        traffic.take_labels()
        model(torch.randn(5, 3)).backward()
        sent = traffic.take_labels()["buffers"].bytes_sent if mesh.rank == 0 else 0
        assert sent < 100
    theirs = model.norm.running_mean.clone()
    torch.distributed.broadcast(theirs, src=0)
    assert torch.equal(model.norm.running_mean, theirs)
    assert model.norm.num_batches_tracked.item() == 3


@on_ranks(2)
def test_the_scheme_of_a_table_follows_its_density():
    mesh = tulle.init(data=-1)
    model = nn.Embedding(2000, 64, sparse=True)
    model, _ = tulle.distribute(model, dummy(model), mesh)
    engine = engine_of(model)
    model(torch.tensor([1])).sum().backward()
    choice = engine.choices()["weight"]
    predicted = {name: cost.seconds for name, cost in choice.candidates}
    assert engine.schemes()["weight"] == (choice.scheme, 1)
    assert choice.scheme != "densify"
    assert predicted[choice.scheme] <= ALIKE * min(predicted.values())
    # Costs are by measured network; on this one latency may rule: force the question by density alone.
    few = choice.density
    for _ in range(30):
        model.zero_grad()
        model(torch.arange(2000)).sum().backward()
    assert engine.choices()["weight"].density > 100 * few


@on_ranks(2)
def test_accumulation_keeps_one_row_for_each_number():
    mesh = tulle.init(data=-1)
    model = nn.Embedding(10, 2, sparse=True)
    model, _ = tulle.distribute(model, dummy(model), mesh)
    with model.no_sync():
        for _ in range(5):
            model(torch.tensor([3, 3, 4])).sum().backward()
    assert model.weight.grad._nnz() == 2
    model(torch.tensor([3])).sum().backward()
    assert model.weight.grad.to_dense()[3].tolist() == [11.0, 11.0]


@on_ranks(2)
def test_a_parameter_that_turns_out_to_get_sparse_gradients_becomes_a_table():
    mesh = tulle.init(data=-1)

    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Parameter(torch.ones(50, 2))

        def forward(self, ids: Tensor) -> Tensor:
            return nn.functional.embedding(ids, self.rows, sparse=True).sum()

    model = Functional()
    model, _ = tulle.distribute(model, dummy(model), mesh, plan="allgather")
    model(torch.tensor([mesh.rank])).backward()
    assert list(engine_of(model).schemes()) == ["rows"]
    assert model.rows.grad.coalesce().indices()[0].tolist() == [0, 1]


@on_ranks(1, 2)
def test_a_copy_of_a_distributed_model_is_a_plain_model():
    mesh = tulle.init(data=-1)
    model = build(Words, 0)
    names = list(model.state_dict())
    model, _ = tulle.distribute(model, dummy(model), mesh)
    assert isinstance(model, Words)
    assert list(model.state_dict()) == names
    copied = copy.deepcopy(model)
    assert type(copied) is Words
    assert engine_of(copied) is None
    copied(batches(1, 4)[0]).backward()  # on one rank's own: nobody has to join
    assert not hasattr(copied, "no_sync")


@on_ranks(2)
def test_the_reason_of_a_choice_is_logged_by_rank_0():
    mesh = tulle.init(data=-1)
    model = nn.Embedding(500, 8, sparse=True)
    model, _ = tulle.distribute(model, dummy(model), mesh)
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logger = logging.getLogger("tulle")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        model(torch.tensor([1, 2])).sum().backward()
    finally:
        logger.removeHandler(handler)
    assert len(records) == (1 if mesh.rank == 0 else 0)
    if records:
        assert records[0].startswith("table weight: 0.40% of 500 rows touched a rank and step, 2 ranks:")


class Half(nn.Module):
    """One of two models of which each rank uses another part."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.into, self.out, self.extra = nn.Linear(4, inner), nn.Linear(inner, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, *, skips: bool) -> Tensor:
        """`[samples, 4]` to the same."""
        hidden = self.out(self.into(x))
        return hidden if skips else self.extra(hidden)


@on_ranks(2)
@pytest.mark.parametrize("inner", [(7, 7), (7, 11)], ids=["alike", "unlike"])
def test_two_models_in_one_backward_do_not_cross_their_messages(inner):
    mesh = tulle.init(data=-1)
    pair = [build(lambda size=size: Half(size), size) for size in inner]
    references = copy.deepcopy(pair)
    for model in pair:
        tulle.distribute(model, dummy(model), mesh)
    x = torch.randn(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for step in range(4):
        skips = [[rank == step % 2, rank == 0] for rank in range(2)]  # the first model's, then the second's

        def loss(models_: list[nn.Module], rank: int, skips: list[list[bool]] = skips) -> Tensor:
            first, second = models_
            return second(first(x[rank], skips=skips[rank][0]), skips=skips[rank][1]).pow(2).mean()

        for one in (*pair, *references):
            one.zero_grad()
        loss(pair, mesh.rank).backward()
        (sum(loss(references, rank) for rank in range(2)) / 2).backward()
        for model, reference in zip(pair, references, strict=True):
            for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
                assert torch.allclose(mine.grad, theirs.grad, rtol=1e-12)


@on_ranks(2)
def test_parts_of_a_container_that_was_dropped_are_still_kept_in_step():
    mesh = tulle.init(data=-1)
    parts = [nn.Linear(3, 3), nn.Linear(3, 1)]
    tulle.distribute(nn.ModuleList(parts), torch.optim.SGD([*parts[0].parameters(), *parts[1].parameters()], 0.1), mesh)
    gc.collect()
    parts[1](parts[0](torch.full((2, 3), float(mesh.rank)))).mean().backward()
    assert parts[0].bias.grad is not None
    alone = parts[0].weight.grad.clone()
    torch.distributed.broadcast(alone, src=0)
    assert torch.equal(alone, parts[0].weight.grad)


@on_ranks(1, 2)
def test_a_distributed_model_that_is_dropped_is_freed():
    mesh = tulle.init(data=-1)

    def use() -> weakref.ref[nn.Module]:
        model = build(Words, 0)
        model, _ = tulle.distribute(model, models.sgd(model), mesh)
        model(batches(1, 4)[0]).backward()
        return weakref.ref(model)

    left = use()
    gc.collect()
    assert left() is None


@on_ranks(2)
def test_a_parameter_that_is_unfrozen_later_is_not_trained_apart_in_silence():
    mesh = tulle.init(data=-1)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].requires_grad_(requires_grad=False)
    model, optimizer = tulle.distribute(model, torch.optim.SGD(model.parameters(), 0.1), mesh)
    model[0].requires_grad_(requires_grad=True)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ModelError, match=r"the parameter '0.weight', of shape \[2, 2\], has a gradient that is not"):
        optimizer.step()
    optimizer.zero_grad()


def replaced(model: nn.Module) -> None:
    model[1] = nn.Linear(2, 1)


def assigned(model: nn.Module) -> None:
    model.load_state_dict(model.state_dict(), assign=True)


@on_ranks(2)
def test_parameters_that_take_the_place_of_others_are_not_trained_apart_in_silence():
    mesh = tulle.init(data=-1)
    for change, name in ((replaced, "1.weight"), (assigned, "0.weight")):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        tulle.distribute(model, torch.optim.SGD(model.parameters(), 0.1), mesh)
        change(model)
        trained = model[1:] if change is replaced else model
        optimizer = torch.optim.SGD(trained.parameters(), 0.1)
        model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(ModelError, match=f"SGD was to step '{name}' with the gradient of one rank"):
            optimizer.step()
    alone = nn.Linear(2, 1)  # of no model that was distributed
    alone(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(alone.parameters(), 0.1).step()


class Writes(nn.Module):
    """Writes a buffer past its version counter, and puts another in the place of a second one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.register_buffer("codes", torch.zeros(4))
        self.register_buffer("mean", torch.zeros(2))
        self.codes: Tensor
        self.mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Mean of a batch `[samples, 2]`."""
        self.codes.data += x.detach().mean()
        self.mean = self.mean * 0.9 + x.detach().mean(0) * 0.1
        return self.layer(x).mean()


def assert_buffers_are_those_of_rank_0(model):
    for buffer in model.buffers():
        first = buffer.clone()
        torch.distributed.broadcast(first, src=0)
        assert torch.equal(buffer, first)


@on_ranks(2)
def test_buffers_written_in_any_way_follow_rank_0():
    mesh = tulle.init(data=-1)
    model = Writes()
    model, _ = tulle.distribute(model, dummy(model), mesh)
    for step in range(4):
        for _ in range(2):  # two forwards a step: a buffer that is replaced twice may come to lie where it was
            model(torch.full((3, 2), 1.0 + step + 10 * mesh.rank))
        model(torch.full((3, 2), 1.0 + mesh.rank)).backward()
        assert_buffers_are_those_of_rank_0(model)


@on_ranks(4)
def test_a_row_is_sent_once_however_often_it_was_looked_up():
    mesh = tulle.init(data=-1)
    width = 16
    model = nn.Embedding(5_000, width, sparse=True)
    model, _ = tulle.distribute(model, dummy(model), mesh, plan="allgather")
    ids = torch.multinomial(1 / torch.arange(1, 5_001), 512, replacement=True)  # as words are: many of a few
    model(ids).sum().backward()
    traffic.take_labels()
    model.zero_grad()
    model(ids).sum().backward()
    distinct = len(ids.unique())
    assert distinct < 400
    sent = traffic.take_labels()["weight"].bytes_sent
    assert sent <= (mesh.size - 1) * distinct * (4 * width + 8), "no more than an all-gather of coalesced rows"
    assert sent >= (mesh.size - 1) * distinct * 4 * width


@on_ranks(2)
def test_statistics_of_many_norms_travel_in_one_message():
    mesh = tulle.init(data=-1)
    model = nn.Sequential(*(nn.BatchNorm1d(4) for _ in range(5)))
    model, _ = tulle.distribute(model, dummy(model), mesh)
    for step in range(2):
        traffic.take_labels()
        model(torch.randn(5, 4) + step + mesh.rank).pow(2).mean().backward()
    assert traffic.take_labels()["buffers"].messages == (1 if mesh.rank == 0 else 0)
    assert_buffers_are_those_of_rank_0(model)


@on_ranks(2)
def test_hooks_that_come_after_ours_see_this_ranks_gradient_and_change_it_before_the_mean():
    mesh = tulle.init(data=-1)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model, _ = tulle.distribute(model, dummy(model), mesh)
    seen: list[float] = []

    def clip(parameter: Tensor) -> None:
        seen.append(parameter.grad.abs().max().item())
        parameter.grad.clamp_(max=0.5 + mesh.rank)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(clip)
    for _ in range(3):
        model.zero_grad()
        seen.clear()
        model(torch.ones(1, 2)).sum().mul(100 * (1 + mesh.rank)).backward()
        assert seen[0] == 100.0 * (1 + mesh.rank), "of the last bias"
        assert model[1].bias.grad.item() == 1.0, "the mean of what each rank's hook has left, 0.5 and 1.5"


@on_ranks(2)
def test_an_optimizer_that_steps_in_backward_is_told_that_gradients_are_no_means_yet():
    mesh = tulle.init(data=-1)
    model = nn.Linear(2, 1)
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}
    for parameter, optimizer in optimizers.items():
        parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    model, _ = tulle.distribute(model, [*optimizers.values()], mesh)
    with pytest.raises(ModelError, match="an optimizer was to step within a backward, when gradients are those of"):
        model(torch.ones(1, 2)).sum().backward()


class Rows(torch.autograd.Function):
    """Rows of a parameter of any dimensions, with a gradient that is sparse by rows."""

    @staticmethod
    def forward(ctx, parameter, ids):
        ctx.ids, ctx.shape = ids, parameter.shape
        return parameter[ids]

    @staticmethod
    def backward(ctx, gradient):
        return torch.sparse_coo_tensor(ctx.ids[None], gradient, ctx.shape, check_invariants=True), None


class OddlySparse(nn.Module):
    """Sparse gradients of a vector, along the second dimension of a matrix, and of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(models.WORDS))
        self.columns = nn.Parameter(torch.randn(2, models.WORDS))
        self.blocks = nn.Parameter(torch.randn(models.WORDS, 2, 3))

    def forward(self, ids: Tensor) -> Tensor:
        """A mean over a batch `[samples, length]`."""
        ids = ids.flatten()
        found = torch.gather(self.bias, 0, ids, sparse_grad=True)
        found = found + torch.gather(self.columns, 1, ids.expand(2, -1), sparse_grad=True).sum(0)
        return (found + Rows.apply(self.blocks, ids).sum((1, 2))).tanh().mean()


@on_ranks(2)
def test_sparse_gradients_that_are_no_rows_of_a_matrix_are_reduced_dense():
    mesh = tulle.init(data=-1)
    model, reference = build(OddlySparse, 0), build(OddlySparse, 0)
    model, _ = tulle.distribute(model, dummy(model), mesh)
    train(model, mesh)
    train(reference, None)
    assert worst_difference(model, reference)[0] < 1e-12
    first, second = batches(1, 12)[0].chunk(2)
    with model.no_sync():
        model(first).backward()
    model(second).backward()
    assert not model.blocks.grad.is_sparse


@on_ranks(2)
def test_of_two_models_in_one_backward_both_end_where_one_has_a_gradient_that_is_not_finite():
    mesh = tulle.init(data=-1)
    pair = [nn.Linear(2, 2), nn.Linear(2, 1)]
    for model in pair:
        tulle.distribute(model, dummy(model), mesh, check_finite=True)
    x = torch.ones(1, 2)
    with pytest.raises(GradientError, match="'weight' has 4 NaN"):
        pair[1](pair[0](x * float("nan"))).sum().backward()
    for model in pair:
        model.zero_grad()
    pair[1](pair[0](x)).sum().backward()


def mean_gradient(weight: nn.Parameter, mesh: tulle.Mesh) -> float:
    """Of a loss whose gradient is the rank."""
    weight.grad = None
    (weight * mesh.rank).sum().backward()
    assert weight.grad is not None
    return weight.grad.mean().item()


@on_ranks(2)
def test_parameters_are_kept_in_step_as_long_as_their_optimizer_is_there_and_not_trained_apart_afterwards():
    mesh = tulle.init(data=-1)
    weight = nn.Parameter(torch.ones(2, 2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    tulle.distribute(nn.ParameterList([weight]), optimizer, mesh)
    gc.collect()
    assert mean_gradient(weight, mesh) == 0.5
    optimizer.step()
    del optimizer
    gc.collect()
    assert mean_gradient(weight, mesh) == mesh.rank
    with pytest.raises(ModelError, match=r"SGD was to step a parameter of shape \[2, 2\] .* nobody holds any more"):
        torch.optim.SGD([weight], lr=0.1).step()


class Wrapper(nn.Module):
    """Looks attributes up in a way of its own, with errors of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(2, 1)

    def __getattr__(self, name: str) -> nn.Module:
        return self._modules[name]  # a KeyError, where there is none

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


@on_ranks(2)
def test_a_model_whose_attributes_raise_errors_of_their_own(tmp_path):
    mesh = tulle.init(data=-1)
    model = Wrapper()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    tulle.distribute(model, optimizer, mesh)
    before = model.body.weight.detach().clone()
    model(torch.full((1, 2), float(mesh.rank))).sum().backward()
    optimizer.step()
    torch.testing.assert_close(before - model.body.weight, torch.full((1, 2), 0.5))
    tulle.save(tmp_path / "checkpoint", model, optimizer)
    tulle.load(tmp_path / "checkpoint", model, optimizer)
