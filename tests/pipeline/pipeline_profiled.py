"""More models as strangers write them, cut into stages by a profile: what a trial run and the cut once got wrong."""

from dataclasses import dataclass
from typing import Any

import torch
from pipeline_networks import WIDTH
from pipeline_newcomers import Filling, Leaving
from torch import Tensor, nn

from tulle import pipeline


class Follower(nn.Module):
    """A teacher that follows its student in forward, whose parameters a trial run must not move."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for mine, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                mine.mul_(0.9).add_(new, alpha=0.1)
        return self.student(x) - self.teacher(x).detach()


class Calling(nn.Module):
    """Has a `__call__` of its own, as GPyTorch's models do, so that no hook sees it run."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def __call__(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x).tanh()).relu() * self.scale)


class Decoder(nn.Module):
    """Is handed a module, and reads its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, table: nn.Linear) -> Tensor:
        return x @ table.weight + self.bias


class Lender(nn.Module):
    """Hands one module to another, as Perceiver does."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.middle, self.decoder = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), Decoder()

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.middle(self.table(x)).relu(), self.table)


class Offsets(nn.Module):
    """Keeps what it gives in a buffer that it makes in its first call, as ALiBi's biases are."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", None, persistent=False)
        self.register_buffer("slope", torch.tensor(0.5))

    def forward(self, width: int) -> Tensor:
        if self.kept is None:
            self.register_buffer("kept", -self.slope * torch.arange(width), persistent=False)
        return self.kept


class Offset(nn.Module):
    """Is handed a module without parameters, and calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, offsets: Offsets) -> Tensor:
        return self.linear(x) * self.scale + offsets(x.shape[-1])


class Handing(nn.Module):
    """Calls a module of its own, and hands it to all layers, as x-transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.offsets, self.layers = Offsets(), nn.ModuleList(Offset() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.offsets(WIDTH)
        for layer in self.layers:
            x = layer(x, self.offsets).tanh()
        return x


class Again(torch.autograd.Function):
    """Runs modules, and runs them again in backward, as reversible networks do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: nn.ModuleList) -> Tensor:
        ctx.layers = layers
        vars(layers[0])["seen"] = 1.0
        ctx.save_for_backward(x)
        return layers[1](layers[0](x))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            ctx.layers[1](ctx.layers[0](x)).backward(gradient)
        return x.grad, None


class Reversible(nn.Module):
    """Has a part that only runs as one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.body = Body()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(self.first(x)))


class Body(nn.Module):
    """That part."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(Again.apply(x, self.layers))


class Watched(nn.Module):
    """Hooks of backward on a module with parts, and a layer that writes in its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))
        self.block.register_full_backward_hook(lambda _, grad_in, grad_out: (grad_in[0] * 0.5,))
        self.first, self.act, self.last = nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.block(self.act(self.first(x))))


class Solved(nn.Module):
    """A fixed point of its parts, with a hook that carries its gradient through them once more."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.outer(self.inner(x).tanh())
        start = y.detach().requires_grad_()
        again = self.outer(self.inner(start).tanh())
        y.register_hook(lambda gradient: gradient + torch.autograd.grad(again, start, gradient)[0])
        return y


class Equilibrium(nn.Module):
    """Solves within its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(nn.Linear(WIDTH, WIDTH), Solved(), Solved(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.parts(x)


class Collecting(nn.Module):
    """Hooks its layers when it is first called, and reads what they have collected, as `transformers` does."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.head, self.is_hooked, self.seen = nn.Linear(WIDTH, WIDTH), False, []

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_hooked:
            for layer in self.body:
                layer.register_forward_hook(lambda _, args, out: self.seen.append(out))
            self.is_hooked = True
        y = self.head(self.body(x))
        layers = [self.seen.pop(0) for _ in self.body]
        assert not self.seen
        return y * layers[1].mean() + layers[2].tanh()


class Glancing(nn.Module):
    """Hooks a layer for as long as its teacher runs, and reads what it gave."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student = (nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2))) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        handle = self.teacher[0].register_forward_hook(lambda _, args, out: seen.append(out))
        y = self.teacher(x)
        handle.remove()
        return self.student(x * seen[0].tanh()) + y


class Called(nn.Module):
    """Calls a layer with weights that it is given, and layers within a transform."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.act = nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        slope = torch.func.vmap(self.act)(x)
        return slope + self.act(torch.func.functional_call(self.layer, {"weight": weight}, (x,)))


class Hyper(nn.Module):
    """A network that makes the weights of another one."""

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.last = nn.Linear(3, WIDTH * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.codes, self.called = nn.Parameter(torch.randn(2, 3)), Called()

    def forward(self, x: Tensor) -> Tensor:
        for code in self.codes:
            x = self.called(x, self.maker(code).view(WIDTH, WIDTH))
        return self.last(x)


class Language(nn.Module):
    """A language model whose table those call that have other things to put between what it gives."""

    def __init__(self) -> None:
        super().__init__()
        with pipeline.stage(0):
            self.table = nn.Linear(WIDTH, WIDTH)
        with pipeline.stage(1):
            self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Seeing(nn.Module):
    """Calls a table past the module that it is in, as models of pictures and text do."""

    def __init__(self) -> None:
        super().__init__()
        self.eye, self.language = nn.Linear(WIDTH, WIDTH), Language()

    def forward(self, x: Tensor) -> Tensor:
        return self.language(self.language.table(x) + self.eye(x))


class Choosing(nn.Module):
    """Chooses by softmax, through which nothing goes back: its operation keeps its own result."""

    def __init__(self) -> None:
        super().__init__()
        self.scores, self.values = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.scores(x).softmax(-1).argmax(-1, keepdim=True)
        return self.values(x).gather(-1, chosen).expand_as(x)


class Choices(nn.Sequential):
    """Some of these, so that a rank is to let go of scores."""

    def __init__(self) -> None:
        super().__init__(*[Choosing() for _ in range(4)])


@dataclass
class Settings:
    """Has more than its fields, and a field that its class gives to nobody."""

    scale: float = 0.5
    heads: int = 1

    def __post_init__(self) -> None:
        self.twice = 2 * self.scale

    def __getattribute__(self, name: str) -> Any:
        if name == "heads":
            raise RuntimeError("each layer has heads of its own")
        return super().__getattribute__(name)


class Scaled(nn.Module):
    """Has settings, and is handed them."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings, self.linear = settings, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, settings: Settings) -> Tensor:
        return self.linear(x) * settings.twice


class Configured(nn.Module):
    """Keeps settings, and hands them on."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = Settings()
        self.layers = nn.ModuleList(Scaled(self.settings) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, self.settings)
        return x


class Jacobian(nn.Module):
    """Differentiates within, where torch lets nobody look at what autograd saves."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def energy(self, one: Tensor) -> Tensor:
        return (one @ self.weight).tanh().sum()

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.func.vmap(torch.func.grad(self.energy))(x)


class Spreading(nn.Module):
    """Spreads over the edges of a graph, which are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("edges", torch.eye(WIDTH).roll(1, 0))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + torch.sparse.mm(self.edges.to_sparse(), x.T).T


class Forces(nn.Sequential):
    """Layers that differentiate within, and look up in what is sparse."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), Jacobian(), Spreading(), Jacobian(), nn.Linear(WIDTH, WIDTH))


PROFILED = [
    Follower,
    Lender,
    Reversible,
    Watched,
    Calling,
    Equilibrium,
    Collecting,
    Glancing,
    Seeing,
    Hyper,
    Leaving,
    Filling,
    Choices,
    Configured,
    Forces,
    Handing,
]
