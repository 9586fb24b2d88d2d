"""Small models of several kinds for tests of what saves memory."""

import torch
from torch import nn


class Layer(nn.Module):
    """A layer with dropout, which draws random numbers."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.LayerNorm(width)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x):
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))


def layers(count: int = 4, width: int = 16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Layer(width) for _ in range(count)]).double()


def batch(step: int, samples: int = 12, width: int = 16):
    return torch.randn(samples, width, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def gradients(model: nn.Module, x) -> dict:
    """Gradients, with random numbers from one seed."""
    torch.manual_seed(1)
    model.zero_grad()
    model(x).pow(2).mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def alike(found: dict, expected: dict) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
