"""Small models that cannot be cut into a list of layers, and how to hold a pipeline of them against one process."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tulle
from tulle import pipeline
from tulle.pipeline import placement_of
from tulle.pipeline.randomness import seed_all, seed_of

WIDTH = 6


class Chain(nn.Module):
    """Layers one after the other."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Skips(nn.Module):
    """A U-Net: what goes down on each level joins what comes up."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv1d(2**level, 2 ** (level + 1), 3, padding=1) for level in range(3))
        self.up = nn.ModuleList(nn.Conv1d(2 ** (level + 2), 2**level, 3, padding=1) for level in reversed(range(3)))

    def forward(self, x: Tensor) -> Tensor:
        x, kept = x.unsqueeze(1), []
        for layer in self.down:
            x = F.relu(layer(x))
            kept.append(x)
        for layer in self.up:
            x = torch.tanh(layer(torch.cat([x, kept.pop()], dim=1)))
        return x.squeeze(1)


class Branches(nn.Module):
    """Which module runs, and how often, depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.cold, self.hot = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = self.hot(x) if x.sum() > 0 else self.cold(x)
        for _ in range(1 + int(x.abs().sum()) % 3):
            x = self.cell(x)
        largest = x.abs().amax(0).tolist()
        return x[x[:, 0] > -2] * (2.0 if max(largest) > 0.5 else 1.0)


class Tree(nn.Module):
    """A recursive network: the shape of the tree is in the data."""

    def __init__(self) -> None:
        super().__init__()
        self.leaf, self.join = nn.Linear(WIDTH, WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(self.leaf(x))

    def encode(self, rows: Tensor) -> Tensor:
        if len(rows) == 1:
            return rows
        cut = 1 + int(rows[0].argmax()) % (len(rows) - 1)
        parts = [self.encode(rows[:cut]), self.encode(rows[cut:])]
        return torch.tanh(self.join(torch.cat(parts, dim=1)))


@dataclass
class State:
    """What a module gives to the next, not known to pytree."""

    hidden: Tensor
    note: str
    mask: Tensor | None = None


class Pair(nn.Module):
    """Takes and gives dataclasses, dictionaries and None."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, state: State, *, scale: float = 1.0, unused: Tensor | None = None) -> dict[str, Any]:
        hidden = self.inner(state.hidden) * scale
        return {"state": State(torch.tanh(hidden), state.note + "!"), "count": len(hidden), "nothing": unused}


class Structures(nn.Module):
    """Passes everything but bare tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = Pair(), Pair(), Pair()

    def forward(self, x: Tensor) -> dict[str, Any]:
        out = self.one(State(x, "a"), scale=2.0)
        unused = self.three(out["state"])  # its result is dropped
        out = self.two(out["state"], unused=out["nothing"])
        assert out["state"].note == "a!!"
        assert out["count"] == len(x)
        assert out["nothing"] is None
        assert unused
        return {"y": out["state"].hidden, "mask": out["state"].mask}


class Writes(nn.Module):
    """Writes in tensors between modules, and within them in what they were given."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.rectify = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.seen.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        y = self.rectify(x.clone())
        y += x
        y[:, 0] = x[:, 1] * 2
        canvas = torch.zeros(len(x), WIDTH + 1, dtype=x.dtype)
        canvas[:, 1:] = self.last(y.clone())
        canvas[:, :1].copy_(self.seen[:1])
        y.mul_(canvas[:, 1:].clone()).neg_()
        return y + canvas[:, 1:].tanh_()


class Norms(nn.Module):
    """Batch norm, whose buffers follow the micro-batches, and parameters that are in no placed module."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.linspace(-1, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x)) * self.scale.exp() + self.shift
        return self.last(x) @ self.first.weight + F.linear(x, self.last.weight)  # reads parameters of other modules


class TiedEnds(nn.Module):
    """The first and the last module have one weight, and one in the middle is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.middle, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        ids = (x.abs() * 7).long() % 11
        return self.head(self.middle(torch.tanh(self.other(self.middle(self.embed(ids))))))


class Translator(nn.Module):
    """An encoder-decoder of torch's own layers."""

    def __init__(self) -> None:
        super().__init__()
        self.core = nn.Transformer(WIDTH, 2, 2, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        source = x.unsqueeze(-1) * torch.linspace(0, 1, WIDTH, dtype=x.dtype)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return self.core(source, source.flip(1), tgt_mask=mask)


class Recurrent(nn.Module):
    """An LSTM and its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True), nn.Linear(WIDTH, WIDTH)
        self.inlet = nn.Linear(1, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        outputs, (hidden, _) = self.lstm(self.inlet(x.unsqueeze(-1)))
        return self.out(outputs[:, -1] + hidden[-1])


class Square(torch.autograd.Function):
    """A function with a backward of its own, applied between modules."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * gradient


class Checkpointed(Chain):
    """Recomputes pairs of layers, with an operation between them."""

    is_reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        for first, second in zip(self.layers[::2], self.layers[1::2], strict=True):
            x = checkpoint(lambda y, a=first, b=second: b(torch.tanh(a(y))) + y, x, use_reentrant=self.is_reentrant)
        return Square.apply(x)


class Reentrant(Checkpointed):
    """The same with the older variant."""

    is_reentrant = True


class Drops(Chain):
    """Draws in modules, in operations between them, and to decide what runs."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if torch.rand([]) > 0.2:
                x = F.dropout(self.dropout(torch.tanh(layer(x))), 0.2, self.training)
        return x + torch.rand(WIDTH, dtype=x.dtype)


ALL = [
    Chain,
    Skips,
    Branches,
    Tree,
    Structures,
    Writes,
    Norms,
    TiedEnds,
    Translator,
    Recurrent,
    Checkpointed,
    Reentrant,
]


def first_tensor(result: Any) -> Tensor:
    """What a loss is made of."""
    return result["y"] if isinstance(result, Mapping) else result


def make(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


def spread(model: nn.Module, stages: int, depth: int = 2) -> dict[str, int]:
    """The leaves of a model, or what is above them at a depth, dealt round to stages: harder than any partition."""
    names = [name for name, module in model.named_modules() if name and not _is_container(module)]
    whole = [name for name in names if name.count(".") + 1 <= depth or not _parent_in(name, names)]
    outer = [name for name in whole if not _parent_in(name, whole)]
    return {name: number * stages // len(outer) for number, name in enumerate(outer)}


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.Transformer | nn.TransformerEncoder | nn.TransformerDecoder)


def _parent_in(name: str, names: list[str]) -> bool:
    return any(name.startswith(f"{other}.") for other in names)


def batches(count: int, samples: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(samples, WIDTH, generator=generator, dtype=torch.float64) for _ in range(count)]


def train(model: nn.Module, x: Tensor) -> Tensor:
    """A step function."""
    loss = first_tensor(model(x)).pow(2).mean()
    loss.backward()
    return loss


def one_process(model: nn.Module, x: Tensor, micro_batches: int, first_program: int, seed: int) -> list[float]:
    """What the pipeline must equal: the same micro-batches, one after the other, with the same random numbers."""
    losses = []
    for number, part in enumerate(x.tensor_split(micro_batches)):
        seed_all(seed_of(seed, first_program + number))
        loss = first_tensor(model(part)).pow(2).mean()
        (loss * (len(part) / len(x))).backward()
        losses.append(loss.item())
    return losses


def compare(kind: Callable[[], nn.Module], mesh: tulle.Mesh, assignment: dict[str, int], **options: Any) -> float:
    """Train two steps both ways; the largest relative difference of a gradient on this rank."""
    micro_batches = options.pop("micro_batches", 4)
    model, samples = make(kind), 3 * micro_batches
    reference = copy.deepcopy(model)
    pipeline.place(model, mesh["pipe"], assignment)
    placed = placement_of(model)
    assert placed is not None
    step = pipeline.step(micro_batches=micro_batches, **options)(train)
    for x in batches(2, samples):
        first = placed.runtime.programs + 1
        losses = step(model, x)
        expected = one_process(reference, x, micro_batches, first, placed.runtime.seed)
        assert losses.stack().tolist() == expected
    return worst_gradient(model, reference)


def worst_gradient(model: nn.Module, reference: nn.Module) -> float:
    """The largest difference of this rank's gradients, relative to the largest entry of any."""
    expected = dict(reference.named_parameters())
    scale = max(p.grad.abs().max().item() for p in expected.values() if p.grad is not None)
    worst = 0.0
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            assert parameter.grad is None, f"{name} lives at another stage and has a gradient"
            continue
        wanted = expected[name].grad
        assert (parameter.grad is None) == (wanted is None), name
        if parameter.grad is not None and wanted is not None:
            worst = max(worst, (parameter.grad - wanted).abs().max().item() / scale)
    return worst
