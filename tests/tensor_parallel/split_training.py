"""How tests of tensor parallelism train a split model and hold it against one process."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import tulle
from tulle import tensor_parallel
from tulle.tensor_parallel.linear import Column, RowLinear

STEPS = 3
TOLERANCE = 1e-12
EPSILON = 1e-2
"""Adam's: a bias of keys has no gradient but rounding noise, of which a smaller one makes steps."""

Loss = Callable[[nn.Module, int], Tensor]
"""The loss of a model on the batch of a step."""


def train(model: nn.Module, loss_of: Loss) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of three steps of Adam, and the gradients of the first, this rank's part of each."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=EPSILON)
    losses, gradients = [], {}
    for step in range(STEPS):
        loss = loss_of(model, step)
        loss.backward()
        if not step:
            gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, gradients


def differences(model: nn.Module, loss_of: Loss, split: Callable[[nn.Module], object]) -> dict[str, float]:
    """The relative difference of each loss, gradient and parameter between a split model and the whole one."""
    reference = copy.deepcopy(model)
    torch.manual_seed(5)
    losses, gradients = train(reference, loss_of)
    split(model)
    torch.manual_seed(5)
    found_losses, found_gradients = train(model, loss_of)
    cut = tensor_parallel.placements(model)
    whole = {name: cut[name].whole(part, label=name) if name in cut else part for name, part in found_gradients.items()}
    assert whole.keys() == gradients.keys()
    found = {
        f"loss {step}": _relative(torch.tensor(a), torch.tensor(b))
        for step, (a, b) in enumerate(zip(found_losses, losses, strict=True))
    }
    scale = max(g.abs().max().item() for g in gradients.values())
    found |= {f"gradient of {name}": _relative(whole[name], gradients[name], scale) for name in gradients}
    state = model.state_dict()
    expected = reference.state_dict()
    assert list(state) == list(expected)
    return found | {name: _relative(state[name], expected[name]) for name in expected}


def check_exact(
    model: nn.Module,
    loss_of: Loss,
    axis: tulle.mesh.Axis | None = None,
    *,
    tolerance: float = TOLERANCE,
    **options: Any,
) -> None:
    """Split over the axis and require what one process computes."""
    axis = axis or tulle.init(model=-1)["model"]
    options.setdefault("smallest_bytes", 0)
    found = differences(model, loss_of, lambda one: tensor_parallel.apply(one, axis, **options))
    worst = max(found, key=lambda name: found[name])
    assert found[worst] < tolerance, f"{worst} differs by {found[worst]:.1e}"


def drawn(model: nn.Module, x: Tensor, axis: tulle.mesh.Axis) -> list[list[Any]]:
    """What a model gives twice on each rank, and the number that the rank draws next."""
    torch.manual_seed(3)
    first, second = model(x), model(x)
    own = [first.tolist(), second.tolist(), torch.rand(()).item()]
    of_ranks: list[Any] = [None] * axis.size
    torch.distributed.all_gather_object(of_ranks, own)
    return of_ranks


def split(model: nn.Module) -> tuple[list[str], list[str]]:
    """Names of the column layers of a split model that give parts, and of its row layers."""
    columns = [name for name, one in model.named_modules() if isinstance(one, Column) and one.gathered is None]
    return columns, [name for name, one in model.named_modules() if isinstance(one, RowLinear)]


def _relative(found: Tensor, expected: Tensor, scale: float = 1e-3) -> float:
    assert found.shape == expected.shape, f"{list(found.shape)}, expected {list(expected.shape)}"
    if not expected.numel():
        return 0.0
    return ((found - expected).abs().max() / max(expected.abs().max().item(), scale)).item()


def numbers(*shape: int, seed: int) -> Tensor:
    """Normal numbers in float64, the same on every rank."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def ids(*shape: int, seed: int, words: int = 50) -> Tensor:
    """Word numbers, the same on every rank."""
    return torch.randint(words, shape, generator=torch.Generator().manual_seed(seed))


def square(output: Tensor | Sequence[Tensor] | Mapping[str, Tensor]) -> Tensor:
    """A loss of an output that is sensitive to each of its numbers."""
    tensor = output if isinstance(output, Tensor) else next(iter(output))
    weights = torch.cos(torch.arange(tensor.numel(), dtype=tensor.dtype)).view(tensor.shape)
    return (tensor * weights).sum() + tensor.pow(2).mean()
