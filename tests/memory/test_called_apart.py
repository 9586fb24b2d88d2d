"""Modules that are called without the one that gathers for them, or that write into parameters, train as ever."""

import copy
from contextlib import nullcontext
from functools import partial
from types import MethodType

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jacrev, vmap
from torch.utils.checkpoint import checkpoint

import tulle
from ranks import on_ranks
from tulle.errors import ModelError
from tulle.memory import offload, recompute, share_out, shared_out


class Recomputing(nn.Module):
    """Recomputes a part of itself, by a call of its own."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6))
        self.use_reentrant = use_reentrant

    def forward(self, x):
        return x + checkpoint(self.inner, x, use_reentrant=self.use_reentrant)


class Clamped(nn.Module):
    """Writes into its parameter before it reads it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x):
        with torch.no_grad():
            self.weight.clamp_(-0.3, 0.3)
        return torch.tanh(x @ self.weight)


class Replaced(nn.Module):
    """Gives its parameter other memory, so that what it computes then may lie where the parameter lay."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x):
        self.weight.data = self.weight.data.clamp(-0.3, 0.3)
        hidden = torch.tanh(x)
        return torch.tanh((hidden * hidden.sin() * 1.5) @ self.weight)


class Begun(nn.Module):
    """Begins by its first batch, past torch's counter, as GPyTorch's variational parameters and flows' ActNorm do."""

    def __init__(self):
        super().__init__()
        self.weight, self.shift = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.zeros(6))
        self.register_buffer("is_begun", torch.zeros(()))

    def forward(self, x):
        if not self.is_begun:
            self.shift.data.copy_(torch.linspace(-1, 1, 6).to(x))
            self.weight.data[1:3].mul_(0.5)
            self.is_begun.fill_(1)
        self.weight.data.clamp_(-0.8, 0.8)
        return torch.tanh(x @ nn.Parameter(self.weight) @ self.weight + self.shift)


class Attending(nn.Module):
    """Reads the parameters of modules in it without calling them."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.out = nn.Linear(6, 6)

    def forward(self, x):
        return self.attended(x).pow(2).mean()

    def attended(self, x):
        return self.out(self.attention(x[:, None], x[:, None], x[:, None])[0])


class Conjugated(nn.Module):
    """Autograd saves its weight twice, the second time as its conjugate, in the same memory."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6, dtype=torch.complex128))

    def forward(self, x):
        return torch.tanh(x @ (self.weight * self.weight.conj() + self.weight.mH).real)


class Again(torch.autograd.Function):
    """Runs a function again in backward, and asks for the gradients of what it was told that that reads."""

    @staticmethod
    def forward(ctx, run, saves, x, *parameters):
        ctx.run, ctx.x, ctx.parameters = run, x.detach(), None if saves else parameters
        if saves:
            ctx.save_for_backward(*parameters)
        return run(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.x.requires_grad_()
        with torch.enable_grad():
            y = ctx.run(x)
        parameters = [p for p in ctx.parameters or ctx.saved_tensors if p.requires_grad]
        of_x, *rest = torch.autograd.grad(y, (x, *parameters), gradient, allow_unused=True)
        found = iter(rest)
        return None, None, of_x, *(next(found) if needed else None for needed in ctx.needs_input_grad[3:])


class Adjoint(nn.Module):
    """Owes the gradients of its parameters to a function of its own, as an ODE's block does (torchdiffeq)."""

    def __init__(self, *, saves, frozen=False):
        super().__init__()
        self.first, self.second, self.saves = nn.Linear(6, 9), nn.Linear(9, 6), saves
        self.first.weight.requires_grad_(not frozen)

    def run(self, x):
        return x + self.second(self.first(x).tanh())

    def forward(self, x):
        return Again.apply(self.run, self.saves, x, *self.parameters())


def whole(model, x):
    return model(x).pow(2).mean()


def in_parts(model, x):
    return model.attended(x).pow(2).mean() + model(x)


KINDS = {
    "recomputed": (lambda: nn.Sequential(nn.Linear(6, 6), Recomputing(False), Recomputing(False)), whole),
    "recomputed by reentry": (lambda: nn.Sequential(nn.Linear(6, 6), Recomputing(True), Recomputing(True)), whole),
    "written": (lambda: nn.Sequential(Clamped(), Clamped()), whole),
    "given other memory": (lambda: nn.Sequential(Replaced(), Replaced()), whole),
    "written by .data": (lambda: nn.Sequential(Begun(), nn.Linear(6, 6), Begun()), whole),
    "called in parts": (Attending, in_parts),
    "asked for, kept": (lambda: nn.Sequential(Adjoint(saves=False), Adjoint(saves=False, frozen=True)), whole),
    "asked for, saved": (lambda: nn.Sequential(Adjoint(saves=True), Adjoint(saves=True, frozen=True)), whole),
    "conjugated": (lambda: nn.Sequential(Conjugated(), Conjugated()), whole),
}


def trained(kind, axis=None):
    build, loss = KINDS[kind]
    torch.manual_seed(0)
    model = build().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    if axis is not None:
        units = ["", *(name for name, _ in model.named_children())]
        share_out(model, axis, units, stay=[""], optimizers=[optimizer])
    for step in range(5):
        x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        loss(model, x if axis is None else x.chunk(axis.size)[axis.rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def compare(kind):
    wanted = trained(kind)
    found = trained(kind, tulle.init(data=-1)["data"])
    assert list(found) == list(wanted)
    assert max((found[name] - wanted[name]).abs().max().item() for name in wanted) < 1e-12


@on_ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_one_process(kind):
    compare(kind)


@on_ranks(2)
def test_the_twin_that_forgets_what_was_written_is_found(monkeypatch):
    monkeypatch.setattr(shared_out, "_write_back", lambda *_: None)
    with pytest.raises(AssertionError):
        compare("written")


class Router(nn.Module):
    """Computes in single precision, to which its layer is converted as it runs, as in Switch Transformers."""

    def __init__(self, weight=None):
        super().__init__()
        self.layer = nn.Linear(6, 6, bias=False)
        self.weight = weight

    def forward(self, x):
        if self.weight is not None:
            self.layer.weight.data = self.weight
        self.layer = self.layer.float()
        return self.layer(x.float())


@on_ranks(2)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch's .to()
def test_a_forward_that_converts_its_parameter_is_told_so():
    axis, x = tulle.init(data=-1)["data"], torch.randn(3, 6)
    for router, made in (
        (Router().double(), r"float32 \[6, 6\], where it was torch.float64"),
        (Router(x), r"\[3, 6\], w"),
    ):
        share_out(router, axis, [""])
        with pytest.raises(
            ModelError, match=rf"of 'Router' has made its parameter 'layer.weight' torch.*{made}.*befor"
        ):
            router(x)
    converted = Router().float()
    share_out(converted, axis, [""])
    assert converted(x).dtype == torch.float32


@on_ranks(2)
def test_the_twin_that_forgets_what_was_written_by_data_is_found(monkeypatch):
    monkeypatch.setattr(shared_out, "following", lambda *_: nullcontext())
    with pytest.raises(AssertionError):
        compare("written by .data")


@on_ranks(2)
@pytest.mark.parametrize("units", [["", "2"], ["", "0", "2"]], ids=str)
def test_transforms_take_wholes_and_say_so(units):
    axis, x = tulle.init(data=-1)["data"], torch.randn(3, 6)
    torch.manual_seed(0)
    model, plain = (nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    share_out(model, axis, units)
    wholes = tulle.full_state_dict(model, everywhere=True)
    parts = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for transform in (vmap, jacrev, lambda of: grad(lambda x: of(x).sum())):
        expected = transform(plain)(x)
        with pytest.raises(ModelError, match=r"\(vmap, grad, jacrev.*give torch.func.functional_call\(model, wholes"):
            transform(model)(x)
        assert torch.allclose(transform(partial(functional_call, model, wholes))(x), expected)
    with pytest.raises(ModelError, match=r"this rank's part, \[4, 6\], for 'weight' of .* the whole, \[8, 6\]: give"):
        functional_call(model, parts, (x,))
    for some in ("0.weight", "0.bias"):
        with pytest.raises(ModelError, match=r"given some of the parameters of .* and not others, but full_shard gath"):
            functional_call(model, {some: wholes[some]}, (x,))
    jacobian = jacrev(lambda wholes: functional_call(model, wholes, (x,)))(wholes)
    assert torch.allclose(
        jacobian["2.weight"], jacrev(lambda one: functional_call(plain, one, (x,)))(wholes)["2.weight"]
    )


@on_ranks(2)
def test_a_backward_after_one_that_failed_counts_gradients_once():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).double()
    share_out(model, tulle.init(data=-1)["data"], ["", "0", "1"])
    x = torch.ones(4, 6, dtype=torch.float64)
    for _ in range(2):
        expected = torch.autograd.grad(model(x).sum(), [*model.parameters()])
    hidden = []
    model[1].register_forward_pre_hook(lambda _, arguments: hidden.extend(arguments))
    loss = model(x).sum()

    def fail(_):
        raise FloatingPointError

    hook = hidden[0].register_hook(fail)
    with pytest.raises(FloatingPointError):
        loss.backward(retain_graph=True)
    hook.remove()
    found = torch.autograd.grad(loss, [*model.parameters()])
    torch.testing.assert_close(found, expected)


class Force(nn.Module):
    """Differentiates within."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x):
        return vmap(grad(lambda one: (one @ self.weight).tanh().sum()))(x)


@on_ranks(1)
@pytest.mark.parametrize("option", ["full_shard", "recompute", "offload"])
def test_a_module_that_differentiates_by_transforms_is_refused_by_name(option):
    axis, model = tulle.init(data=-1)["data"], nn.Sequential(Force())
    saving = {"full_shard": lambda: share_out(model, axis, [""]), "recompute": lambda: recompute(model, ["0"])}
    saving.get(option, lambda: offload(model, ["0"]))()
    with pytest.raises(ModelError, match=rf"the forward of a \w+ runs torch.func.grad.*where {option} looks.*leave"):
        model(torch.randn(3, 6))


class Counts(nn.Module):
    """Goes by how many of its numbers are trained."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x):
        return self.second(self.first(x)) * sum(p.numel() for p in self.parameters() if p.requires_grad)


@on_ranks(2)
def test_a_forward_without_gradients_finds_parameters_that_are_trained():
    torch.manual_seed(0)
    model, x = Counts().double(), torch.ones(2, 4, dtype=torch.float64)
    expected = model(x).detach()
    share_out(model, tulle.init(data=-1)["data"], [""])
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.allclose(model(x), expected)


def doubling():
    """A model whose own forward, and that of each layer, was set on the object, as Accelerate's autocast is."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), Clamped(), nn.Linear(6, 6)).double()
    for module in (model, *model.children()):
        forward = type(module).forward
        module.forward = MethodType(lambda self, x, forward=forward: 2 * forward(self, x), module)
    return model


@on_ranks(2)
@pytest.mark.parametrize("units", [[""], ["", "0", "1", "2"]], ids=str)
@pytest.mark.parametrize("recomputed", [False, True])
def test_forwards_that_were_set_on_objects_run_on_wholes(units, recomputed):
    axis, x = tulle.init(data=-1)["data"], torch.ones(3, 6, dtype=torch.float64)
    model, plain = doubling(), doubling()
    if recomputed:
        recompute(model, ["0"])
    cuts = share_out(model, axis, units)
    assert torch.equal(model(x), plain(x))
    assert torch.equal(copy.deepcopy(model)(x), plain(x))
    for one in (model, plain):
        one(x).sum().backward()
    for name, parameter in plain.named_parameters():
        expected = parameter.grad.tensor_split(axis.size, cuts[name].dim)[axis.rank]
        assert torch.allclose(model.get_parameter(name).grad.as_subclass(torch.Tensor), expected)


class Banked(nn.Module):
    """A layer of its own, and vectors that all layers and the model have, in one module."""

    def __init__(self, bank):
        super().__init__()
        self.bank, self.mix = bank, nn.Linear(6, 6)

    def forward(self, x):
        return x + torch.tanh(self.mix(x)) @ self.bank["vectors"]


class WithBank(nn.Module):
    """As VB-LoRA's model of `peft`."""

    def __init__(self, is_checkpointed):
        super().__init__()
        self.bank = nn.ParameterDict({"vectors": torch.randn(6, 6)})
        self.layers = nn.ModuleList(Banked(self.bank) for _ in range(3))
        self.is_checkpointed = is_checkpointed

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.is_checkpointed else layer(x)
        return (x @ self.bank["vectors"]).pow(2).mean()


@pytest.mark.parametrize("is_checkpointed", [False, True], ids=["as it is", "checkpointed"])
@on_ranks(2)
def test_a_module_that_units_and_the_model_have_is_gathered_for_each(is_checkpointed):
    mesh = tulle.init(data=-1)
    torch.manual_seed(0)
    model = WithBank(is_checkpointed).double()
    alone, batch = copy.deepcopy(model), torch.randn(4, 6, dtype=torch.float64)
    share_out(model, mesh["data"], ["", *(f"layers.{number}" for number in range(3))])
    for one, share in ((model, batch.chunk(2)[mesh.rank]), (alone, batch)):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        for _ in range(3):
            one(share).backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(dict(model.state_dict()), dict(alone.state_dict()), rtol=1e-12, atol=1e-14)
