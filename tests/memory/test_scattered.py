"""Gradients of what is shared out are summed on each host before they are sent to another, and are those of all."""

import os

import pytest
import torch
from saving_models import batch, layers
from torch import nn

import tulle
from pretended_hosts import pretend_hosts
from rank_process import patches
from ranks import on_ranks
from tulle.memory import scattered, share_out
from tulle.shared_memory import SWITCH

pytestmark = pytest.mark.skipif(os.environ.get(SWITCH) == "0", reason="ranks are told not to share memory")


def train(model, optimizer, rank=0, size=1):
    for step in range(3):
        model.eval()(batch(step).chunk(size)[rank]).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(4, 6)
@pytest.mark.parametrize("ranks_per_host", [2, 3])
def test_what_goes_to_another_host_goes_there_once(ranks_per_host):
    pretend_hosts(ranks_per_host)
    axis = tulle.init(data=-1)["data"]
    reference, model = layers(), layers()
    of_one, optimizer = (torch.optim.AdamW(one.parameters(), lr=0.01, eps=1e-2) for one in (reference, model))
    train(reference, of_one)
    share_out(model, axis, ["", "0", "1", "2", "3"], optimizers=[optimizer])
    elements: dict[str, int] = {}
    exchange = scattered.all_to_all_parts

    def counted(parts, lengths, way, *, label):
        leaving = sum(len(part) for rank, part in enumerate(parts) if rank != way.rank)
        elements[way.group.group_name] = elements.get(way.group.group_name, 0) + leaving
        return exchange(parts, lengths, way, label=label)

    patches.setattr(scattered, "all_to_all_parts", counted)
    train(model, optimizer, axis.rank, axis.size)
    found, wanted = model.state_dict(), reference.state_dict()
    assert max((found[name] - wanted[name]).abs().max().item() for name in wanted) < 1e-12
    hosts, rest = divmod(axis.size, ranks_per_host)
    whole = 3 * sum(parameter.numel() for parameter in reference.parameters())
    expected = [whole * (axis.size - 1) / axis.size]
    if not rest and hosts > 1:
        expected = [
            whole * (ranks_per_host - 1) / ranks_per_host,
            whole / ranks_per_host * (hosts - 1) / hosts,
        ]
    assert [*elements.values()] == pytest.approx(expected, rel=0.1)


@on_ranks(4)
def test_what_hosts_send_is_what_each_rank_is_due():
    pretend_hosts(2)
    axis = tulle.init(data=-1)["data"]
    lengths = [4, 2, 1, 5]

    def message(ranks):
        parts = [torch.full((lengths[rank],), 10.0**axis.rank * (rank + 1)).double() for rank in ranks]
        for part in parts:
            part[-1] = 7
        return torch.cat(parts)

    for _ in range(3):
        found = scattered.scatter_sums(message, lengths, axis, dtype=torch.float64, label="here")
        assert found.sums.tolist() == [1111.0 * (axis.rank + 1)] * (lengths[axis.rank] - 1)
        assert found.marks.tolist() == [7.0] * 4
        assert {*found.told_by} == {0, 1, 2, 3} - {3 - axis.rank}, "whose host and whose place are other ones"


@on_ranks(4)
@pytest.mark.parametrize("odd", [0, 3])
def test_a_rank_at_another_exchange_is_noticed_on_every_rank(odd):
    pretend_hosts(2)
    axis = tulle.init(data=-1)["data"]
    mark = 7.0 if axis.rank == odd else 5.0

    def message(ranks):
        return torch.tensor([1.0, mark] * len(ranks))

    found = scattered.scatter_sums(message, [2] * 4, axis, dtype=torch.float32, label="here")
    assert any(other != mark for other in found.marks.tolist())


@on_ranks(4)
def test_half_precision_is_summed_in_single_precision_and_rounded_once():
    pretend_hosts(2)
    axis = tulle.init(data=-1)["data"]
    value = [1.0, 2**-9, 2**-9, 2**-9][axis.rank]  # in bfloat16 they would vanish one by one

    def message(ranks):
        return torch.tensor([value, 3.0] * len(ranks), dtype=torch.bfloat16)

    found = scattered.scatter_sums(message, [2] * 4, axis, dtype=torch.bfloat16, label="here")
    assert found.sums.tolist() == [1 + 3 * 2**-9]
    assert [*found.told_by] == [0, 1, 2, 3]


@on_ranks(4)
def test_ranks_at_other_modules_of_two_hosts_are_told_so():
    pretend_hosts(2)
    axis = tulle.init(data=-1)["data"]
    model = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    share_out(model, axis, ["0", "1"])
    with pytest.raises(tulle.errors.ModelError, match="all ranks call the same modules"):
        model[axis.rank == 2](torch.ones(2, 8)).sum().backward()
