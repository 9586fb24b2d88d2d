"""Batch norm between modules writes its statistics past torch's count, and yet all ranks have those of one process."""

import pytest
import torch
import torch.nn.functional as F
from beside_one_process import both, data
from pipeline_networks import WIDTH
from torch import nn

from ranks import on_ranks


class Between(nn.Module):
    """At no stage."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return self.third(self.normed(self.second(self.first(x))))

    def normed(self, x):
        return self.norm(x)


class ByHand(Between):
    """With buffers of the model's own, by torch's other name for it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("variance", torch.ones(WIDTH))

    def normed(self, x):
        x = F.batch_norm(x, self.mean, running_var=self.variance, training=self.training)
        return torch.batch_norm(x, None, None, self.mean, self.variance, self.training, 0.5, 1e-5, False)


class Twice(Between):
    """At two stages, whose values come with other strides than they have at home."""

    def forward(self, x):
        x = self.norm(self.first(x))
        return self.third(self.norm(self.second(x)[:, None].expand(-1, 2, -1)[:, 0]))


class Past(Between):
    """Past the module that it is in, which is at another stage and has saved its statistics for backward."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))

    def normed(self, x):
        return self.first[1](x)


@on_ranks(2)
@pytest.mark.parametrize("kind", [Between, ByHand, Twice, Past])
def test_all_ranks_have_the_statistics_of_a_batch_norm_between_modules(kind):
    worst, model, reference = both(kind, {"first": 0, "second": 1, "third": 0}, micro_batches=2)
    assert worst < 1e-12
    expected = dict(reference.named_buffers())
    for name, buffer in model.named_buffers():
        assert buffer.is_meta or torch.allclose(buffer, expected[name], rtol=1e-12), name
    with torch.no_grad():
        assert torch.allclose(model.eval()(data()).sum(), reference.eval()(data()).sum(), rtol=1e-12)
