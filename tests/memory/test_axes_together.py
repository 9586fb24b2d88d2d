"""Data and model axes with everything that saves memory: the numbers of one process."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import tulle
from crossing import crossed
from ranks import on_ranks
from tulle import memory, tensor_parallel
from tulle.engine import DataParallel, TableSettings

STEPS = 3


class Language(nn.Module):
    """A language model with a tied table and two encoder layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 12)
        layer = nn.TransformerEncoderLayer(12, 4, 20, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(12, 50)
        self.out.weight = self.words.weight

    def forward(self, words):
        scores = self.out(self.encoder(self.words(words[:, :-1])))
        return functional.cross_entropy(scores.flatten(0, 1), words[:, 1:].flatten())


def make():
    torch.manual_seed(0)
    model = Language().double()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-2)


def train(model, optimizer, clip, rank=0, size=1):
    losses = []
    for step in range(STEPS):
        words = torch.randint(50, (4, 9), generator=torch.Generator().manual_seed(step))
        loss = model(words.chunk(size)[rank])
        loss.backward()
        clip(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def clip_whole(model):
    nn.utils.clip_grad_norm_(model.parameters(), 0.3)


def clip_split(model):
    tensor_parallel.clip_grad_norm_(model, 0.3)


@on_ranks(4)
@pytest.mark.parametrize(
    ("sequence", "saving"), crossed([False, True], ["nothing", "optimizer", "recompute", "offload", "everything"])
)
def test_data_by_model_is_one_process(sequence, saving):
    reference, expected = make()
    train(reference, expected, clip_whole)
    mesh = tulle.init(data=2, model=2)
    model, optimizer = make()
    tensor_parallel.apply(model, mesh["model"], sequence=sequence, smallest_bytes=0)
    names = ["encoder.layers.0", "encoder.layers.1"]
    if saving in ("recompute", "everything"):
        memory.recompute(model, names[:1] if saving == "everything" else names)
    if saving in ("offload", "everything"):
        memory.offload(model, names, smallest_bytes=0)
    DataParallel(model, mesh["data"], tables=[], settings=TableSettings(), bucket_bytes=10_000, check_finite=False)
    if saving in ("optimizer", "everything"):
        memory.shard_optimizer(optimizer, mesh["data"])
    data = mesh["data"]
    train(model, optimizer, clip_split, data.rank, data.size)
    found, wanted = model.state_dict(), reference.state_dict()
    assert max((found[name] - wanted[name]).abs().max().item() for name in wanted) < 1e-12


@on_ranks(4)
def test_full_sharding_and_a_model_axis_are_one_process():
    reference, expected = make()
    train(reference, expected, lambda model: None)
    mesh = tulle.init(data=2, model=2)
    model, _ = make()
    tensor_parallel.apply(model, mesh["model"], smallest_bytes=0)
    memory.shard_fully(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-2)
    train(model, optimizer, lambda model: None, mesh["data"].rank, 2)
    found, wanted = memory.whole_state_dict(model), reference.state_dict()
    assert max((found[name] - wanted[name]).abs().max().item() for name in wanted) < 1e-12


@on_ranks(2, 4)
@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_the_norm_of_parts_is_that_of_the_whole(norm_type):
    axis = tulle.init(model=-1)["model"]
    words = torch.randint(50, (4, 9), generator=torch.Generator().manual_seed(0))
    reference, _ = make()
    reference(words).backward()
    expected = nn.utils.get_total_norm([p.grad for p in reference.parameters()], norm_type)
    model, _ = make()
    tensor_parallel.apply(model, axis, smallest_bytes=0)
    model(words).backward()
    assert tensor_parallel.gradient_norm(model, norm_type).item() == pytest.approx(expected.item(), rel=1e-12)
    plain = nn.utils.get_total_norm([p.grad for p in model.parameters()], norm_type)
    assert norm_type == float("inf") or abs(plain.item() / expected.item() - 1) > 1e-3  # the twin: parts alone
