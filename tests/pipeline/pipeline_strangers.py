"""Models as strangers write them: each does something that a list of layers does not."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from pipeline_networks import WIDTH, first_tensor
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint


class Inception(nn.Module):
    """Branches of convolutions with an auxiliary head that counts only while training."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv1d(1, 4, 3, padding=1)
        self.branches = nn.ModuleDict({f"b{k}": nn.Conv1d(4, 2, k, padding=k // 2) for k in (1, 3, 5)})
        self.pool, self.norm = nn.MaxPool1d(3, 1, 1), nn.BatchNorm1d(10)
        self.auxiliary, self.head = nn.Linear(4, 3), nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Any:
        x = F.relu(self.stem(x.unsqueeze(1)), inplace=True)
        parts = [self.branches[name](x) for name in sorted(self.branches)]
        y = self.norm(torch.cat([*parts, self.pool(x)], 1))
        logits = self.head(y.mean(-1))
        return logits + 0.3 * self.auxiliary(x.mean(-1)) if self.training else logits


class Rivals(nn.Module):
    """A generator and a critic: two losses of one forward, one of them past a detached sample."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH))
        self.critic = nn.Sequential(nn.Linear(WIDTH, 8), nn.LeakyReLU(0.2, inplace=True), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        fake = self.generator(x)
        wrong = F.softplus(self.critic(fake.detach())) + F.softplus(-self.critic(x))
        return torch.stack([wrong, F.softplus(-self.critic(fake))]).squeeze(-1)


class Experts(nn.Module):
    """Tokens go to the experts that the data says; some get none."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == number)
            if rows.numel() == 0:
                continue
            out.index_add_(0, rows, expert(x[rows]) * weights[rows, places, None])
        return out


class Twins(nn.Module):
    """A Siamese network: one encoder on both halves, and a loss that compares them."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.project = nn.Linear(WIDTH // 2, 4), nn.Linear(4, 4)
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def embed(self, x: Tensor) -> Tensor:
        return F.normalize(self.project(F.gelu(self.encoder(x))), dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        one, other = (self.embed(half) for half in x.chunk(2, dim=-1))
        similar = torch.einsum("id,jd->ij", [one, other]) * self.temperature.exp()
        return similar - torch.eye(len(x), dtype=x.dtype)


@dataclasses.dataclass
class Found:
    """Nested, with None and numbers within."""

    y: Tensor
    parts: dict[str, Any]
    extra: tuple[Tensor | None, int] = (None, 0)


class Nested(nn.Module):
    """Gives dataclasses with dictionaries within, from a module that is asked by another name than forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def _pieces(self, x: Tensor) -> Iterator[Tensor]:
        for layer in (self.first, self.second):
            x = torch.tanh(layer(x))
            yield x

    def encode(self, x: Tensor) -> Found:
        outputs = list(self._pieces(x))
        return Found(outputs[-1], {"all": outputs, "deep": {"nothing": None}}, (outputs[0], len(outputs)))

    def forward(self, x: Tensor) -> dict[str, Any]:
        found = self.encode(x)
        assert found.parts["deep"]["nothing"] is None
        assert found.extra[1] == 2
        return {"y": found.y + sum(found.parts["all"]) * found.extra[0]}


class Borrows(nn.Module):
    """Uses the weights of other modules directly, transposed, sliced, and by functions."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.first, self.last = nn.Embedding(7, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        ids = (x * 3).long().abs() % 7
        h = self.first(x) + F.embedding(ids, self.table.weight).mean(1)
        h = F.linear(h, self.last.weight.t(), self.first.bias) + h @ self.first.weight[:, :WIDTH]
        decay = sum(parameter.pow(2).sum() for parameter in self.parameters())
        return self.last(h) + 1e-3 * decay


class Reparametrized(nn.Module):
    """Weight and spectral norm, and a moving average that forward updates."""

    def __init__(self) -> None:
        super().__init__()
        self.one = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.two = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.three = parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
            self.count += 1
        return self.three(torch.relu_(self.two(x - self.mean)))


class Hooked(nn.Module):
    """Hooks that change what goes in and comes out, and one that remembers what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.layers[1].register_forward_pre_hook(lambda _, args: (args[0] * 2,))
        self.layers[2].register_forward_hook(lambda _, args, out: out + args[0])
        self.layers[3].register_full_backward_hook(lambda _, grad_in, grad_out: (grad_in[0] * 0.5,))
        self.register_forward_pre_hook(lambda _, args: (args[0] + 1,))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Scratched(nn.Module):
    """Writes in slices of other modules' results, and in a canvas that grows a column at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.read = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        canvas = x.new_zeros(len(x), 4)
        for step in range(4):
            x = self.cell(x).clone()
            x[:, step] += 1.0
            x.masked_fill_(x > 3, 3.0)
            canvas[:, step : step + 1] = self.read(x)
        canvas, order = canvas.sort(dim=-1)
        return canvas.cumsum(-1) + order


class Recomputed(nn.Module):
    """Checkpoints around several modules, around one, and of a method; targets without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.three = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())

    def both(self, x: Tensor, *, scale: float) -> Tensor:
        return self.two(torch.tanh(self.one(x))) * scale

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.both, x, scale=0.5, use_reentrant=False)
        with torch.no_grad():
            target = self.one(x).sigmoid()
        return checkpoint(self.three, x, use_reentrant=False) - target


class Half(nn.Module):
    """Autocast around some modules, switched off around one."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = F.linear(x.float(), self.one.weight.float())
            y = torch.relu(y @ self.two.weight.float())
            with torch.autocast("cpu", enabled=False):
                y = self.three(y.to(x.dtype))
        return y


class Decoder(nn.Module):
    """Feeds its own output back until the data says stop; a state that is a plain Python object."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.attend, self.out = nn.LSTMCell(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        state, outputs, y = None, [], x
        for step in range(4):
            state = self.cell(y, state)
            outputs.append(state[0])
            memory = torch.stack(outputs, 1)
            weights = torch.bmm(memory, self.attend(state[0]).unsqueeze(-1)).softmax(1)
            y = self.out((weights * memory).sum(1))
            if step > 0 and y.norm() > 0.9:
                break
        return y


class Compiled(nn.Module):
    """Some of its modules are compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.three = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.two = torch.compile(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.three(self.two(self.one(x)))


class Groups(nn.Module):
    """Many outputs from one module, named tuples, and sorting by a key that the data gives."""

    def __init__(self) -> None:
        super().__init__()
        self.split = nn.Linear(WIDTH, 3 * WIDTH)
        self.heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.gain = nn.ParameterList([nn.Parameter(torch.tensor(float(n))) for n in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        parts = self.split(x).view(len(x), 3, WIDTH).unbind(1)
        parts = sorted(parts, key=lambda part: part.sum().item())
        values = [head(part) * gain for head, part, gain in zip(self.heads, parts, self.gain, strict=True)]
        best = torch.stack(values).max(dim=0)
        return best.values * (1 + best.indices) + F.pad(values[0], (0, 1))[:, 1:]


STRANGERS = [
    Inception,
    Rivals,
    Experts,
    Twins,
    Nested,
    Borrows,
    Reparametrized,
    Hooked,
    Scratched,
    Recomputed,
    Half,
    Decoder,
    Compiled,
    Groups,
]


def rival_losses(model: Rivals, x: Tensor) -> Tensor:
    """A step of both, each with a backward of its own through the parts that it trains."""
    fake = model.generator(x)
    model.critic.requires_grad_(True)
    wrong = (F.softplus(model.critic(fake.detach())) + F.softplus(-model.critic(x))).mean()
    wrong.backward()
    model.critic.requires_grad_(False)
    loss = F.softplus(-model.critic(fake)).mean()
    loss.backward()
    model.critic.requires_grad_(True)
    return wrong.detach() + loss.detach()


def twice(model: nn.Module, x: Tensor) -> Tensor:
    """Two backwards of one forward."""
    loss = first_tensor(model(x)).pow(2).mean()
    (loss * 0.25).backward(retain_graph=True)
    (loss * 0.75).backward()
    return loss
