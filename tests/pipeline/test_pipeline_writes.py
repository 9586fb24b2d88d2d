"""What modules write in tensors that they are given, and in what they give twice, is written for all."""

from types import SimpleNamespace

import pytest
import torch
from beside_one_process import both, data
from pipeline_networks import WIDTH, make
from torch import nn

import tulle
from ranks import on_ranks
from tulle import pipeline
from tulle.errors import TulleError

APART = {"a": 0, "b": 1}


class Pair(nn.Module):
    first = second = nn.Linear

    def __init__(self):
        super().__init__()
        self.a, self.b = self.first(WIDTH, WIDTH), self.second(WIDTH, WIDTH)


class Doubles(nn.Linear):
    def forward(self, x):
        x.mul_(2)
        return super().forward(x)


class OfRaw(Pair):
    """The tensor that is written in is one of the batch, which all ranks have."""

    first = Doubles

    def forward(self, x):
        x = x.clone()
        return self.a(x).tanh() + self.b(x) * x.sum()


class Masks(nn.Embedding):
    def forward(self, ids):
        ids[ids < 0] = 0
        return super().forward(ids)


class OfIds(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = Masks(10, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        ids = (x * 3).long().clamp(-1, 9)
        y = self.b(self.a(ids))
        return y * ids.ne(0)[..., None] + ids.sum()


class Slot(nn.Linear):
    number, has_grad = 0, True

    def forward(self, x, memory):
        y = super().forward(x).tanh()
        with torch.set_grad_enabled(self.has_grad):
            memory.slots[self.number] = y
        return y + memory.slots[: self.number + 1].sum(0)


class OfMemory(nn.Module):
    """All modules write in one memory, in an object."""

    has_grad = True

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Slot(WIDTH, WIDTH) for _ in range(4))
        for number, layer in enumerate(self.layers):
            layer.number, layer.has_grad = number, self.has_grad

    def forward(self, x):
        memory = SimpleNamespace(slots=x.new_zeros(4, *x.shape))
        for layer in self.layers:
            x = layer(x, memory)
        return x + memory.slots.sum(0)


class OfMemoryWithoutGradients(OfMemory):
    has_grad = False


class IntoPlaceholder(nn.Linear):
    def forward(self, x, memory):
        memory[:, 0] = super().forward(x).mean(-1)


class OfDetached(Pair):
    """What is written in needs a gradient because of the module's own parameters."""

    second = IntoPlaceholder

    def forward(self, x):
        memory = self.a(x).detach()
        self.b(x, memory)
        return memory.exp()


class Follows(nn.Linear):
    def forward(self, x, average):
        y = super().forward(x)
        with torch.no_grad():
            average.mul_(0.5).add_(y.mean(0))
        return y


class OfBuffer(Pair):
    second = Follows

    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x):
        return self.b(self.a(x) + self.average, self.average) + self.average


class OfBufferOfAnother(Pair):
    second = Follows

    def __init__(self):
        super().__init__()
        self.a.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x):
        return self.b(self.a(x) + self.a.average, self.a.average)


class OfOwnTensor(Pair):
    """A bank that is no buffer is kept from one micro-batch to the next."""

    def __init__(self):
        super().__init__()
        self.bank = SimpleNamespace(average=torch.zeros(WIDTH).double())

    def forward(self, x):
        y = self.b(self.a(x) + self.bank.average)
        with torch.no_grad():
            self.bank.average.mul_(0.5).add_(y.mean(0))
        return y


class AsksForGradient(nn.Linear):
    def forward(self, graph):
        graph.x.requires_grad_(True)
        graph.force = torch.autograd.grad(super().forward(graph.x).pow(2).sum(), graph.x, create_graph=True)[0]


class Forces(Pair):
    first = AsksForGradient

    def forward(self, x):
        graph = SimpleNamespace(x=x.clone())
        self.a(graph)
        return self.b(graph.x) + graph.force


class Twice(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return SimpleNamespace(one=y, other=y)


class OfTwins(Pair):
    first = Twice

    def forward(self, x):
        both_of = self.a(x)
        z = self.b(both_of.other).detach()
        with torch.no_grad():
            both_of.one.mul_(2)
        return self.b(both_of.other) + z


class Views(nn.Linear):
    def forward(self, x):
        return x.view(-1, WIDTH)


class OfView(Pair):
    """What is written in is a view of what a module was sent."""

    first = Views

    def forward(self, x):
        y = self.b(x)
        view = self.a(y)
        with torch.no_grad():
            view += 1
        return self.b(y) + view


class Slices(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return y[:, :3], y


class OfSlices(Pair):
    """What is written in shares its memory with something else that the module gives."""

    first = Slices

    def forward(self, x):
        part, y = self.a(x)
        z = self.b(y).detach()
        with torch.no_grad():
            part.mul_(2)
        return self.b(y) + z


class OfTeacher(Pair):
    """A teacher follows by `.data`, of which no version tells, and by new data."""

    def __init__(self):
        super().__init__()
        self.a.register_parameter("teacher", nn.Parameter(torch.ones(WIDTH, WIDTH), requires_grad=False))
        self.b.register_parameter("teacher", nn.Parameter(torch.ones(WIDTH, WIDTH), requires_grad=False))

    def forward(self, x):
        y = self.a(x)
        self.a.teacher.data.mul_(0.9).add_(y.mean() + self.b.weight.data, alpha=0.1)
        self.b.teacher.data = self.b.teacher.data * 0.9 + self.a.teacher.data * y.mean()
        return self.b(y) @ self.b.teacher


KINDS = [
    OfTeacher,
    OfSlices,
    OfView,
    OfRaw,
    OfIds,
    OfDetached,
    OfBuffer,
    OfBufferOfAnother,
    OfOwnTensor,
    Forces,
    OfTwins,
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stages", [APART, {"a": 1, "b": 0}])
@on_ranks(2)
def test_what_a_module_writes_in_is_written_for_all(kind, stages):
    worst, model, reference = both(kind, stages)
    assert worst < 1e-12
    for name, buffer in model.named_buffers():
        if not buffer.is_meta:
            torch.testing.assert_close(buffer, reference.get_buffer(name), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [OfMemory, OfMemoryWithoutGradients])
@on_ranks(2, 3)
def test_modules_of_all_stages_write_in_one_tensor(kind):
    worst, _, _ = both(kind, {f"layers.{n}": n for n in range(4)})
    assert worst < 1e-12


class Sets(nn.Linear):
    def forward(self, x, batch):
        batch.h = super().forward(x).tanh()


class WritesThenReads(nn.Linear):
    """What it did until it read what had to come is not done twice."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.scale = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.seen, self.meter = {"within": [0]}, SimpleNamespace(calls=0)

    def forward(self, x, batch):
        x.mul_(2)
        with torch.no_grad():
            self.scale.mul_(1.1)
        self.seen["within"][0] += 1
        self.meter.calls += 1
        return super().forward(x) * self.scale * self.meter.calls * self.seen["within"][0] + batch.h


class Late(Pair):
    first, second = Sets, WritesThenReads

    def forward(self, x):
        batch = SimpleNamespace()
        self.a(x, batch)
        return self.b(x.clone(), batch)


@on_ranks(2)
def test_what_a_module_does_before_it_reads_what_is_elsewhere_is_done_once():
    worst, _, _ = both(Late, APART)
    assert worst < 1e-12


class Sometimes(nn.Linear):
    def forward(self, x):
        if x[0, 0] > 0:
            x.mul_(2)
        return super().forward(x.clone())


class OfData(Pair):
    first = Sometimes

    def forward(self, x):
        y = self.b(x).detach()
        return self.a(y) + self.b(y)


class PastTheCounter(nn.Linear):
    def forward(self, x):
        y = super().forward(x.clone())
        x.data.mul_(2)
        return y


class OfDataUncounted(OfData):
    first = PastTheCounter


@on_ranks(2)
@pytest.mark.parametrize("model", [OfData, OfDataUncounted])
def test_a_write_of_which_ranks_that_have_a_copy_do_not_know_is_refused(model):
    with pytest.raises(TulleError, match="writes in an argument of shape"):
        both(model, APART)


class Mixes(nn.Linear):
    def forward(self, x, other):
        return super().forward(x) + other, other


class SameNowNotThen(Pair):
    """Whether two arguments are one tensor differs between calls."""

    first = second = Mixes

    def forward(self, x):
        x, other = self.a(x, x)
        x, other = self.b(x, x)
        y, last = self.b(x, other.sin())
        return y + last


@on_ranks(2)
def test_arguments_are_one_tensor_in_one_call_and_two_in_the_next():
    worst, _, _ = both(SameNowNotThen, APART)
    assert worst < 1e-12


class Noisy(nn.Linear):
    def forward(self, x, generator):
        return super().forward(x) + torch.randn(1, generator=generator, dtype=x.dtype)


class Noises(Pair):
    first = second = Noisy

    def forward(self, x):
        generator = torch.Generator().manual_seed(3)
        y = self.a(x, generator)
        z = self.b(y, generator)
        first, second = y - x @ self.a.weight.T - self.a.bias, z - y @ self.b.weight.T - self.b.bias
        return first[0, 0], second[0, 0], torch.rand(1, generator=generator)


def noises(model, x):
    first, second, after = model(x)
    (first + second).backward()
    return first, second, after


@on_ranks(2)
def test_stages_do_not_draw_the_same_noise_from_one_generator():
    axis = tulle.init(pipe=-1, timeout=8)["pipe"]
    model = pipeline.place(make(Noises), axis, APART)
    first, second, after = pipeline.step(micro_batches=1)(noises)(model, data())
    assert not torch.allclose(first.stack(), second.stack())
    assert torch.equal(after.stack()[0], torch.rand(1, generator=torch.Generator().manual_seed(3)))
