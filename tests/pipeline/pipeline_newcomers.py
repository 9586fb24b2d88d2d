"""More models as strangers write them, on given stages: those that the run-time once got wrong or refused."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from pipeline_networks import WIDTH
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.checkpoint import checkpoint


class Sliced(nn.Module):
    """Answers to questions as in BERT: slices with gaps in memory, made contiguous, on their own and other ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.ends, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2), nn.Linear(WIDTH // 2, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        begin, end = (part.squeeze(-1).contiguous() for part in self.ends(hidden).split(1, dim=-1))
        with torch.no_grad():
            scale = hidden.view(-1).abs().max()
        every_other = self.head(hidden[:, ::2].contiguous()) + hidden.t()[1:3].flatten().mean()
        return (begin * end).unsqueeze(-1) + every_other / scale


class Written(nn.Module):
    """Builds names from numbers of other ranks, as routers of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleDict({f"expert_{n}": nn.Linear(WIDTH, WIDTH) for n in range(3)})

    def forward(self, x: Tensor) -> Tensor:
        best = self.gate(x).sum(0).argsort()
        return self.experts[f"expert_{best[0]}"](x) + self.experts[f"expert_{best[1]}"](x)


class Sign(torch.autograd.Function):
    """The sign, with a gradient as if it were not there."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.sign() * weight.abs().mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Binary(nn.Module):
    """Applies functions of its own to a parameter of a placed module, and to one beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.threshold = nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(self.first(x), Sign.apply(self.second.weight), self.second.bias)
        return Sign.apply(y) + self.threshold


class Pair(NamedTuple):
    """A tuple with names, within which there are others."""

    one: Tensor
    rest: Any


class Maker(nn.Module):
    """Gives and takes such pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: Tensor | Pair) -> Pair:
        made = self.layer(given.one if isinstance(given, Pair) else given)
        return Pair(made, (made.sin(), {"pair": Pair(made.cos(), None)}))


class Packed(nn.Module):
    """Named tuples into and out of modules, and sequences packed for a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.recurrent = Maker(), Maker(), nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        pair = self.second(self.first(x).rest[1]["pair"])
        steps = torch.stack([pair.one, pair.rest[0]], 1)
        lengths = torch.arange(len(x)) % 2 + 1
        packed = nn.utils.rnn.pack_padded_sequence(steps, lengths, batch_first=True, enforce_sorted=False)
        result, _ = self.recurrent(packed)
        assert isinstance(result, PackedSequence)
        return nn.utils.rnn.pad_packed_sequence(result, batch_first=True)[0]


def _remember(module: nn.Module, args: tuple[Tensor], result: Tensor) -> None:
    module.last = args[0], result


class Remembering(nn.Module):
    """Hooks that remember what modules were given and gave."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        for layer in (self.first, self.second):
            layer.register_forward_hook(_remember)

    def forward(self, x: Tensor) -> Tensor:
        y = self.third(self.second(self.first(x)).tanh())
        return y + self.first.last[1].mean() * self.second.last[0].pow(2).mean()


class Averaging(nn.Module):
    """A moving average that the next forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        z = self.second((y + self.average).tanh())
        with torch.no_grad():
            self.average.mul_(0.5).add_(y.mean(0) * z.mean())
        return z


class Gathered(nn.Module):
    """Writes what comes from another stage in a tensor without gradients, of which there is a view, and goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        out = torch.zeros_like(x)
        half = out[:, :1]
        out.index_add_(0, torch.arange(len(x)), self.second(x))
        return self.third(out + half + 1)


class Within(nn.Module):
    """A checkpoint within another, around several modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def inner(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.second, self.first(x).tanh(), use_reentrant=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(checkpoint(self.inner, x, use_reentrant=False))


class Moving(nn.Module):
    """A layer with a buffer that it writes and reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.average.mul_(0.5).add_(x.mean())
        return x + self.average


class Revisited(nn.Module):
    """Calls such a layer before and after another one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.moving, self.second = nn.Linear(WIDTH, WIDTH), Moving(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.moving(self.second(self.moving(self.first(x))))


class Visited(Revisited):
    """Calls it once: what it holds in the end depends on the order of micro-batches all the same."""

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.moving(self.first(x)))


def _double(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    module.given = args[0]
    return (args[0] * 2,)


class Doubling(nn.Module):
    """A hook that remembers and changes what a module is given, and one with keywords that sees what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.second.register_forward_pre_hook(_double)
        self.second.register_forward_hook(lambda _, args, kwargs, out: out + args[0] + len(kwargs), with_kwargs=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.third(self.second(self.first(x)))
        return y + self.second.given.pow(2).mean()


class Counting(nn.Module):
    """A moving average that is a plain number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.average = 0.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x))
        self.average = 0.5 * self.average + x.abs().mean().item()
        return self.third(x / (1 + self.average))


class Codebook(nn.Module):
    """Moves the rows of a buffer of its own to where another stage's values are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("codes", torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x))
        nearest = torch.cdist(x, self.codes).argmin(-1)
        with torch.no_grad():
            self.codes.index_add_(0, nearest, x, alpha=0.1)
        return x - self.codes[nearest]


class Shown(Codebook):
    """Moves the rows, and a tensor that is made anew, by way of `.data` and `.detach()`, then all rows."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x))
        sums = torch.zeros(2, WIDTH, dtype=x.dtype)
        with torch.no_grad():
            self.codes.data[1].add_(x.mean(0))
            self.codes.detach().mul_(x.abs().mean())
            self.codes.copy_(self.codes.flip(0))
            sums.data[0] = x.sum(0)
        return x * sums.sum(0) - self.codes.mean(0)


class Expert(nn.Module):
    """Leaves on itself a loss, what it gives, a pair with a name, how often it ran, lists, and what it reads itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.loss, self.gives, self.pair = nn.Linear(WIDTH, WIDTH), 0.0, None, None
        self.before: Tensor | None = None
        self.calls, self.maps, self.collected = 0, [], []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.layer(x).tanh() if self.before is None else self.layer(x + self.before.mean()).tanh()
        self.before, self.gives, self.pair = y.detach(), y, ("of", y.std(), None)
        self.loss = y.pow(2).mean()
        self.maps.clear()
        self.maps += [y.mean(), y.exp()]
        self.collected.append(y.sum())
        return y


class Leaving(nn.Module):
    """Reads what modules have left on themselves, once their forwards are over."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.experts = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Expert() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for expert in self.experts:
            expert.collected.clear()
            x = x + expert(x) * expert.collected[0]
        left = sum(expert.loss + expert.pair[1] * expert.gives.mean() for expert in self.experts)
        maps = sum(expert.maps[0] * expert.maps[1] / expert.calls for expert in self.experts)
        return x + maps + left * self.experts[0].before.abs().mean()


class Filler(nn.Module):
    """Puts a loss in a list, and more in a dictionary, both of which it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, losses: list[Tensor], *, seen: dict[str, Any]) -> Tensor:
        y = self.layer(x).tanh()
        losses.append(y.pow(2).mean())
        seen["last"], seen["within"]["number"] = y, len(losses)
        return y


class Filling(nn.Module):
    """Sums up what modules have put in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.fillers = nn.ModuleList(Filler() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        losses, seen = [], {"within": {}}
        for filler in self.fillers:
            x = x + filler(x, losses, seen=seen)
        assert seen["within"]["number"] == len(losses) == 4
        return x + sum(losses) * seen["last"]


NEWCOMERS = [
    *(Sliced, Written, Binary, Packed, Remembering, Averaging),
    *(Gathered, Within, Revisited, Doubling, Counting, Codebook, Shown, Leaving, Filling),
]
