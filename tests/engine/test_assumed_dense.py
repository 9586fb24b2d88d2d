"""Tables whose gradients are dense by type and zero in most rows: rows travel, all numbers are those of one process."""

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import tulle
from crossing import crossed
from gigabit import give_network
from models import worst_difference
from ranks import on_ranks
from tulle.comm import traffic
from tulle.engine import assumed_dense, engine_of
from tulle.engine.tables import TableSync

ROWS, WIDTH = 20_000, 8  # 1.3 MB of float64
STEPS = 5


class Words(nn.Module):
    """Two tables, of which the second is looked up as bags."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, WIDTH, padding_idx=3)
        self.bags = nn.EmbeddingBag(ROWS, 2 * WIDTH)
        self.out = nn.Linear(3 * WIDTH, 1)

    def forward(self, ids: Tensor) -> Tensor:
        """Mean loss of a batch `[samples, length]`."""
        found = torch.cat([self.words(ids).mean(1), self.bags((ids + 1) % ROWS)], dim=1)
        return torch.tanh(self.out(found)).mean()


class Named(Words):
    """The same tables as parameters that no module looks up."""

    def forward(self, ids: Tensor) -> Tensor:
        found = torch.cat([self.words.weight[ids].mean(1), self.bags.weight[ids].mean(1)], dim=1)
        return torch.tanh(self.out(found)).mean()


class Mixed(Words):
    """One of them as a parameter that no module looks up."""

    def __init__(self) -> None:
        super().__init__()
        self.named = nn.Parameter(torch.randn(ROWS, WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + self.named[ids].mean().square()


class Penalized(Words):
    """All rows of a table get gradients in some steps."""

    def forward(self, ids: Tensor) -> Tensor:
        loss = super().forward(ids)
        return loss + 1e-3 * self.words.weight.pow(2).sum() if ids[0, 0] % 2 else loss


class Tied(Words):
    """A table is an output layer, too."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + (self.words(ids[:2]).mean(1) @ self.words.weight.T).logsumexp(1).mean()


def batch(rank: int, step: int) -> Tensor:
    """`[16, 3]` row numbers, other ones on each rank and in each step, the first odd in every third step."""
    ids = torch.randint(ROWS, (16, 3), generator=torch.Generator().manual_seed(100 * rank + step))
    ids[0, 0] = 2 * (ids[0, 0] // 2) + (step % 3 == 2)
    return ids


def build(kind: Callable[[], nn.Module] = Words) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


def by_rows(model: nn.Module) -> set[str]:
    """Names of the tables with dense gradients that travel by rows."""
    engine = engine_of(model)
    assert engine is not None
    return engine.reducer.dense_tables


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> list[int]:
    """The steps of one rank; the bytes that it sent in each backward."""
    sent: list[int] = []
    for step in range(STEPS):
        before = traffic.total.bytes_sent
        model(batch(rank, step)).backward()
        sent.append(traffic.total.bytes_sent - before)
        assert all(p.grad is not None and p.grad.layout == torch.strided for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    return sent


def train_alone(model: nn.Module, optimizer: torch.optim.Optimizer, ranks: int, steps: int = STEPS) -> nn.Module:
    for step in range(steps):
        (sum(model(batch(rank, step)) for rank in range(ranks)) / ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def decays(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)


TRAVEL_BY_ROWS = {
    Words: {"words.weight", "bags.weight"},
    Named: {"words.weight", "bags.weight"},
    Penalized: {"words.weight", "bags.weight"},
    Tied: {"bags.weight"},
}


@pytest.mark.parametrize(("kind", "optimizer_of"), crossed(TRAVEL_BY_ROWS, [adam, momentum, decays]))
@on_ranks(2, 3, 4)
def test_it_is_one_process(kind, optimizer_of):
    mesh = tulle.init(data=-1)
    give_network(mesh["data"])
    model = build(kind)
    model, optimizer = tulle.distribute(model, optimizer_of(model), mesh)
    train(model, optimizer, mesh.rank)
    assert by_rows(model) == TRAVEL_BY_ROWS[kind]
    reference = build(kind)
    assert worst_difference(model, train_alone(reference, optimizer_of(reference), mesh.size))[0] < 1e-12


@on_ranks(2)
def test_rows_are_sent_and_told_ahead_and_the_plan_says_so():
    mesh = tulle.init(data=-1)
    give_network(mesh["data"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TableSync, "packet", lambda sync, slots, last: None)
        model = build()
        model, optimizer = tulle.distribute(model, adam(model), mesh)
        sent = train(model, optimizer, mesh.rank)
    assert max(sent[1:]) < 20_000
    assert all(group._is_early and group._is_foreseeable for group in engine_of(model).reducer.groups)
    explained = tulle.plan(model, optimizer).explain()
    assert "words.weight" in explained
    assert "bags.weight" in explained


@on_ranks(2)
def test_a_table_that_no_module_looks_up_does_not_keep_others_from_being_told_ahead():
    mesh = tulle.init(data=-1)
    give_network(mesh["data"])
    model, reference = build(Mixed), build(Mixed)
    model, optimizer = tulle.distribute(model, adam(model), mesh)
    train(model, optimizer, mesh.rank)
    told = {slot.name: group._is_foreseeable for group in engine_of(model).reducer.groups for slot in group.slots}
    assert told == {"words.weight": True, "bags.weight": True, "named": False}
    assert worst_difference(model, train_alone(reference, adam(reference), 2))[0] < 1e-12


@on_ranks(2)
def test_where_a_rank_looks_up_nothing_or_nobody_does():
    """A gradient that is not there is none of zeros: of what nobody has used none comes, as in one process."""
    mesh = tulle.init(data=-1)
    give_network(mesh["data"])
    model = build()
    model, _ = tulle.distribute(model, adam(model), mesh)
    model(batch(mesh.rank, 0)).backward()
    model.zero_grad()
    assert by_rows(model)
    ids = batch(mesh.rank, 1)
    model.bags(ids).mean().backward()
    assert model.words.weight.grad is None
    model.zero_grad()
    (model.bags(ids) if mesh.rank else model.words(ids)).mean().backward()
    reference = build()
    ((reference.words(batch(0, 1)).mean() + reference.bags(batch(1, 1)).mean()) / 2).backward()
    for mine, theirs in [(model.words, reference.words), (model.bags, reference.bags)]:
        torch.testing.assert_close(mine.weight.grad, theirs.weight.grad)


@pytest.mark.parametrize("set_to_none", [True, False])
@on_ranks(2)
def test_gradients_add_up_stay_and_are_held_by_whoever_keeps_them(set_to_none):
    mesh = tulle.init(data=-1)
    give_network(mesh["data"])
    model, reference = build(), build()
    model, optimizer = tulle.distribute(model, momentum(model), mesh)
    plain = momentum(reference)
    kept: list[tuple[Tensor, Tensor]] = []
    for step in range(0, 8, 2):
        with model.no_sync():
            model(batch(mesh.rank, step)).backward()
        model(batch(mesh.rank, step + 1)).backward()
        (sum(reference(batch(rank, step + n)) for rank in range(2) for n in range(2)) / 2).backward()
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-15)
        # Once more, on top of the mean, as DDP would average it.
        model(batch(mesh.rank, step)).backward()
        (sum(reference(batch(rank, step)) for rank in range(2)) / 2).backward()
        torch.testing.assert_close(model.words.weight.grad, reference.words.weight.grad, rtol=1e-12, atol=1e-15)
        kept += [(model.words.weight.grad, reference.words.weight.grad.clone())] * set_to_none
        optimizer.step(), plain.step()
        optimizer.zero_grad(set_to_none=set_to_none), plain.zero_grad(set_to_none=set_to_none)
    assert by_rows(model)
    for mine, theirs in kept:
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-15)
    assert worst_difference(model, reference)[0] < 1e-12


@on_ranks(2)
def test_a_gradient_that_a_hook_keeps_stays_that_of_its_rank():
    mesh = tulle.init(data=-1)
    give_network(mesh["data"])
    model = build()
    model, _ = tulle.distribute(model, adam(model), mesh)
    seen: list[tuple[Tensor, Tensor]] = []
    model.words.weight.register_post_accumulate_grad_hook(lambda p: seen.append((p.grad, p.grad.clone())))
    for step in range(3):
        model(batch(mesh.rank, step)).backward()
        model.zero_grad()
    assert by_rows(model)
    assert len(seen) == 3
    # In the first backward, gradients were taken in at its end.
    for held, copy in seen[1:]:
        assert torch.equal(held, copy)


@pytest.mark.parametrize(("scheme", "expected"), [("densify", set()), ("holders", {"words.weight"})])
@on_ranks(2)
def test_a_scheme_that_is_given_settles_it(scheme, expected):
    mesh = tulle.init(data=-1)
    give_network(mesh["data"])
    model, reference = build(), build()
    plan = {"words.weight": scheme, "bags.weight": "densify"}
    model, optimizer = tulle.distribute(model, adam(model), mesh, plan=plan)
    train(model, optimizer, mesh.rank)
    assert by_rows(model) == expected
    assert worst_difference(model, train_alone(reference, adam(reference), 2))[0] < 1e-12


@on_ranks(2)
def test_beside_updates_that_wait_until_they_are_read():
    mesh = tulle.init(data=-1)
    give_network(mesh["data"])
    model, reference = build(), build()
    model, optimizer = tulle.distribute(model, adam(model), mesh, plan=tulle.Plan(mesh.shape, schedule="read"))
    train(model, optimizer, mesh.rank)
    assert by_rows(model) == {"words.weight", "bags.weight"}
    assert worst_difference(model, train_alone(reference, adam(reference), 2))[0] < 1e-12


@pytest.mark.parametrize("axes", [{"data": 2, "model": 2}, {"pipe": 2, "data": 2}])
@on_ranks(4)
def test_beside_other_axes_and_torchs_clipping(axes):
    """Along axis `model` it is a part of the table that is looked up, whose gradient knows that."""
    mesh = tulle.init(**axes)
    give_network(mesh["data"])
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=ROWS, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    model = LlamaForCausalLM(config).double()
    reference = deepcopy(model)
    stages = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.layers": 1, "model.norm": 1, "lm_head": 1}
    plan = tulle.Plan(mesh.shape, stages=stages if "pipe" in axes else {})
    model, optimizer = tulle.distribute(model, momentum(model), mesh, plan=plan)
    plain = momentum(reference)
    for step in range(STEPS):
        ids = [batch(rank, step) for rank in range(2)]
        model(input_ids=ids[mesh["data"].rank], labels=ids[mesh["data"].rank]).loss.backward()
        (sum(reference(input_ids=one, labels=one).loss for one in ids) / 2).backward()
        for one, step_of in ((model, optimizer), (reference, plain)):
            nn.utils.clip_grad_norm_(one.parameters(), 0.1)
            step_of.step()
            step_of.zero_grad()
    if "model.embed_tokens.weight" in engine_of(model)._slots:
        assert by_rows(model) == {"model.embed_tokens.weight"}
    state = tulle.full_state_dict(model)
    for name, value in reference.state_dict().items() if mesh.rank == 0 else ():
        torch.testing.assert_close(state[name], value, rtol=1e-11, atol=1e-13)


@on_ranks(2)
def test_values_on_the_wire_keep_their_dtype_where_that_of_sparse_gradients_is_given():
    mesh = tulle.init(data=-1)
    give_network(mesh["data"])
    model, reference = build(), build()
    model, optimizer = tulle.distribute(model, adam(model), mesh, wire_dtype="bf16")
    train(model, optimizer, mesh.rank)
    assert by_rows(model)
    assert worst_difference(model, train_alone(reference, adam(reference), 2))[0] < 1e-12


@on_ranks(2)
def test_plan_in_force_is_one_that_another_run_can_be_given(tmp_path):
    mesh = tulle.init(data=-1)
    give_network(mesh["data"])
    model, reference = build(), build()
    model, optimizer = tulle.distribute(model, adam(model), mesh)
    model(batch(mesh.rank, 0)).backward()
    plan = tulle.plan(model, optimizer)
    path = tmp_path / f"plan-{mesh.rank}.json"
    plan.save(path)
    again = build()
    again, optimizer = tulle.distribute(again, adam(again), mesh, plan=tulle.Plan.load(path))
    train(again, optimizer, mesh.rank)
    assert by_rows(again) == {"words.weight", "bags.weight"}
    assert worst_difference(again, train_alone(reference, adam(reference), 2))[0] < 1e-12


def test_vectors_and_small_gradients_are_not_looked_at():
    gradients = {
        "small": torch.zeros(100, 8),
        "flat": torch.zeros(2**20),
        "words": torch.zeros(2**16, 8).index_fill_(0, torch.arange(7), 1.0),
    }
    assert assumed_dense.filled_rows(gradients) == {"words": 7}
