"""Models that are built without memory, and what takes a parameter's values by rows."""

import copy

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import init

from tulle.deferred import deferred_init


class Positions(nn.Module):
    """Computed, not drawn."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        place = torch.arange(length).float()[:, None]
        rate = torch.exp(torch.arange(0, width, 2) * (-9.0 / width))
        table = torch.zeros(length, width)
        table[:, 0::2] = torch.sin(place * rate)
        table[:, 1::2] = torch.cos(place * rate)
        self.register_buffer("table", table)


class Everything(nn.Module):
    """What constructors do."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(60, 8, padding_idx=3)
        init.xavier_uniform_(self.words.weight)
        self.bags = nn.EmbeddingBag(50, 8)
        self.layer = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
        self.positions = Positions(20, 8)
        self.big_positions = Positions(3000, 100)
        self.convolution = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(8)
        self.recurrent = nn.LSTM(8, 5, 2)
        self.out = nn.Linear(8, 60, bias=False)
        self.out.weight = self.words.weight
        self.free = nn.Parameter(torch.randn(7, 3) * 0.02)
        self.orthogonal = nn.Parameter(torch.empty(5, 4))
        init.orthogonal_(self.orthogonal)
        self.sparse = nn.Parameter(init.sparse_(torch.empty(20, 5), 0.5))
        self.truncated = nn.Parameter(init.trunc_normal_(torch.empty(30, 5), std=0.5, a=-0.4, b=0.4))
        self.counts = nn.Parameter(torch.zeros(9))
        init.normal_(self.counts[2:4].data)
        self.halves = nn.Linear(6, 7, dtype=torch.bfloat16)
        self.wide = nn.Linear(3, 3).double()
        self.copied = copy.deepcopy(nn.Sequential(self.wide, self.norm))
        self.array = nn.Parameter(torch.from_numpy(np.arange(6.0)))
        self.rates = [float(rate) for rate in torch.linspace(0, 0.1, 4)]
        self.choice = nn.Parameter(torch.rand(4).clamp_(0.2, 0.8), requires_grad=False)
        for module in self.modules():
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.normal_(module.bias, std=0.1)
        with torch.no_grad():
            self.words.weight[5] = 1.5
            self.bags.weight.mul_(2).sub_(0.5)


def built(kind, *, seed: int = 5, **options) -> nn.Module:
    torch.manual_seed(seed)
    with deferred_init():
        model = kind(**options)
    return model


def assert_same(model: nn.Module, expected: nn.Module) -> None:
    theirs = expected.state_dict()
    assert model.state_dict().keys() == theirs.keys()
    for name, value in model.state_dict().items():
        assert torch.equal(value, theirs[name]), name
        assert (value.dtype, value.stride()) == (theirs[name].dtype, theirs[name].stride()), name


def names_of(model: nn.Module) -> list[str]:
    return [*dict(model.named_parameters()), *dict(model.named_buffers())]


class Taker:
    """Puts chunks together again."""

    def __init__(self) -> None:
        self.chunks: list[Tensor] = []
        self.rows = 0

    def __call__(self, first_row: int, chunk: Tensor) -> None:
        assert first_row == self.rows
        self.rows += len(chunk)
        self.chunks.append(chunk.clone())


class Table(nn.Module):
    def __init__(self, fill, rows: int = 1003, width: int = 3, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.before = nn.Linear(2, 2)
        self.weight = nn.Parameter(fill(rows, width, dtype))
        self.after = nn.Linear(2, 2)


def embedding(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    return nn.Embedding(rows, width, padding_idx=4, dtype=dtype).weight.data


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 4, padding_idx=0)
        self.attention = nn.MultiheadAttention(4, 2)
        self.norm = nn.BatchNorm1d(4)
        self.hidden = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        self.recurrent = nn.GRU(4, 3)


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
