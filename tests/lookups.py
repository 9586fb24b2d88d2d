"""Models that look rows up in every way, and what trains one beside one process that does all ranks' work."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import models
import tulle
from gigabit import give_network
from models import WIDTH, WORDS, batches, build, worst_difference

STEPS = 4
SAMPLES_A_RANK = 4
TOLERANCE = 1e-12


class Lookups(nn.Module):
    """A word table and a layer; what looks the words up differs by case."""

    def __init__(self, table: nn.Module | None = None) -> None:
        super().__init__()
        self.words = table or nn.Embedding(WORDS, WIDTH, sparse=True)
        self.out = nn.Linear(WIDTH, 1)

    def read(self, looked_up: Tensor) -> Tensor:
        """A loss that depends on every row of `[..., width]`."""
        return torch.tanh(self.out(looked_up)).pow(2).sum() / SAMPLES_A_RANK


class Hashed(nn.Embedding):
    """Takes numbers of any size."""

    def forward(self, raw: Tensor) -> Tensor:
        """Of the rows that they fall to."""
        return super().forward(raw % self.num_embeddings)


class ByName(nn.Embedding):
    """Takes a list, by a name of its own."""

    def forward(self, *, words: list[list[int]]) -> Tensor:
        """Of the rows of these numbers."""
        return super().forward(torch.tensor(words, dtype=torch.int64))


class Two(Lookups):
    """Two modules that share one table."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.EmbeddingBag(WORDS, WIDTH, sparse=True, mode="sum", _weight=self.words.weight)
        self.more.weight = self.words.weight


class Beside(Lookups):
    """A second table."""

    def __init__(self) -> None:
        super().__init__()
        self.tags = nn.Embedding(WORDS, WIDTH, sparse=True)


def padded() -> Lookups:
    return Lookups(nn.Embedding(WORDS, WIDTH, sparse=True, padding_idx=1))


def hashed() -> Lookups:
    return Lookups(Hashed(WORDS, WIDTH, sparse=True))


def by_name() -> Lookups:
    return Lookups(ByName(WORDS, WIDTH, sparse=True))


def bags() -> Lookups:
    return Lookups(nn.EmbeddingBag(WORDS, WIDTH, sparse=True, mode="mean", padding_idx=-39))


def weighted_bags() -> Lookups:
    return Lookups(nn.EmbeddingBag(WORDS, WIDTH, sparse=True, mode="sum", include_last_offset=True))


@dataclass(frozen=True)
class Share:
    """What one rank works on in one step."""

    ids: Tensor
    rank: int
    ranks: int
    step: int
    scale: float
    """Of the loss, so that several ranks' gradients add up to their mean."""

    @property
    def is_last(self) -> bool:
        """Whether it is the last rank's."""
        return self.rank == self.ranks - 1


Work = Callable[[nn.Module, Share], None]


def looks_up(model: nn.Module, share: Share) -> None:
    (model.read(model.words(share.ids)) * share.scale).backward()


def looks_up_within_vmap(model: nn.Module, share: Share) -> None:
    (model.read(torch.func.vmap(model.words)(share.ids)) * share.scale).backward()


def looks_up_by_keyword_and_small_numbers(model: nn.Module, share: Share) -> None:
    (model.read(model.words(input=share.ids.int())) * share.scale).backward()


def looks_up_large_numbers(model: nn.Module, share: Share) -> None:
    (model.read(model.words(share.ids * 2**40 + 1)) * share.scale).backward()


def looks_up_by_a_name_of_its_own(model: nn.Module, share: Share) -> None:
    (model.read(model.words(words=share.ids.tolist())) * share.scale).backward()


def looks_up_by_offsets(model: nn.Module, share: Share) -> None:
    flat = share.ids.flatten()
    (model.read(model.words(flat, torch.arange(0, len(flat), 3))) * share.scale).backward()


def looks_up_weighted(model: nn.Module, share: Share) -> None:
    flat = share.ids.flatten()
    ends = torch.tensor([0, 4, 4, len(flat)])  # a bag is empty
    weights = torch.linspace(-1, 1, len(flat), dtype=torch.float64)
    (model.read(model.words(flat, ends, per_sample_weights=weights)) * share.scale).backward()


def looks_up_twice(model: nn.Module, share: Share) -> None:
    loss = model.read(model.words(share.ids)) + model.read(model.words(share.ids.flip(0) % 11)).sin()
    (loss * share.scale).backward()


def looks_up_through_both(model: nn.Module, share: Share) -> None:
    loss = model.read(model.words(share.ids)) + model.read(model.more(share.ids % 7)).sin()
    (loss * share.scale).backward()


def looks_up_on_the_last_rank_only(model: nn.Module, share: Share) -> None:
    loss = model.out(torch.ones(1, WIDTH, dtype=torch.float64)).sum()
    if share.is_last:
        loss = loss + model.read(model.words(share.ids))
    (loss * share.scale).backward()


def looks_up_on_changing_ranks(model: nn.Module, share: Share) -> None:
    loss = model.out(torch.ones(1, WIDTH, dtype=torch.float64)).sum()
    if (share.step + share.rank) % 2:
        loss = loss + model.read(model.words(share.ids))
    if share.step != 2:
        loss = loss + model.read(model.tags(share.ids))
    (loss * share.scale).backward()


def looks_up_nothing_on_rank_0(model: nn.Module, share: Share) -> None:
    looks_up(model, share if share.rank else Share(share.ids[:0], 0, share.ranks, share.step, share.scale))


def looks_up_padding_alone_on_rank_0(model: nn.Module, share: Share) -> None:
    ids = share.ids if share.rank else torch.ones_like(share.ids)
    (model.read(model.words(ids)) * share.scale).backward()


def accumulates(model: nn.Module, share: Share) -> None:
    without = getattr(model, "no_sync", nullcontext)
    *first, last = share.ids.chunk(4)
    with without():
        for part in first:
            (model.read(model.words(part)) * share.scale).backward()
    (model.read(model.words(last)) * share.scale).backward()


def runs_two_forwards_into_one_backward(model: nn.Module, share: Share) -> None:
    first, last = (model.read(model.words(part)) for part in share.ids.chunk(2))
    (first * last * share.scale).backward()


def computes_again(model: nn.Module, share: Share) -> None:
    loss = checkpoint(lambda ids: model.read(model.words(ids)), share.ids, use_reentrant=False)
    (loss * share.scale).backward()


def computes_part_again(model: nn.Module, share: Share) -> None:
    looked_up = checkpoint(lambda ids: model.words(ids), share.ids, use_reentrant=False)
    (model.read(looked_up) * share.scale).backward()


def is_evaluated_without_gradients_in_between(model: nn.Module, share: Share) -> None:
    loss = model.read(model.words(share.ids))
    with torch.no_grad():
        model.read(model.words(torch.arange(WORDS)))
    with torch.inference_mode():
        model.eval()
        model.read(model.words(torch.arange(3)))
        model.train()
    (loss * share.scale).backward()


def is_copied_and_the_copy_trained_alone(model: nn.Module, share: Share) -> None:
    loss = model.read(model.words(share.ids))
    if share.is_last:
        copied = copy.deepcopy(model)
        copied.zero_grad()
        copied.read(copied.words(torch.arange(WORDS))).backward()
        assert len(copied.words.weight.grad.coalesce().indices()[0]) == WORDS
    (loss * share.scale).backward()


def is_evaluated_with_gradients_in_between(model: nn.Module, share: Share) -> None:
    loss = model.read(model.words(share.ids))
    model.read(model.words(torch.arange(WORDS)))  # forgotten by the user
    (loss * share.scale).backward()


def drops_a_lookup(model: nn.Module, share: Share) -> None:
    unused = model.words(torch.arange(WORDS).unsqueeze(0))
    del unused
    looks_up(model, share)


def drops_a_lookup_on_the_last_rank_in_one_step(model: nn.Module, share: Share) -> None:
    if share.is_last and share.step == 2:
        drops_a_lookup(model, share)
    else:
        looks_up(model, share)


def looks_up_in_vain_on_rank_0(model: nn.Module, share: Share) -> None:
    looked_up = model.words(share.ids)
    if share.rank == 0:
        looked_up = looked_up.detach()  # this rank has no gradient of the table at all
    (model.read(looked_up) * share.scale).backward()


def mixes_functional_lookups(model: nn.Module, share: Share) -> None:
    loss = model.read(model.words(share.ids)) + model.read(
        F.embedding(share.ids.add(9) % WORDS, model.words.weight, sparse=True)
    )
    (loss * share.scale).backward()


def swaps_a_lookup_for_a_functional_one(model: nn.Module, share: Share) -> None:
    model.words(share.ids)  # as many ids as are looked up past the module, but others
    others = share.ids.flip(1).add(9) % WORDS
    (model.read(F.embedding(others, model.words.weight, sparse=True)) * share.scale).backward()


def runs_two_backwards(model: nn.Module, share: Share) -> None:
    for part in share.ids.chunk(2):
        (model.read(model.words(part)) * share.scale).backward()


def runs_one_graph_backward_twice(model: nn.Module, share: Share) -> None:
    loss = model.read(model.words(share.ids)) * share.scale
    loss.backward(retain_graph=True)
    loss.backward()


def makes_a_gradient_dense_on_rank_0(model: nn.Module, share: Share) -> None:
    loss = model.read(model.words(share.ids))
    if share.rank == 0 and share.step == 2:
        loss = loss + model.words.weight.pow(2).sum()
    (loss * share.scale).backward()


Case = tuple[Callable[[], nn.Module], Work]
FORESEEN: list[Case] = [
    (Lookups, looks_up),
    (Lookups, looks_up_by_keyword_and_small_numbers),
    (padded, looks_up),
    (padded, looks_up_within_vmap),
    (bags, looks_up),
    (bags, looks_up_by_offsets),
    (weighted_bags, looks_up_weighted),
    (padded, looks_up_twice),
    (Two, looks_up_through_both),
    (Lookups, looks_up_on_the_last_rank_only),
    (Beside, looks_up_on_changing_ranks),
    (Lookups, looks_up_nothing_on_rank_0),
    (padded, looks_up_padding_alone_on_rank_0),
    (bags, looks_up_padding_alone_on_rank_0),
    (padded, accumulates),
    (Lookups, runs_two_forwards_into_one_backward),
    (padded, computes_again),
    (Lookups, computes_part_again),
    (Lookups, is_evaluated_without_gradients_in_between),
    (Lookups, is_copied_and_the_copy_trained_alone),
]
NOT_FORESEEN: list[Case] = [
    (padded, is_evaluated_with_gradients_in_between),
    (Lookups, drops_a_lookup),
    (bags, drops_a_lookup_on_the_last_rank_in_one_step),
    (Lookups, looks_up_in_vain_on_rank_0),
    (Lookups, mixes_functional_lookups),
    (Lookups, swaps_a_lookup_for_a_functional_one),
    (padded, runs_two_backwards),
    (Lookups, runs_one_graph_backward_twice),
    (Lookups, makes_a_gradient_dense_on_rank_0),
    (hashed, looks_up_large_numbers),
    (by_name, looks_up_by_a_name_of_its_own),
]


def train(case: Case, mesh: tulle.Mesh, plan: str = "auto") -> nn.Module:
    """A few steps beside one process that works on every rank's share; gradients and parameters must be equal."""
    give_network(mesh["data"])
    kind, work = case
    name = f"{work.__name__} ({kind.__name__}, {plan})"
    reference = build(kind, 0)
    model, [optimizer] = tulle.distribute(model := build(kind, mesh.rank), models.sgd(model), mesh, plan=plan)
    [theirs] = models.sgd(reference)
    for step, ids in enumerate(batches(STEPS, SAMPLES_A_RANK * mesh.size)):
        shares = [Share(part, rank, mesh.size, step, 1 / mesh.size) for rank, part in enumerate(ids.chunk(mesh.size))]
        mine = shares[mesh.rank]
        work(model, Share(mine.ids, mine.rank, mine.ranks, mine.step, scale=1.0))
        for share in shares:
            work(reference, share)
        check_gradients(model, reference, f"{name}, step {step}")
        for one in (optimizer, theirs):
            one.step()
            one.zero_grad()
    difference, where = worst_difference(model, reference)
    assert difference < TOLERANCE, f"{name}: {where} differs by {difference:.1e}"
    return model


def check_gradients(model: nn.Module, reference: nn.Module, name: str) -> None:
    for (parameter, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), f"{name}: {parameter}"
        if mine.grad is not None and theirs.grad is not None:
            assert mine.grad.layout == theirs.grad.layout, f"{name}: {parameter}"
            ours, expected = mine.grad.to_dense(), theirs.grad.to_dense()
            difference = (ours - expected).abs().max().item() / max(expected.abs().max().item(), 1e-3)
            assert difference < TOLERANCE, f"{name}: the gradient of {parameter} differs by {difference:.1e}"
        if mine.grad is not None and mine.grad.layout == torch.sparse_coo:
            assert mine.grad.is_coalesced(), name
