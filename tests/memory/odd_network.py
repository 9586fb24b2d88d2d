"""A network of odd parameters, an optimizer of several groups over it, and how far two trainings are apart."""

import torch
from torch import nn

STEPS = 4
OPTIMIZERS = {
    "SGD": {"lr": 0.1},
    "SGD momentum": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "Adam": {"lr": 0.01, "amsgrad": True},
    "AdamW": {"lr": 0.01, "weight_decay": 0.1},
    "AdamW foreach": {"lr": 0.01, "foreach": True},
    "AdamW fused": {"lr": 0.01, "fused": True},
    "Adagrad": {"lr": 0.1},
    "Adadelta": {"lr": 1.0},
    "Adamax": {"lr": 0.01},
    "ASGD": {"lr": 0.01},
    "NAdam": {"lr": 0.01},
    "RAdam": {"lr": 0.01},
    "RMSprop": {"lr": 0.01, "momentum": 0.9},
    "Rprop": {"lr": 0.01},
}


class Odd(nn.Module):
    """Parameters of odd sizes, one number among them, channels last, and one that a step leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.out = nn.Linear(4, 3)
        self.sometimes = nn.Linear(3, 3)

    def forward(self, step: int, rank: int = 0, ranks: int = 1):
        pictures = torch.randn(12, 2, 5, 5, dtype=self.scale.dtype, generator=torch.Generator().manual_seed(step))
        seen = self.convolution(pictures.tensor_split(ranks)[rank]).relu().mean((2, 3))
        out = self.out(seen) * self.scale
        return (self.sometimes(out) if step % 2 else out).pow(2).mean()


def make(name):
    torch.manual_seed(0)
    model = Odd().double()
    groups = [{"params": model.convolution.parameters()}, {"params": [model.scale, *model.out.parameters()]}]
    groups += [{"params": model.sometimes.parameters(), "lr": 0.02}]
    return model, getattr(torch.optim, name.split()[0])(groups, **OPTIMIZERS[name])


def train(model, optimizer, axis=None, steps=range(STEPS)):
    rank, size = (axis.rank, axis.size) if axis else (0, 1)
    for step in steps:
        model(step, rank, size).backward()
        optimizer.step()
        optimizer.zero_grad()


def difference(found, expected):
    """The largest of the relative differences of two nests of tensors and numbers."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        return max((difference(found[key], expected[key]) for key in expected), default=0.0)
    if isinstance(expected, list):
        return max((difference(a, b) for a, b in zip(found, expected, strict=True)), default=0.0)
    if isinstance(expected, torch.Tensor):
        assert found.shape == expected.shape
        return ((found - expected).abs().max() / expected.abs().max().clamp_min(1e-3)).item()
    return 0.0 if found == expected else float("inf")
