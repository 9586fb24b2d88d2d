"""ZB-H1: gradients of weights are put off, with the numbers and hooks of one backward."""

import time

import pytest
import torch
from pipeline_networks import WIDTH
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

import tulle
from ranks import on_ranks
from tulle import pipeline
from tulle.comm import traffic
from tulle.pipeline.split_backward import splits_of


class Added(nn.Module):
    """A layer as GPT-2 of transformers has it: its weight is not transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.flatten(0, 1), self.weight).view(x.shape)


class Masked(nn.Module):
    """Its weight is changed before it is used, and used again elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(nn.functional.linear(x, self.inner.weight * 0.5, self.inner.bias))
        return self.inner(self.inner(y))


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda y: torch.tanh(self.inner(y)), x, use_reentrant=False)


class Adapted(nn.Module):
    """A frozen layer with a trained one of low rank beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.up(self.down(x))


class Convolved(nn.Module):
    def __init__(self, kind: type[nn.Module], **options: int) -> None:
        super().__init__()
        self.inner = kind(WIDTH, WIDTH, 3, padding=1, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


class Kinds(nn.Module):
    """All kinds of layers, each with a norm behind it."""

    def __init__(self) -> None:
        super().__init__()
        kinds = [
            nn.Linear(WIDTH, WIDTH),
            Added(),
            Masked(),
            nn.Linear(WIDTH, WIDTH, bias=False),
            Convolved(nn.Conv1d, groups=2),
            Recomputed(),
            Convolved(nn.ConvTranspose1d),
            Adapted(),
            nn.GRU(WIDTH, WIDTH, batch_first=True),
        ]
        self.layers = nn.ModuleList(kinds)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in kinds)

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(x + (y[0] if isinstance(y := layer(x), tuple) else y))
        return x


def stages_of(model: Kinds, ranks: int) -> dict[str, int]:
    count = len(model.layers)
    return {f"{kind}.{n}": n * ranks // count for kind in ("layers", "norms") for n in range(count)}


def run(schedule: str, mesh: tulle.Mesh, *, autocast: bool = False) -> tuple[list[Tensor], list[float], list[str]]:
    """Gradients of two steps, losses, and what hooks saw, of this rank."""
    torch.manual_seed(0)
    model = Kinds()
    seen: list[str] = []
    pipeline.place(model, mesh["pipe"], stages_of(model, mesh.size))
    mine = {name: parameter for name, parameter in model.named_parameters() if not parameter.is_meta}
    for name, parameter in mine.items():
        if not parameter.requires_grad:
            continue
        parameter.register_hook(lambda gradient, name=name: seen.append(f"{name} {gradient.abs().sum()}"))
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(f"{name} is there"))

    @pipeline.step(micro_batches=5, schedule=schedule)
    def step(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = model(x)
        loss = y.float().pow(2).mean()
        loss.backward()
        return loss

    x = torch.randn(10, 4, WIDTH, generator=torch.Generator().manual_seed(1))
    losses = [step(model, x).mean().item() for _ in range(2)]
    return [parameter.grad for parameter in mine.values() if parameter.grad is not None], losses, sorted(seen)


@on_ranks(2, 4)
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
def test_gradients_losses_and_hooks_are_those_of_1f1b_to_the_bit(autocast):
    mesh = tulle.init(pipe=-1)
    expected = run("1f1b", mesh, autocast=autocast)
    found = run("zb-h1", mesh, autocast=autocast)
    assert expected[1:] == found[1:]
    assert all(torch.equal(*pair) for pair in zip(expected[0], found[0], strict=True))


class Heavy(nn.Module):
    """Backward of its weight takes as long as that of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.inner.weight.register_hook(lambda _: time.sleep(0.05))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@on_ranks(2)
def test_weights_wait_until_a_rank_has_nothing_else_to_do():
    mesh = tulle.init(pipe=-1)
    model = nn.Sequential(*(Heavy() for _ in range(2)))
    pipeline.place(model, mesh["pipe"], {"0": 0, "1": 1})

    @pipeline.step(micro_batches=4, schedule="zb-h1")
    def step(model: nn.Module, x: Tensor) -> Tensor:
        loss = model(x).pow(2).mean()
        loss.backward()
        return loss

    x = torch.randn(4, WIDTH)
    step(model, x)
    traffic.is_tracing = True
    try:
        traffic.take_spans()
        step(model, x)
        spans = [span for span in traffic.take_spans() if span.track == "stage" and span.end_s - span.begin_s > 0.04]
    finally:
        traffic.is_tracing = False
    names = [span.name for span in spans]
    if mesh.rank == 0:
        assert names == [f"backward {number}" for number in range(4)], "nobody waits for rank 0: it runs as a whole"
    else:
        assert names == [f"weights {number}" for number in range(4)]


@on_ranks(2)
def test_what_fails_while_it_is_caught_up_is_told_to_all():
    mesh = tulle.init(pipe=-1)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    pipeline.place(model, mesh["pipe"], {"0": 0, "1": 1})
    if mesh.rank == 1:
        model[1].weight.register_hook(fail)

    @pipeline.step(micro_batches=4, schedule="zb-h1")
    def step(model: nn.Module, x: Tensor) -> Tensor:
        loss = model(x).pow(2).mean()
        loss.backward()
        return loss

    with pytest.raises((tulle.errors.CommunicationError, ValueError), match="no good"):
        step(model, torch.randn(4, WIDTH))


def fail(_: Tensor) -> None:
    raise ValueError("no good")


@on_ranks(2)
def test_a_step_that_reads_gradients_behind_its_backward_reads_whole_ones():
    mesh = tulle.init(pipe=-1)
    read = {schedule: gradients_read(schedule, mesh) for schedule in ("1f1b", "zb-h1")}
    assert len(read["1f1b"]) == 3
    assert read["1f1b"] == read["zb-h1"]


def gradients_read(schedule: str, mesh: tulle.Mesh) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    pipeline.place(model, mesh["pipe"], {"0": 0, "1": 1})
    found: list[float] = []

    @pipeline.step(micro_batches=3, schedule=schedule)
    def step(model: nn.Sequential, x: Tensor) -> Tensor:
        loss = model(x).pow(2).mean()
        loss.backward()
        gradient = model[1].weight.grad
        assert gradient is not None
        found.append(gradient.sum().item())
        return loss

    step(model, torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0)))
    return found


def graph_of(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """A leaf, and what a layer makes of it."""
    leaf = x.clone().requires_grad_()
    return leaf, layer(leaf * 1)


@pytest.mark.parametrize(
    ("layer", "is_put_off"),
    [
        (nn.Linear(WIDTH, WIDTH), True),
        (nn.Linear(WIDTH, WIDTH, bias=False), True),
        (Added(), True),
        (Convolved(nn.Conv1d), True),
        (Convolved(nn.ConvTranspose1d), True),
        (Adapted(), True),
        (nn.Linear(WIDTH, WIDTH).requires_grad_(False), False),
        (nn.LayerNorm(WIDTH), False),
        (Masked(), False),
        (Recomputed(), False),
    ],
    ids=lambda one: type(one).__name__,
)
def test_a_backward_in_two_halves_is_one(layer, is_put_off):
    x, gradient = torch.randn(3, 4, WIDTH), torch.randn(3, 4, WIDTH)
    leaf, y = graph_of(layer, x)
    y.backward(gradient)
    trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    expected = [leaf.grad, *(parameter.grad for parameter in trained)]
    layer.zero_grad()
    leaf, y = graph_of(layer, x)
    edge = get_gradient_edge(y)
    [split] = splits_of([([edge], [leaf])])
    assert (split is not None) == is_put_off
    if split is not None:
        with torch.no_grad():
            works = split.backward([edge], [gradient])
            assert torch.equal(leaf.grad, expected[0])
            assert all(parameter.grad is None for parameter in layer.parameters()), "it was not put off"
            for work in works:
                work()
        found = [leaf.grad, *(parameter.grad for parameter in trained)]
        assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))


def test_nothing_is_put_off_that_nobody_waits_for():
    layer = nn.Linear(WIDTH, WIDTH)
    assert splits_of([([get_gradient_edge(layer(torch.randn(3, WIDTH)))], [])]) == [None]


def test_a_write_in_what_is_needed_later_is_told():
    layer, x = nn.Linear(WIDTH, WIDTH), torch.randn(3, WIDTH)
    leaf = torch.zeros(3, WIDTH, requires_grad=True)
    y = layer(given := x + leaf)
    edge = get_gradient_edge(y)
    [split] = splits_of([([edge], [leaf])])
    assert split is not None
    [work] = split.backward([edge], [torch.ones_like(y)])
    given.detach().mul_(2)
    with pytest.raises(tulle.errors.GradientError, match=r"of shape \[3, 6\].* write in a copy .*or take \"1f1b\""):
        work()


def test_hooks_of_what_a_layer_gives_run_once():
    layer, seen = nn.Linear(WIDTH, WIDTH), list[Tensor]()
    leaf, y = graph_of(layer, torch.randn(3, WIDTH))
    y.register_hook(lambda gradient: seen.append(gradient) or gradient * 2)
    edge = get_gradient_edge(y)
    [split] = splits_of([([edge], [leaf])])
    assert split is not None
    for work in split.backward([edge], [torch.ones_like(y)]):
        work()
    assert len(seen) == 1
    assert torch.equal(layer.bias.grad, torch.full((WIDTH,), 6.0)), "the hook doubles it"
