"""The shape of a part is the part's: the log says so once to who asks, where a loss would be another number."""

import logging

import pytest
import torch
from torch import nn

import tulle
from ranks import on_ranks
from tulle.parts import asked_shapes
from tulle.plan import Memory, Plan


class Scored(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(20, 6), nn.Linear(6, 4)

    def forward(self, ids):
        return self.out(self.words(ids)).mean() / self.words.weight.shape[0]

    def penalty(self):
        return self.words.weight.pow(2).sum() / self.words.weight.shape[0]


@on_ranks(2)
@pytest.mark.parametrize("way", ["rows", "full_shard"])
def test_a_shape_that_is_asked_for_outside_of_forward_is_told_once(way, monkeypatch):
    monkeypatch.setattr(asked_shapes, "_warned", [])
    told, mesh = [], tulle.init(data=-1)
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logger = logging.getLogger("tulle")
    logger.addHandler(handler)
    try:
        model = Scored()
        optimizer = torch.optim.AdamW(model.parameters())
        plan = {"words": "rows"} if way == "rows" else Plan(mesh.shape, memory=Memory(full_shard=True))
        tulle.distribute(model, optimizer, mesh, plan=plan)
        for _ in range(2):
            model(torch.arange(8)).backward()
            tulle.clip_grad_norm_(model, 1.0)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        model.load_state_dict(model.state_dict())
        average = [torch.zeros_like(parameter) for parameter in model.parameters()]
        torch._foreach_lerp_(average, [*model.parameters()], 0.1)
        assert not [one for one in told if "shape" in one], "neither torch nor tulle is told, nor who asks in forward"
        model.penalty()
        sum(parameter.numel() for parameter in model.parameters())
    finally:
        logger.removeHandler(handler)
    (said,) = [one for one in told if "shape" in one]
    assert "shape at " in said
    assert "test_shapes_of_parts.py:" in said
    assert "words.weight" in said
    assert "ask for shapes before tulle.distribute" in said
